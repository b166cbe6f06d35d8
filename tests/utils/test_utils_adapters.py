"""What a saved adapter needs to be loaded again: its name, base, revision and task; and callers' own peft models."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

from flatpeak.errors import UserError
from flatpeak.utils.adapter_base import ADAPTER_CONFIG, check_base, named_base
from flatpeak.utils.adapters import (
    LoraConfig,
    add_adapters,
    check_own_adapters,
    load_adapter,
    restore_adapter,
    save_adapter,
)
from support.models import run_model, tiny_model


def base(directory: Path, **settings: Any) -> Path:
    tiny_model("llama", **settings).save_pretrained(directory)
    return directory


def plain(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def own(directory: Path, *names: str, active: str, **settings: Any) -> Any:
    """A caller's peft model with adapters of these names, whose B matrices are not 0."""
    config = PeftLoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(plain(directory), config, adapter_name=names[0])
        for name in names[1:]:
            model.add_adapter(name, config)
    model.set_adapter(active)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
    return result


@pytest.mark.parametrize("names", [("default",), ("mine",), ("default", "mine")], ids="-".join)
def test_the_active_adapter_is_saved_where_peft_looks_for_it_and_restored_whatever_its_name(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    model = own(base(tmp_path / "base"), *names, active=names[-1])
    expected = logits(model)
    save_adapter(model, tmp_path / "adapter")
    assert not [path for path in (tmp_path / "adapter").iterdir() if path.is_dir()]
    assert torch.equal(logits(PeftModel.from_pretrained(plain(tmp_path / "base"), str(tmp_path / "adapter"))), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    assert not torch.equal(logits(model), expected)
    restore_adapter(model, tmp_path / "adapter")
    assert torch.equal(logits(model), expected)


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason="transformers wants a later peft",
)
def test_an_adapter_that_transformers_itself_has_added_is_restored(tmp_path: Path) -> None:
    model = plain(base(tmp_path / "base"))
    model.add_adapter(PeftLoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    check_own_adapters(model)
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    other = plain(tmp_path / "base")
    other.add_adapter(PeftLoraConfig(r=2, target_modules=["q_proj"]))
    assert not torch.equal(logits(other), expected)
    restore_adapter(other, tmp_path / "adapter")
    assert torch.equal(logits(other), expected)


def test_a_checkpoint_of_other_layers_is_not_restored(tmp_path: Path) -> None:
    base(tmp_path / "base")
    save_adapter(own(tmp_path / "base", "default", active="default"), tmp_path / "adapter")
    other = get_peft_model(plain(tmp_path / "base"), PeftLoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with pytest.raises(UserError, match=r"adapter does not fit the model at .*v_proj\.lora_A"):
        restore_adapter(other, tmp_path / "adapter")
    wider = get_peft_model(plain(tmp_path / "base"), PeftLoraConfig(r=3, target_modules=["q_proj"]))
    with pytest.raises(UserError, match=r"adapter: .*size mismatch"):
        restore_adapter(wider, tmp_path / "adapter")


def test_a_peft_model_of_which_a_checkpoint_would_lose_a_part_is_refused(tmp_path: Path) -> None:
    base(tmp_path / "base")
    check_own_adapters(plain(tmp_path / "base"))
    check_own_adapters(own(tmp_path / "base", "one", active="one", bias="all", modules_to_save=["lm_head"]))
    check_own_adapters(own(tmp_path / "base", "default", active="default", trainable_token_indices=[3]))
    both = own(tmp_path / "base", "one", "two", active="two")
    both.base_model.set_adapter(["one", "two"])
    with pytest.raises(UserError, match=r"2 active adapters \(one, two\), and a checkpoint holds one: .*set_adapter"):
        check_own_adapters(both)
    more = own(tmp_path / "base", "default", active="default")
    more.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"model\.norm\.weight is trainable and no part of the adapter default"):
        check_own_adapters(more)
    merged = own(tmp_path / "base", "default", active="default")
    merged.merge_adapter()
    with pytest.raises(UserError, match=r"merged into its base, and get no gradient: call model\.unmerge_adapter"):
        check_own_adapters(merged)
    prompts = get_peft_model(plain(tmp_path / "base"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UserError, match="PROMPT_TUNING of peft, whose virtual tokens"):
        check_own_adapters(prompts)


def test_a_saved_adapter_lists_its_layers_in_the_same_order_in_every_process(tmp_path: Path) -> None:
    save_adapter(add_adapters(run_model()[0], LoraConfig(rank=2), seed=0), tmp_path)
    layers = json.loads((tmp_path / ADAPTER_CONFIG).read_text())["target_modules"]
    assert len(layers) == 14
    assert layers == sorted(layers)


def test_an_adapter_names_a_base_in_a_directory_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    model = add_adapters(plain(Path("base")), LoraConfig(rank=2), seed=0)
    assert model.peft_config["default"].base_model_name_or_path == "base"
    save_adapter(model, tmp_path / "adapter")
    monkeypatch.chdir("/")
    assert named_base(tmp_path / "adapter", where="model.path") == (str(tmp_path / "base"), None)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"adapter of .*base, which is not there: .* or set model\.path to the base"):
        named_base(tmp_path / "adapter", where="model.path")
    with pytest.raises(UserError, match=r"rewards\.r\.path=.*base, which is not there: put that back$"):
        named_base(tmp_path / "adapter", where="rewards.r.path")
    (tmp_path / "adapter" / ADAPTER_CONFIG).write_text("{")
    with pytest.raises(UserError, match=r"adapter_config\.json: not the settings of an adapter"):
        named_base(tmp_path / "adapter", where="model.path")


def test_an_adapter_remembers_the_revision_of_its_base(tmp_path: Path) -> None:
    base(tmp_path / "base")
    first = add_adapters(plain(tmp_path / "base"), LoraConfig(rank=2), seed=0, revision="abc")
    save_adapter(first, tmp_path / "first")
    assert named_base(tmp_path / "first", where="model.path")[1] == "abc"
    config = LoraConfig(adapter=str(tmp_path / "first"))
    save_adapter(add_adapters(plain(tmp_path / "base"), config, seed=0, revision="def"), tmp_path / "second")
    assert named_base(tmp_path / "second", where="model.path")[1] == "def"
    save_adapter(load_adapter(plain(tmp_path / "base"), str(tmp_path / "first"), where="x"), tmp_path / "third")
    assert named_base(tmp_path / "third", where="model.path")[1] == "abc"


def test_loading_an_adapter_draws_nothing_from_the_generator_of_the_caller(tmp_path: Path) -> None:
    save_adapter(add_adapters(plain(base(tmp_path / "base")), LoraConfig(rank=2), seed=0), tmp_path / "adapter")
    model = plain(tmp_path / "base")
    before = torch.get_rng_state()
    load_adapter(model, str(tmp_path / "adapter"), where="model.path")
    assert torch.equal(torch.get_rng_state(), before)


def test_adapters_of_language_and_reward_models_are_not_taken_for_each_other(tmp_path: Path) -> None:
    base(tmp_path / "base")
    for task in ("CAUSAL_LM", "SEQ_CLS"):
        save_adapter(add_adapters(plain(tmp_path / "base"), LoraConfig(rank=2), seed=0), tmp_path / task)
        path = tmp_path / task / ADAPTER_CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | {"task_type": task}))
    with pytest.raises(
        UserError, match=r"CAUSAL_LM is the adapter of a language model, without a score head: .*export"
    ):
        load_adapter(plain(tmp_path / "base"), str(tmp_path / "CAUSAL_LM"), where="model.path", scores=True)
    with pytest.raises(UserError, match="SEQ_CLS is the adapter of a reward model, which scores texts"):
        load_adapter(plain(tmp_path / "base"), str(tmp_path / "SEQ_CLS"), where="model.path")


