"""Adapters: packed gradients equal peft's padded ones, what is drawn and frozen, and adapters that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flatpeak.errors import UserError
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import adapter_source, load_policy, resumed_source
from flatpeak.policy.model import Policy
from flatpeak.utils.adapter_base import RECORD, fingerprint
from flatpeak.utils.adapters import LoraConfig
from flatpeak.utils.quantization import loading_options
from support.models import letter_tokenizer, tiny_model
from support.policies import gradients, largest_gap, plain_logprobs, tokens_and_weights, uneven_batch

TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"], "gemma2": ["v_proj", "up_proj"]}


def saved(directory: Path, architecture: str = "llama", **settings: Any) -> Path:
    """The directory of a tiny model and its tokenizer."""
    tiny_model(architecture, **settings).save_pretrained(directory)
    letter_tokenizer().save_pretrained(directory)
    return directory


def loaded(base: Path, *, dtype: Any = "float32", quantization: Any = None, **lora: Any) -> Policy:
    lora = {"rank": 4, "alpha": 8, **lora} if "adapter" not in lora else lora
    config = ModelConfig(path=str(base), device="cpu", dtype=dtype, quantization=quantization, lora=LoraConfig(**lora))
    return load_policy(config, seed=3)


def moved(policy: Policy) -> Policy:
    """The policy with random B matrices: as they begin, at 0, the adapters have no effect and A no gradient."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=generator)
    return policy


@pytest.mark.parametrize("variant", [{}, {"rslora": True}, {"dora": True}], ids=["lora", "rslora", "dora"])
@pytest.mark.parametrize("architecture", TARGETS)
def test_packed_gradients_are_those_of_the_padded_forward_of_peft(
    tmp_path: Path, architecture: str, variant: dict[str, Any]
) -> None:
    base = saved(tmp_path / "base", architecture, scale=2.0)
    policy = moved(loaded(base, target_modules=TARGETS[architecture], **variant))
    assert policy.native, policy.notice
    batch = uneven_batch(24)
    weights_T = tokens_and_weights(batch)
    theirs = gradients(policy, (plain_logprobs(policy, batch, 0.7) * weights_T).sum())
    logprobs_T, _ = policy.token_logprobs(batch, temperature=0.7)
    ours = gradients(policy, (logprobs_T * weights_T).sum())
    assert len(ours) >= 8
    assert all(bool(gradient.any()) for gradient in theirs)
    # Soft caps round more.
    assert largest_gap(ours, theirs) < (3e-6 if architecture == "gemma2" else 1e-6)


def test_all_linear_layers_but_the_output_get_adapters_in_float32_over_a_base_in_bfloat16(tmp_path: Path) -> None:
    policy = loaded(saved(tmp_path / "base"), dtype="bfloat16")
    layers = {
        name.split(".lora_A")[0].rpartition(".")[2] for name, _ in policy.model.named_parameters() if "lora_A" in name
    }
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    kinds = {("lora_" in name, p.requires_grad, p.dtype) for name, p in policy.model.named_parameters()}
    assert kinds == {(True, True, torch.float32), (False, False, torch.bfloat16)}


def test_new_adapters_are_drawn_from_the_seed_alone_and_change_nothing_yet(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = {name: p.detach().clone() for name, p in loaded(base).model.named_parameters() if "lora_" in name}
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    second = loaded(base)
    for name, parameter in second.model.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, first[name])
            assert bool(parameter.any()) == ("lora_A" in name)
    batch = uneven_batch(24)
    plain = load_policy(ModelConfig(path=str(base), device="cpu"))
    with torch.no_grad():
        expected, _ = plain.token_logprobs(batch, temperature=1.0)
        assert torch.equal(second.token_logprobs(batch, temperature=1.0)[0], expected)


