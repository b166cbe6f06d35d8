"""The guard: a perturbation that rounding swallows is no perturbation."""

from __future__ import annotations

from collections.abc import Callable

from flatpeak.errors import UserError
from flatpeak.gradreg.perturbation import Kept, Perturbation


class Guard:
    """Refuses to begin where rounding swallows the perturbation, and says so if it happens later."""

    def __init__(self, *, minimum: float, notice: Callable[[str], None]) -> None:
        self.minimum = minimum
        self.notice = notice
        self.passed = False
        self.warned = False

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