def test_a_base_with_other_bits_is_refused_by_that_reason(tmp_path: Path) -> None:
    model = add_adapters(plain(base(tmp_path / "base")), LoraConfig(rank=2), seed=0)
    save_adapter(model, tmp_path / "adapter")
    record = tmp_path / "adapter" / "adapter_base.json"
    written = json.loads(record.read_text())
    record.write_text(json.dumps(written | {"fingerprint": "other"}))
    with pytest.raises(UserError, match="was trained on other weights than those of this model"):
        check_base(model, tmp_path / "adapter", where="x")
    record.write_text(json.dumps({"fingerprint": "other", "quantization": "nf4"}))
    with pytest.raises(UserError, match=r"over a base in 4 bits, unlike this one: set model\.quantization=nf4"):
        check_base(model, tmp_path / "adapter", where="x")


def test_running_out_of_memory_is_no_mistake_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    def full(*args: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = plain(base(tmp_path / "base"))
    monkeypatch.setattr(peft, "get_peft_model", full)
    with pytest.raises(torch.OutOfMemoryError):
        add_adapters(model, LoraConfig(rank=2), seed=0)


def test_a_recipe_that_was_written_back_asks_for_no_other_adapter_than_the_one_it_named() -> None:
    def again(config: LoraConfig) -> LoraConfig:
        return LoraConfig.model_validate_json(config.model_dump_json())

    assert not any(config.asks_for_new for config in (LoraConfig(), LoraConfig(dropout=0.1)))
    assert not any(again(config).asks_for_new for config in (LoraConfig(), LoraConfig(dropout=0.1)))
    for asking in (LoraConfig(rank=16), LoraConfig(rank=4), LoraConfig(adapter="there")):
        assert asking.asks_for_new
    assert again(LoraConfig(rank=4)).asks_for_new


def test_saving_says_nothing_of_embeddings_and_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft.utils.save_and_load

    def asked(*args: Any) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(peft.utils.save_and_load, "check_file_exists_on_hf_hub", asked)
    base(tmp_path / "base", tie_word_embeddings=True)
    config = LoraConfig(rank=2, target_modules=("embed_tokens", "q_proj"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = add_adapters(plain(tmp_path / "base"), config, seed=0)
        model.peft_config["default"].base_model_name_or_path = "owner/name"
        save_adapter(model, tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert names
    assert all("lora_" in name for name in names)
