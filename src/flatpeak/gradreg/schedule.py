"""The schedule of the strength (delay, warm-up, a tracked or calibrated ratio); the penalty between second passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.shards import Gradients, distribute_like, full_tensor

DECAY = 0.9
"""Decay per update of the exponential average of the tracked strength."""
RATIO_BOUND = 2.0
"""Upper bound of an update's ratio, in wanted ratios, if the tracked strength lags behind the curvature."""

CALIBRATION_UPDATES = 20
"""Informative updates over which `calibrated:R` tracks the strength before freezing it."""
CALIBRATED_FOR = {
    "strength", "penalty", "direction", "ratio_mode", "kl_in_penalty", "perturbed", "group_fraction"
}  # fmt: skip
"""The settings that determine which strength gives a ratio."""


@dataclass(kw_only=True, slots=True)
class StrengthSchedule:
    """The number of updates begun, and the strength of each update's penalty."""

    config: GradientRegularizationConfig
    updates: int = 0
    """Updates begun."""
    log_strength: float | None = None
    """With a ratio: the exponential average of the logarithm of the strength that gives it; None before the first."""
    tracked: int = 0
    """Updates that moved the average."""

    def begin(self) -> None:
        """Count the update that begins."""
        self.updates += 1

    @property
    def active(self) -> bool:
        """Whether the current update has a penalty."""
        return self.config.enabled and self.updates > self.config.delay_updates

    @property
    def reuses(self) -> bool:
        """Whether the current update reuses a penalty instead of running a second pass."""
        return (self.updates - self.config.delay_updates - 1) % self.config.every != 0

    @property
    def frozen(self) -> bool:
        """Whether a calibrated strength is fixed."""
        return self.config.calibrated and self.tracked >= CALIBRATION_UPDATES

    def strength(self, *, grad_norm: float, penalty_norm: float, track: bool = True) -> float:
        """The strength of this update, given the penalty's norm at strength 1; `track`: update the average."""
        warmup = self.config.warmup_updates
        ramp = min(1.0, (self.updates - self.config.delay_updates) / warmup) if warmup else 1.0
        wanted = self.config.ratio
        if wanted is None:
            return ramp * float(self.config.strength)
        if self.frozen and self.log_strength is not None:
            return ramp * math.exp(self.log_strength)
        measured = grad_norm > 0 and penalty_norm > 0
        if track and measured:
            now = math.log(wanted * grad_norm / penalty_norm)
            before = self.log_strength
            self.log_strength = now if before is None else DECAY * before + (1 - DECAY) * now
            self.tracked += 1
        if self.log_strength is None:
            return 0.0
        tracked = math.exp(self.log_strength)
        return ramp * (min(tracked, RATIO_BOUND * wanted * grad_norm / penalty_norm) if measured else tracked)

    def state(self) -> dict[str, Any]:
        """The position in the schedule, and the settings for which the average was tracked, as JSON."""
        return {
            "updates": self.updates,
            "log_strength": self.log_strength,
            "tracked": self.tracked,
            "calibrated_for": _settings(self.config),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; a calibration restarts if its settings changed, as a fork may do."""
        self.updates = state["updates"]
        if self.config.calibrated and state["calibrated_for"] != _settings(self.config):
            return
        self.log_strength, self.tracked = state["log_strength"], state["tracked"]


def _settings(config: GradientRegularizationConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", include=CALIBRATED_FOR)


class PenaltyMemory:
    """The penalty's component orthogonal to g1, P - (P . g1 / ||g1||^2) g1, for the updates between second passes.

    Liu et al. 2022, arXiv 2203.02714: the component along g1 changes fast, and the orthogonal component slowly.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.orthogonal: dict[nn.Parameter, Tensor] | None = None
        self.grad_norm = 0.0

    def store(self, penalty: Gradients, g1: Gradients, *, along: float, grad_norm: float) -> None:
        """Keep a penalty's orthogonal component; `along` is the penalty's inner product with g1."""
        share = along / grad_norm**2
        self.orthogonal = {p: penalty[p].sub(g1[p], alpha=share) for p in self.parameters}
        self.grad_norm = grad_norm

    def reuse(self, *, grad_norm: float) -> dict[nn.Parameter, Tensor] | None:
        """The stored component, scaled to a gradient of this norm; None before the first."""
        if self.orthogonal is None:
            return None
        return {p: stored * (grad_norm / self.grad_norm) for p, stored in self.orthogonal.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Whole tensors for a checkpoint, by index in the perturbed set; all ranks must call it."""
        stored = self.orthogonal or {}
        return {str(index): full_tensor(stored[p]) for index, p in enumerate(self.parameters) if p in stored}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], *, grad_norm: float) -> None:
        """Restore the component from `tensors`."""
        # Use the order of the parameters: in a file of tensors, "10" comes before "2".
        owners = {index: self.parameters[int(index)] for index in sorted(tensors, key=int)}
        self.orthogonal = {p: distribute_like(tensors[index], p) for index, p in owners.items()} or None
        self.grad_norm = grad_norm
