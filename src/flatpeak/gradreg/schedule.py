"""How strong the penalty is, update by update: delay, warm-up, and a strength that follows a wanted ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.distributed import Gradients, laid_out_like, whole

MEMORY = 0.9
"""Share of the tracked strength that an update keeps."""
MOST = 2.0
"""Bound of an update's own ratio, in wanted ratios, where the tracked strength lags behind the curvature."""


@dataclass(kw_only=True, slots=True)
class Schedule:
    """Counts updates and says how strong each one's penalty is."""

    config: GradientRegularizationConfig
    updates: int = 0
    """Updates begun."""
    log_strength: float | None = None
    """With a ratio: the logarithm of the strength that reaches it, averaged exponentially; None before the first."""

    def begin(self) -> None:
        """The next update."""
        self.updates += 1

    @property
    def active(self) -> bool:
        """Whether this update has a penalty."""
        return self.config.enabled and self.updates > self.config.delay_updates

    @property
    def reuses(self) -> bool:
        """Whether this update does without a second pass of its own."""
        return (self.updates - self.config.delay_updates - 1) % self.config.every != 0

    @property
    def step_factor(self) -> float:
        """The step's warm-up, in (0, 1]."""
        return self._ramp(self.config.step_warmup_updates)

    def strength(self, *, grad_norm: float, penalty_norm: float, track: bool = True) -> float:
        """The strength of this update; `penalty_norm` is that of strength 1. `track`: whether the update moves it."""
        ramp = self._ramp(self.config.warmup_updates)
        wanted = self.config.ratio
        if wanted is None:
            return ramp * float(self.config.strength)
        measured = grad_norm > 0 and penalty_norm > 0
        if track and measured:
            now = math.log(wanted * grad_norm / penalty_norm)
            before = self.log_strength
            self.log_strength = now if before is None else MEMORY * before + (1 - MEMORY) * now
        if self.log_strength is None:
            return 0.0
        tracked = math.exp(self.log_strength)
        return ramp * (min(tracked, MOST * wanted * grad_norm / penalty_norm) if measured else tracked)

    def _ramp(self, length: int) -> float:
        return min(1.0, (self.updates - self.config.delay_updates) / length) if length else 1.0


class PenaltyMemory:
    """Keeps P - (P . g1 / ||g1||^2) g1, and gives it back in proportion to the gradient of the day.

    Liu et al. 2022, arXiv 2203.02714: the component along g1 changes fast, the orthogonal one slowly.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.orthogonal: dict[nn.Parameter, Tensor] | None = None
        self.grad_norm = 0.0

    def keep(self, penalty: Gradients, g1: Gradients, *, along: float, grad_norm: float) -> None:
        """Remember a penalty; `along` is its inner product with g1."""
        share = along / grad_norm**2
        self.orthogonal = {p: penalty[p].sub(g1[p], alpha=share) for p in self.parameters}
        self.grad_norm = grad_norm

    def recall(self, *, grad_norm: float) -> dict[nn.Parameter, Tensor] | None:
        """The remembered component at the scale of a gradient of this norm; None before anything was kept."""
        if self.orthogonal is None:
            return None
        return {p: kept * (grad_norm / self.grad_norm) for p, kept in self.orthogonal.items()}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, whole, by the parameter's position in the perturbed set; every rank has to ask."""
        held = self.orthogonal or {}
        return {str(index): whole(held[p]) for index, p in enumerate(self.parameters) if p in held}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], *, grad_norm: float) -> None:
        """Go on from `tensors`."""
        # In the parameters' order, which a file of tensors does not keep: "10" comes before "2".
        owners = {index: self.parameters[int(index)] for index in sorted(tensors, key=int)}
        self.orthogonal = {p: laid_out_like(tensors[index], p) for index, p in owners.items()} or None
        self.grad_norm = grad_norm
