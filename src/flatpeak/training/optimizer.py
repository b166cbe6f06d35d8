"""The optimizer, its learning-rate schedule, and its state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flatpeak.training.config import OptimizerConfig


def build_optimizer(parameters: Sequence[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters, or the masters of those in a lower precision."""
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(config: OptimizerConfig, *, step: int, total_steps: int) -> float:
    """The rate of step 1, 2, ...: a linear warm-up, then constant, or down to final_fraction at the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - 1 - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
    remaining = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[config.schedule]
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * remaining)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use this rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by "<parameter index>.<name>"."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value.clone()
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
