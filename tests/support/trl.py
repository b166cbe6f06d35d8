"""Tiny Hugging Face trainers on fixed rollouts and fixed rows, on CPU in float32."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flatpeak.integrations.hf_trainer import GradientRegularizedTrainer, GradientRegularizedTrainingArguments
from support.models import EOS, letter_tokenizer, tiny_model

LIMIT = 6
"""Longest completion."""
PROMPTS = {"first": (3, 7, 12, 9, 4), "second": (20, 5), "third": (8, 8, 14), "fourth": (6, 11, 3, 17, 10, 5, 19)}
COMPLETIONS = {
    "first": [(4, 9, EOS), (12, EOS), (5, 17, 3, 8, 21, EOS), (7, 7, 13, EOS)],
    "second": [(10, EOS), (3, 18, 6, EOS), (EOS,), (22, 4, 9, 5, EOS)],
    "third": [(16, 3, EOS), (11, 19, 14, 6, 4, 8), (20, 15, 9, 12, EOS), (5, EOS)],
    "fourth": [(9, 13, 10, EOS), (21, 6, EOS), (18, 3, 7, 7, 4, EOS), (14, 5, 11, 20, EOS)],
}
REWARDS = {
    "first": (1.0, 0.0, 0.0, 1.0),
    "second": (0.5, 0.25, 0.5, 1.0),
    "third": (0.0, 0.0, 0.25, 1.0),
    "fourth": (-1.0, 2.0, 0.375, 0.375),
}
ROWS = [(name, index) for name in PROMPTS for index in range(len(COMPLETIONS[name]))]
SETTINGS: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "max_steps": 3,
}
"""Plain gradient descent, so that the weights show the gradient."""
RATE = SETTINGS["learning_rate"]
STRENGTH = 0.3
SCALE = 4.0
"""Of the models' matrices."""
EPS = 1e-2
"""Far enough that rounding, divided by it, does not show."""
GRAD_REG = {"grad_reg_strength": STRENGTH, "grad_reg_eps": EPS}


def need_trl() -> None:
    """Skip without TRL, but fail in CI, where tests have to be complete."""
    if not os.environ.get("CI"):
        pytest.importorskip("trl")


def saved_model(directory: Path, architecture: str = "qwen2", **settings: Any) -> Any:
    """A tiny model that was loaded from a directory: TRL loads its reference from there."""
    tiny_model(architecture, scale=SCALE, **settings).save_pretrained(directory / "model")
    return AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)


@torch.no_grad()
def shift(model: Any, *, size: float = 0.05) -> None:
    """Move every weight: a reference that is the policy would have no KL."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


def rollout(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """The fixed completions of the prompts, each of which TRL asks for once per completion."""
    slots = list(zip(prompts, counted(prompts), strict=True))
    return {
        "prompt_ids": [list(PROMPTS[name]) for name, _ in slots],
        "completion_ids": [list(COMPLETIONS[name][index]) for name, index in slots],
        "logprobs": None,
        "fixed_reward": [REWARDS[name][index] for name, index in slots],
    }


def counted(names: Sequence[str]) -> list[int]:
    """Count the earlier occurrences of each name."""
    return [list(names[:index]).count(name) for index, name in enumerate(names)]


def fixed_reward(completions: Any, fixed_reward: list[float], **columns: Any) -> list[float]:
    """Return the rewards of the rollout."""
    return fixed_reward


def rollout_trainer(trainer: type, config: type, model: Any, directory: Path, **settings: Any) -> Any:
    """A GRPO or RLOO trainer of all fixed rollouts; `gradient_accumulation_steps` cuts them into micro-batches."""
    from datasets import Dataset

    merged = {**SETTINGS, "max_completion_length": LIMIT, "num_generations": 4, "shuffle_dataset": False, **settings}
    extra = {name: merged.pop(name) for name in ("callbacks", "peft_config") if name in merged}
    merged.setdefault("per_device_train_batch_size", len(ROWS) // merged.get("gradient_accumulation_steps", 1))
    return trainer(
        model,
        reward_funcs=[fixed_reward],
        args=config(output_dir=str(directory / "run"), **merged),
        train_dataset=Dataset.from_list([{"prompt": name} for name in PROMPTS]),
        processing_class=letter_tokenizer(),
        rollout_func=rollout,
        **extra,
    )


def trained(trainer: Any) -> Any:
    trainer.train()
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    """Every value of a metric that the trainer logged."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def grpo_trainer(directory: Path, *, model: Any = None, **settings: Any) -> Any:
    """Make TRL's GRPOTrainer with gradient regularization."""
    from flatpeak.integrations import trl as ours

    kinds = ours.GradientRegularizedGRPOTrainer, ours.GradientRegularizedGRPOConfig
    return rollout_trainer(*kinds, saved_model(directory) if model is None else model, directory, **GRAD_REG | settings)


def stock_grpo_trainer(directory: Path, **settings: Any) -> Any:
    """TRL's own. Making a trainer seeds everything, so a comparison trains one before it makes the other."""
    import trl

    return rollout_trainer(trl.GRPOTrainer, trl.GRPOConfig, saved_model(directory), directory, **settings)


def token_rows() -> list[dict[str, list[int]]]:
    """Rows for a causal language model."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(3, 20, (8, 7), generator=generator).tolist()
    # The first token is no target: whether transformers counts it depends on the model.
    return [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]


def plain_trainer(directory: Path, kind: type | None = None, *, model: Any = None, **settings: Any) -> Any:
    """A regularized transformers.Trainer of a GPT-2 on all of these rows, in two micro-batches."""
    from datasets import Dataset

    merged = {**SETTINGS, "gradient_accumulation_steps": 2, **GRAD_REG, "max_steps": 2}
    merged = {**merged, "per_device_train_batch_size": 4, **settings}
    return (kind or GradientRegularizedTrainer)(
        saved_model(directory, "gpt2") if model is None else model,
        args=GradientRegularizedTrainingArguments(output_dir=str(directory / "run"), **merged),
        train_dataset=Dataset.from_list(token_rows()),
    )


def cross_entropy(model: Any) -> Tensor:
    """The mean over all targets of those rows."""
    ids = torch.tensor([row["input_ids"] for row in token_rows()])
    logprobs = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), -1)
    return -logprobs.gather(2, ids[:, 1:, None]).mean()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference of any weight."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)
