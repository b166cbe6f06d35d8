"""How strong the penalty is, update by update: delay, warm-up, and a strength that follows a wanted ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flatpeak.gradreg.config import GradientRegularizationConfig

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