@pytest.mark.parametrize("variant", [{}, {"dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_a_saved_adapter_is_loaded_by_its_directory_or_as_the_adapter_of_its_base(
    tmp_path: Path, variant: dict[str, Any]
) -> None:
    base = saved(tmp_path / "base", tie_word_embeddings=False)
    policy = moved(loaded(base, **variant))
    policy.save(tmp_path / "adapter")
    batch = uneven_batch(24)
    with torch.no_grad():
        expected, _ = policy.token_logprobs(batch, temperature=1.0)
        for again in (
            load_policy(ModelConfig(path=str(tmp_path / "adapter"), device="cpu")),
            loaded(base, adapter=str(tmp_path / "adapter")),
        ):
            assert torch.equal(again.token_logprobs(batch, temperature=1.0)[0], expected)
            assert len(again.parameters()) == len(policy.parameters())


def test_four_bits_are_remembered_with_the_adapter(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", hidden_size=64, intermediate_size=128)
    policy = moved(loaded(base, quantization="nf4"))
    assert policy.native, policy.notice
    policy.save(tmp_path / "adapter")
    again = load_policy(ModelConfig(path=str(tmp_path / "adapter"), device="cpu"))
    kinds = [type(p).__name__ for p in again.model.parameters()]
    assert kinds.count("Params4bit") == 14
    batch = uneven_batch(24)
    with torch.no_grad():
        expected, _ = policy.token_logprobs(batch, temperature=1.0)
        assert torch.equal(again.token_logprobs(batch, temperature=1.0)[0], expected)


def test_a_quantized_base_is_the_same_after_decoding_and_gives_its_input_gradients(tmp_path: Path) -> None:
    policy = moved(loaded(saved(tmp_path / "base", hidden_size=64, intermediate_size=128), quantization="nf4"))
    packed = [p.detach().clone() for p in policy.model.parameters() if type(p).__name__ == "Params4bit"]
    batch = uneven_batch(24)
    weights_T = tokens_and_weights(batch)
    policy.model.eval()
    with torch.no_grad():
        plain_logprobs(policy, batch, 1.0)
    assert all(
        torch.equal(before, after)
        for before, after in zip(
            packed, (p for p in policy.model.parameters() if type(p).__name__ == "Params4bit"), strict=True
        )
    )
    theirs = gradients(policy, (plain_logprobs(policy, batch, 1.0) * weights_T).sum())
    ours = gradients(policy, (policy.token_logprobs(batch, temperature=1.0)[0] * weights_T).sum())
    assert all(bool(gradient.any()) for gradient in theirs)
    assert largest_gap(ours, theirs) < 1e-6


@pytest.mark.parametrize(("rate", "differ"), [(0.0, False), (0.5, True)])
def test_the_dropout_of_adapters_is_a_switch_of_its_own(tmp_path: Path, rate: float, differ: bool) -> None:
    policy = moved(loaded(saved(tmp_path / "base", "gpt2", resid_pdrop=0.3), dropout=rate, target_modules=["c_attn"]))
    batch = uneven_batch(24)
    first, second = (policy.token_logprobs(batch, temperature=1.0)[0].detach() for _ in range(2))
    assert torch.equal(first, second) != differ
    with torch.no_grad():
        assert torch.equal(*(policy.token_logprobs(batch, temperature=1.0)[0] for _ in range(2)))
    dropouts = {
        (name.endswith("lora_dropout.default"), m.p) for name, m in policy.model.named_modules() if hasattr(m, "p")
    }
    assert dropouts <= {(False, 0.0), (True, rate)}


def test_the_fingerprint_of_a_base_is_that_of_its_values_whatever_the_type_or_the_adapters(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    prints = {
        fingerprint(loaded(base).model),
        fingerprint(moved(loaded(base, rank=2, target_modules=["q_proj"])).model),
        fingerprint(loaded(base, dtype="bfloat16").model),
        fingerprint(loaded(base, dora=True, modules_to_save=["lm_head"]).model),
    }
    assert len(prints) == 1
    assert fingerprint(loaded(saved(tmp_path / "other", seed=1)).model) not in prints


def test_an_adapter_over_other_weights_is_refused(tmp_path: Path) -> None:
    loaded(saved(tmp_path / "base")).save(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"adapter was trained on other weights .*base when it was saved"):
        loaded(saved(tmp_path / "other", seed=1), adapter=str(tmp_path / "adapter"))
    saved(tmp_path / "base", seed=2)
    with pytest.raises(UserError, match="was trained on other weights"):
        load_policy(ModelConfig(path=str(tmp_path / "adapter"), device="cpu"))
    (tmp_path / "adapter" / RECORD).unlink()
    with pytest.raises(UserError, match=r"model\.lora\.adapter=.*(size mismatch|does not fit)"):
        loaded(saved(tmp_path / "wider", hidden_size=32), adapter=str(tmp_path / "adapter"))
    with pytest.raises(UserError, match=r"does not fit the model at|not found"):
        loaded(saved(tmp_path / "shallower", num_hidden_layers=1), adapter=str(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["query"]}, r"target_modules: no module is called query; there are .*q_proj"),
        ({"modules_to_save": ["head"]}, r"modules_to_save: no module is called head; there are .*lm_head"),
        ({"adapter": "./nowhere"}, r"model\.lora\.adapter=\./nowhere"),
        ({"target_modules": ["lm_head"]}, "exclude lm_head from adapters"),
    ],
)
def test_adapters_that_cannot_be_made_name_the_fix(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        loaded(saved(tmp_path / "base", tie_word_embeddings=False), **settings)
    assert "\n" not in str(error.value)


def test_a_quantized_model_needs_the_key_that_says_so(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", hidden_size=64, intermediate_size=128)
    settings = loading_options("nf4", dtype=torch.float32, device=torch.device("cpu"))
    AutoModelForCausalLM.from_pretrained(base, **settings).save_pretrained(tmp_path / "quantized")
    letter_tokenizer().save_pretrained(tmp_path / "quantized")
    with pytest.raises(UserError, match=r"has quantized weights: .* set model\.quantization=nf4"):
        loaded(tmp_path / "quantized")
    again = loaded(tmp_path / "quantized", quantization="nf4")
    assert sum(type(p).__name__ == "Params4bit" for p in again.model.parameters()) == 14


def test_an_adapter_as_the_model_stands_for_its_base_with_the_adapter(tmp_path: Path) -> None:
    settings = {"base_model_name_or_path": "org/base", "revision": "abc", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    source = adapter_source(ModelConfig(path=str(tmp_path)))
    assert (source.path, source.revision, source.lora) == ("org/base", "abc", LoraConfig(adapter=str(tmp_path)))
    resumed = resumed_source(source, tmp_path / "step_000002")
    assert (resumed.path, resumed.lora) == ("org/base", LoraConfig(adapter=str(tmp_path / "step_000002")))
    with pytest.raises(UserError, match="is already an adapter"):
        adapter_source(ModelConfig(path=str(tmp_path), lora=LoraConfig(rank=4)))
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    with pytest.raises(UserError, match="does not name its base"):
        adapter_source(ModelConfig(path=str(tmp_path)))
