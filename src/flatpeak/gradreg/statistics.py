"""What regularization did in one update."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flatpeak.gradreg.perturbation import Kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Norms and cosine are over the perturbed parameters; NaN where there was nothing to measure."""

    passes: int = 0
    """Passes after the first."""
    skipped: str | None = None
    """Why there is no penalty although there should be one."""
    strength: float = 0.0
    """This update's, warm-up and ratio included."""
    g1_norm: float = math.nan
    """Of the gradient without penalty, before any clipping."""
    penalty_ratio: float = math.nan
    """Norm of the penalty's gradient over that of g1."""
    cosine: float = math.nan
    """Of g1 with the penalty's gradient."""
    kept: Kept | None = None
    """How much of the perturbation survived rounding; None where nothing was perturbed."""
    consistency: float | None = None
    """Cosine of the penalty's gradient at the step and at its opposite; None in updates that do not check it."""
    seconds: float = 0.0
    """Wall time of everything after the first pass."""

    def metrics(self) -> dict[str, float]:
        """By the names of docs/metrics.md; empty in updates without penalty."""
        if not self.passes and self.skipped is None and math.isnan(self.penalty_ratio):
            return {}
        metrics = {
            "gradreg/penalty_ratio": self.penalty_ratio,
            "gradreg/cosine": self.cosine,
            "gradreg/g1_norm": self.g1_norm,
            "gradreg/strength": self.strength,
            "gradreg/skipped": float(self.skipped is not None),
        }
        if self.kept is not None:
            metrics["gradreg/perturbation_kept"] = self.kept.cosine
            metrics["gradreg/perturbation_norm_kept"] = self.kept.norm
        if self.consistency is not None:
            metrics["gradreg/step_consistency"] = self.consistency
        return metrics
