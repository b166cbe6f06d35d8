"""Exports: a directory that transformers loads alone, with the greedy answers and logits of the run's model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from flatpeak.apps.publish.export import export
from flatpeak.errors import UserError
from flatpeak.pipeline.train_reward_model import train_reward_model
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.policy.model import Policy
from flatpeak.rewards.reward_model import load_scorer
from flatpeak.utils.adapters import LoraConfig
from support.models import letter_tokenizer, tiny_model
from support.policies import plain_logprobs, uneven_batch
from support.preferences import reward_model_recipe, write_pairs

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"dora": True},
    "whole_head": {"modules_to_save": ["lm_head"]},
    "nf4": {"quantization": "nf4"},
    "nf4_of_gpt2": {"quantization": "nf4", "architecture": "gpt2"},
}


def trained(
    directory: Path, *, architecture: str = "llama", quantization: Any = None, step: float = 0.3, **lora: Any
) -> Policy:
    """A policy with adapters that have moved, saved in `directory / "adapter"`."""
    tiny_model(architecture, hidden_size=64, intermediate_size=128).save_pretrained(directory / "base")
    letter_tokenizer().save_pretrained(directory / "base")
    settings = LoraConfig(rank=4, alpha=8, **lora)
    config = ModelConfig(path=str(directory / "base"), device="cpu", lora=settings, quantization=quantization)
    policy = load_policy(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(step * torch.randn(parameter.shape, generator=generator) * parameter.std().nan_to_num(1.0))
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=step, generator=generator)
    policy.save(directory / "adapter")
    return policy


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_the_trained_model_for_whoever_has_transformers_alone(tmp_path: Path, kind: str) -> None:
    policy = trained(tmp_path, **KINDS[kind])
    result = export(tmp_path / "adapter", tmp_path / "merged")
    assert (result.dtype, result.lost) == ("float32", 0.0)
    files = {path.name for path in (tmp_path / "merged").iterdir()}
    assert "model.safetensors" in files
    assert not any(name.startswith("adapter") for name in files)
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "merged"), "quantization_config")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab() == letter_tokenizer().get_vocab()
    batch = uneven_batch(24)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        with policy.plain_attention() as model:
            greedy = model.eval().generate(input_ids=ids, max_new_tokens=20, do_sample=False)
        assert torch.equal(alone.eval().generate(ids, max_new_tokens=20, do_sample=False), greedy)
        expected = plain_logprobs(policy, batch, 1.0)
        exported = plain_logprobs(Policy(alone, letter_tokenizer()), batch, 1.0)
        torch.testing.assert_close(exported, expected, atol=2e-4, rtol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        assert (plain_logprobs(Policy(plain, letter_tokenizer()), batch, 1.0) - expected).abs().max() > 0.1


def test_rounding_that_takes_what_was_learned_is_refused_with_the_type_that_keeps_it(tmp_path: Path) -> None:
    trained(tmp_path, step=2e-4)
    with pytest.raises(UserError, match=r"in bfloat16 rounding would take \d+% .* export with --dtype float32"):
        export(tmp_path / "adapter", tmp_path / "merged", dtype="bfloat16")
    assert not (tmp_path / "merged").exists()
    assert export(tmp_path / "adapter", tmp_path / "merged", dtype="float32").lost == 0.0


def test_what_rounding_takes_is_the_norm_of_the_error_over_that_of_the_adapters_part(tmp_path: Path) -> None:
    policy = trained(tmp_path)
    result = export(tmp_path / "adapter", tmp_path / "merged", dtype="bfloat16")
    learned, error = 0.0, 0.0
    for module in policy.model.modules():
        if hasattr(module, "get_delta_weight"):
            weight = module.get_base_layer().weight.detach().double()
            delta = 2.0 * module.lora_B["default"].weight.double() @ module.lora_A["default"].weight.double()
            merged = (weight + delta).detach()
            learned += float(delta.detach().square().sum())
            error += float((merged.float().bfloat16().double() - merged).square().sum())
    assert result.lost == pytest.approx((error / learned) ** 0.5, rel=1e-3)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert saved.dtype == torch.bfloat16
    assert saved.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_run_exports_the_checkpoint_that_is_asked_for_without_the_state_of_the_trainer(
    recipe: Callable[..., Any], train: Any, tmp_path: Path
) -> None:
    def lengths(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    run = train(recipe(run={"checkpoint_every": 1}), reward=lengths).path
    for checkpoint in ("best", "last", "1", "0"):
        result = export(run, tmp_path / checkpoint, checkpoint=checkpoint)
        assert {path.name for path in result.path.iterdir()}.isdisjoint({"trainer", "manifest.json"})
        source = run / "checkpoints" / (checkpoint if not checkpoint.isdecimal() else f"step_00000{checkpoint}")
        assert (result.path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    half = export(run, tmp_path / "half", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(half.path, dtype="auto").dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"--checkpoint 9: .* has .*step_000001.*; give best, last, sft or the number"):
        export(run, tmp_path / "nine", checkpoint="9")
    with pytest.raises(UserError, match="exists and is not empty: give a new directory"):
        export(run, tmp_path / "last")


@pytest.mark.parametrize("settings", [{"bias": "all"}, {"bias": "lora_only"}, {"init_lora_weights": "pissa"}], ids=str)
def test_the_adapter_of_a_caller_that_changes_more_of_the_base_is_exported_too(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    tiny_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")  # a qwen2, with biases
    letter_tokenizer().save_pretrained(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = get_peft_model(plain, PeftLoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    policy = Policy(adapted, letter_tokenizer())
    policy.save(tmp_path / "adapter")
    policy.release()
    export(tmp_path / "adapter", tmp_path / "merged")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected, exported = adapted.eval()(input_ids=ids).logits, alone.eval()(input_ids=ids).logits
    torch.testing.assert_close(exported, expected, atol=2e-4, rtol=1e-4)


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    tokenizer = type(letter_tokenizer())

    def full(*args: Any, **settings: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "save_pretrained", full)
        with pytest.raises(UserError, match=r"merged cannot be written \(.*No space left"):
            export(tmp_path / "adapter", tmp_path / "merged")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}
    (tmp_path / "merged").mkdir()
    export(tmp_path / "adapter", tmp_path / "merged")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "merged"}


def test_the_tokenizer_is_that_of_the_adapter_or_where_it_has_none_that_of_the_base(tmp_path: Path) -> None:
    policy = trained(tmp_path)
    path = str(tmp_path / "adapter")
    own: Any = copy.deepcopy(policy.tokenizer)
    own.chat_template = "{{ messages[0].content }}"
    own.save_pretrained(path)
    for config in (ModelConfig(path=path, device="cpu"), ModelConfig(path=str(tmp_path / "base"), device="cpu")):
        lora = None if config.path == path else LoraConfig(adapter=path)
        again = load_policy(config.model_copy(update={"lora": lora}))
        assert again.tokenizer.chat_template == own.chat_template
    export(path, tmp_path / "own")
    assert AutoTokenizer.from_pretrained(tmp_path / "own").chat_template == own.chat_template
    for file in (tmp_path / "adapter").iterdir():
        if not file.name.startswith("adapter"):
            file.unlink()
    assert load_policy(ModelConfig(path=path, device="cpu")).tokenizer.chat_template is None
    export(path, tmp_path / "of_base")
    assert AutoTokenizer.from_pretrained(tmp_path / "of_base").get_vocab() == own.get_vocab()


def test_a_checkpoint_is_asked_for_of_a_run_only(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(UserError, match=r"--checkpoint last: .*adapter is not a run's directory"):
        export(tmp_path / "adapter", tmp_path / "merged", checkpoint="last")


@pytest.mark.slow
@pytest.mark.parametrize("model", [{"lora": {"rank": 4}}, {"lora": {"rank": 4}, "quantization": "nf4"}, {}], ids=str)
def test_the_export_of_a_reward_model_scores_as_it_does(tmp_path: Path, model: dict[str, Any]) -> None:
    tiny_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    letter_tokenizer().save_pretrained(tmp_path / "base")
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    source = {"path": str(tmp_path / "base"), "new": None, **model}
    recipe = reward_model_recipe(
        tmp_path / "runs", pairs, model=source, reward_model={"template": "plain"}, run={"name": "judge"}
    )
    run = train_reward_model(recipe, progress=False).path
    result = export(run, tmp_path / "merged", dtype="float32")
    assert result.lost == (0.0 if model else None)
    assert not list((tmp_path / "merged").glob("adapter*"))
    texts = [[3, 4, 5], [6, 7, 8, 9, 10, 11]]
    scores = [
        load_scorer(where="rewards.preference", path=str(path), device="cpu").classifier.score_all(texts)
        for path in (run, tmp_path / "merged")
    ]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    assert abs(scores[0][0] - scores[0][1]) > 1e-2
