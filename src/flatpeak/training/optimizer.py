"""The update that all training shares: optimizer, learning rate, masters, clipping, and their state as tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from flatpeak.errors import DIVERGED, DivergedError, UserError
from flatpeak.training.config import OptimizerConfig

_Value = TypeVar("_Value")
MASTERS = "master."
"""Prefix of the masters' names in a checkpoint."""


def build_optimizer(parameters: Sequence[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters, or the masters of those in a lower precision."""
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    if config.name == "adamw_8bit":
        return _adamw_8bit(parameters, config)
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _adamw_8bit(parameters: Sequence[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW with blockwise quantized moments (Dettmers et al. 2022, arXiv 2110.02861); tensors of fewer than 4,096
    elements keep theirs in float32."""
    try:
        from bitsandbytes.optim import AdamW8bit  # here, because bitsandbytes is an extra
    except ImportError as error:
        raise UserError("optimizer.name=adamw_8bit needs bitsandbytes: pip install bitsandbytes") from error
    optimizer: torch.optim.Optimizer = AdamW8bit(
        parameters, lr=config.learning_rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    return optimizer


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
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, parameter in enumerate(_parameters(optimizer))
        for name, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back the state that `optimizer_tensors` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value.clone()
    if isinstance(optimizer, torch.optim.AdamW | torch.optim.SGD):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return
    # bitsandbytes counts steps in an int, and its own load_state_dict would cast quantized moments.
    for position, parameter in enumerate(_parameters(optimizer)):
        for name, value in state.get(position, {}).items():
            optimizer.state[parameter][name] = int(value) if name == "step" else value.to(parameter.device)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class MasterWeights:
    """Steps a master in a weight's stead and writes it, rounded, back into the weight.

    Half a bfloat16 step is 1/512 of a weight, far more than most updates: added to the weight itself they would round
    away. Gradients are summed over micro-batches in the master's type too, in `.grad` itself: autograd converts each
    micro-batch's as it adds it, so that a rounded copy of all of them never exists beside the sum.

    Nothing here touches a weight that is its own master.
    """

    def __init__(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Copy the weights as they are: the stage before, or a checkpoint's model, has left nothing else."""
        self.stepped = list(masters.values())
        """The tensors that the optimizer steps, in the parameters' order."""
        self.pairs = {index: (w, m) for index, (w, m) in enumerate(masters.items()) if m is not w}
        for weight, master in self.pairs.values():
            weight.grad = None
            weight.grad_dtype = master.dtype
            master.copy_(weight.detach())

    def zero_grad(self) -> None:
        """Clear the weights' gradients; the optimizer clears the masters'."""
        for weight, _ in self.pairs.values():
            weight.grad = None

    def take_gradients(self) -> None:
        """Move each weight's gradient to its master, where it is clipped and stepped."""
        for weight, master in self.pairs.values():
            master.grad, weight.grad = weight.grad, None

    @torch.no_grad()
    def write(self) -> None:
        """Round the masters into the weights, in place: captured graphs and packed copies know their addresses."""
        for weight, master in self.pairs.values():
            weight.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """The masters for a checkpoint, by the position of their weight."""
        return {str(index): master for index, (_, master) in self.pairs.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from saved masters, and round them into the weights."""
        own = self.tensors()
        if own.keys() != tensors.keys():
            raise UserError(
                f"the checkpoint holds float32 masters of {len(tensors)} weights and this model needs those of "
                f"{len(own)}: resume with the model and the model.dtype that the run began with"
            )
        for name, master in own.items():
            master.copy_(tensors[name])
        self.write()


@dataclass(kw_only=True, slots=True)
class UpdateStatistics:
    """Loss and gradient of one update, over all its micro-batches."""

    loss: float = 0.0
    grad_norm: float = 0.0
    """Norm of the gradient before clipping."""
    skipped: bool = False
    """Whether the gradient was not finite, so that the weights were left as they were."""


Data = TypeVar("Data")
Statistics = TypeVar("Statistics", bound=UpdateStatistics)


class BaseLearner(ABC, Generic[Data, Statistics]):
    """An optimizer over a model's weights; `update` accumulates the gradient of a loss, clips it once and steps."""

    def __init__(self, masters: Mapping[nn.Parameter, Tensor], config: OptimizerConfig) -> None:
        self.config = config
        self.masters = MasterWeights(masters)
        self.optimizer = build_optimizer(self.masters.stepped, config)
        self.updates = 0
        """Number of updates that have begun to change weights and optimizer."""
        self.updating = False
        """Whether an update is under way, or was left by an error."""

    @property
    def native(self) -> bool | None:
        """Whether the model is trained packed rather than padded; None where there is no choice."""
        return None

    @abstractmethod
    def accumulate_gradients(self, *batches: Data) -> Statistics:
        """Add the gradient of the loss to `.grad`, one micro-batch at a time."""

    @abstractmethod
    def save_model(self, directory: Path) -> None:
        """Write the model in Hugging Face format."""

    def update(self, *batches: Data, rate: float) -> Statistics:
        """Step the optimizer once, with the gradient of all the batches together.

        A gradient that is not finite changes nothing and is reported as skipped.
        """
        self.updating = True
        set_learning_rate(self.optimizer, rate)
        self.zero_grad()
        statistics = self.accumulate_gradients(*batches)
        self.masters.take_gradients()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.masters.stepped, self.config.max_grad_norm or float("inf"))
        statistics.grad_norm = float(grad_norm)
        statistics.skipped = not bool(torch.isfinite(grad_norm))
        if not statistics.skipped:
            self.updates += 1
            self.optimizer.step()
            self.masters.write()
        self.updating = False
        return statistics

    def zero_grad(self) -> None:
        """Clear all gradients, the weights' and the masters'."""
        self.optimizer.zero_grad()
        self.masters.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """The state in tensors, for a checkpoint."""
        return optimizer_tensors(self.optimizer) | with_prefix(MASTERS, self.masters.tensors())

    def state(self) -> dict[str, Any]:
        """The rest of the state, as JSON."""
        return {}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state` and `tensors`."""
        masters, others = split_prefix(MASTERS, tensors)
        self.masters.load(masters)
        # A fork may have left gradient regularization, whose tensors have names of their own.
        load_optimizer_tensors(self.optimizer, {name: t for name, t in others.items() if name[0].isdecimal()})


def check_finite(optimizer: torch.optim.Optimizer, *, step: int) -> None:
    """Raise DivergedError where a trained weight is NaN or infinite: such a checkpoint could not be trained on."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    if not all(bool(torch.isfinite(weight).all()) for weight in weights):
        raise DivergedError(f"the weights are NaN or infinite after step {step} and are not saved: {DIVERGED}")


def with_prefix(prefix: str, tensors: Mapping[str, _Value]) -> dict[str, _Value]:
    """Put a prefix before every name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def split_prefix(prefix: str, tensors: Mapping[str, _Value]) -> tuple[dict[str, _Value], dict[str, _Value]]:
    """Split off the tensors under a prefix, named without it, from all others."""
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return own, {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
