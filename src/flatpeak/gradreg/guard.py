"""The guard: a perturbation that rounding swallows is no perturbation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flatpeak.errors import UserError
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.directions import direction, offset
from flatpeak.gradreg.perturbation import Kept, Perturbation
from flatpeak.gradreg.randomness import RandomState


class Guard:
    """Refuses to begin where rounding swallows the perturbation, and says so if it happens later."""

    def __init__(self, *, minimum: float, notice: Callable[[str], None]) -> None:
        self.minimum = minimum
        self.notice = notice
        self.passed = False
        self.warned = False

    def probe(self, perturbation: Perturbation, config: GradientRegularizationConfig) -> None:
        """The same check along a random direction, before anything is spent on a run.

        An absolute step multiplies a gradient that is not known yet; there the first update finds out.
        """
        if config.difference == "exact" or config.step_scale == "absolute":
            return
        before = RandomState.now()
        noise = {p: torch.randn_like(p) for p in perturbation.parameters}
        before.restore()
        way = direction(noise, perturbation, scaling=config.scaling)
        h = offset(way, perturbation, config)
        with perturbation.moved(way.vector, step=h) as kept:
            self.check(kept, perturbation, h)

    def check(self, kept: Kept, perturbation: Perturbation, h: float) -> None:
        """UserError at the first perturbation, a notice at a later one."""
        if kept.cosine >= self.minimum:
            self.passed = True
            return
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in perturbation.parameters})
        computed = perturbation.compute_dtype
        where = f"weights in {', '.join(dtypes)}" + (f", computed in {str(computed)[6:]}" if computed else "")
        message = (
            f"gradient regularization: rounding keeps too little of the perturbation (cosine {kept.cosine:.2f} of the "
            f"intended with the realized one, wanted {self.minimum}; norm {kept.norm:.2f} of the intended; {where}): "
            "keep the weights in float32 and run both passes in it, raise gradient_regularization.step, or perturb "
            "adapters in float32"
        )
        if not self.passed:
            raise UserError(message)
        if not self.warned:
            self.notice(message)
            self.warned = True
