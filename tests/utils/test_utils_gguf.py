import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from flatpeak.errors import UserError
from flatpeak.pipeline.model_source import locate_model
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.rewards.sequence_classifier import load_model, locate
from flatpeak.utils.adapters import LoraConfig, add_adapters, save_adapter
from flatpeak.utils.gguf import dequantized, find_gguf
from flatpeak.utils.huggingface import is_surely_local
from support.gguf import TEMPLATE, gguf_model, write_gguf

TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35]])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def policy_logits(**settings: object) -> torch.Tensor:
    with load_policy(ModelConfig(**settings)).plain_attention() as model:
        return logits(model)


@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 1e-6), ("Q8_0", 0.05)])
def test_a_gguf_file_loads_as_the_model_that_it_was_made_of(tmp_path: Path, kind: str, tolerance: float) -> None:
    expected = logits(gguf_model())
    policy = load_policy(ModelConfig(path=str(write_gguf(tmp_path / "m.gguf", gguf_model(), kind=kind))))
    assert policy.tokenizer.chat_template == TEMPLATE
    assert policy.tokenizer.eos_token_id == 258
    with policy.plain_attention() as model:
        gap = (logits(model) - expected).abs().max() / expected.abs().max()
    assert gap < tolerance
    assert (gap > 1e-4) == (kind == "Q8_0")


def test_the_dequantized_directory_is_made_once_and_loads_in_transformers_as_plain_weights(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf_model(), kind="Q8_0")
    directory = dequantized(file)
    made = (directory / "config.json").stat().st_mtime_ns
    assert dequantized(file) == directory
    assert (directory / "config.json").stat().st_mtime_ns == made
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(logits(plain), policy_logits(path=str(file)))
    assert AutoTokenizer.from_pretrained(directory).chat_template == TEMPLATE


def test_another_file_of_the_same_name_is_dequantized_anew(tmp_path: Path) -> None:
    before = dequantized(write_gguf(tmp_path / "m.gguf", gguf_model()))
    assert dequantized(write_gguf(tmp_path / "m.gguf", gguf_model(), kind="Q8_0")) != before


def test_a_directory_stands_for_its_only_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf_model())
    assert find_gguf(str(tmp_path)) == file
    assert load_policy(ModelConfig(path=str(tmp_path))).tokenizer.eos_token_id == 258
    (tmp_path / "n.gguf").touch()
    with pytest.raises(UserError, match=r"has 2 GGUF files: name one, as .*m\.gguf \(m\.gguf, n\.gguf\)"):
        load_policy(ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").touch()
    assert find_gguf(str(tmp_path)) is None


def test_an_adapter_names_the_gguf_file_as_its_base(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf_model())
    policy = load_policy(ModelConfig(path=str(file), lora=LoraConfig(rank=2)))
    policy.save(tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(file)
    with policy.plain_attention() as model:
        assert torch.equal(policy_logits(path=str(tmp_path / "adapter")), logits(model))


def test_a_gguf_file_that_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", gguf_model())
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size * 3 // 4])
    other = write_gguf(tmp_path / "other.gguf", gguf_model(), architecture="abacus")
    for file, reason in ((cut, "cut short"), (other, "architecture abacus is not supported")):
        with pytest.raises(UserError, match=rf"model\.path=.*does not load: .*{reason}"):
            load_policy(ModelConfig(path=str(file)))
    with pytest.raises(UserError, match=r"no such directory or GGUF file"):
        load_policy(ModelConfig(path=str(tmp_path / "none.gguf")))


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf_model())

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        with pytest.raises(
            UserError, match=r"/cache/flatpeak/gguf \(I/O error: No space left.*\): make room there, or set XDG"
        ):
            load_policy(ModelConfig(path=str(file)))
    assert list((tmp_path / "cache" / "flatpeak" / "gguf").iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(UserError, match=r"m\.gguf/flatpeak/gguf \(.*Not a directory.*\): make room there, or set XDG"):
        load_policy(ModelConfig(path=str(file)))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(UserError, match="no home for the weights of a GGUF file: set XDG_CACHE_HOME"):
        dequantized(file)


def test_a_reward_model_and_its_adapters_begin_with_a_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf_model())
    settings = {"where": "model.path", "device": torch.device("cpu")}
    assert [locate(str(path), where="model.path") for path in (file, tmp_path)] == [str(file), str(tmp_path)]
    with pytest.raises(UserError, match=r"has no score\.weight: it is not a reward model"):
        load_model(str(file), **settings)
    base, _, _ = load_model(str(file), trained=False, num_labels=1, **settings)
    model = add_adapters(base, LoraConfig(rank=2), seed=0, head="score")
    save_adapter(model, tmp_path / "adapter")
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(file)
    again, _, _ = load_model(str(tmp_path / "adapter"), **settings)
    assert torch.equal(again.score(torch.ones(32)), model.score(torch.ones(32)))


def test_a_judge_reads_a_gguf_file(tmp_path: Path) -> None:
    from flatpeak.rewards.judge.local import LocalJudge

    path = str(write_gguf(tmp_path / "m.gguf", gguf_model()))
    assert LocalJudge(path, device="cpu").identity.startswith(f"{path} (")


def test_eval_and_chat_find_a_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf_model())
    assert locate_model(str(file)).path == str(file)


def test_a_gguf_file_on_the_hub_has_three_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf_model())
    asked = []

    def download(repository, name, revision=None):
        asked.append((repository, name, revision))
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert find_gguf("org/name/m.gguf", revision="v1") == file
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: ["README.md", "m.gguf"])
    assert find_gguf("org/name-GGUF") == file
    assert asked == [("org/name", "m.gguf", "v1"), ("org/name-GGUF", "m.gguf", None)]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: ["a.gguf", "m.gguf"])
    with pytest.raises(UserError, match=r"org/name-GGUF has 2 GGUF files: name one, as org/name-GGUF/a\.gguf"):
        find_gguf("org/name-GGUF")
    assert not is_surely_local("org/name/m.gguf")
    assert is_surely_local("m.gguf")
    assert is_surely_local("models/m.gguf")
