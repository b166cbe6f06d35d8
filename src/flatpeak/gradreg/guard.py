"""The guard: a penalty that rounding or a long step has spoilt is no penalty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flatpeak.errors import UserError
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.directions import Direction, default_step, direction, offset, relative_size
from flatpeak.gradreg.gradients import RandomState
from flatpeak.gradreg.parameters import rounds
from flatpeak.gradreg.perturbation import Kept, Perturbation

REFUSED_BELOW, TOLD_BELOW = 0.5, 0.9
"""Of the consistency. Where errors are independent, 0.9 is an error of a quarter of the penalty's size, 0.5 of 0.7."""
ANOTHER_FUNCTION = -0.9
"""Below this the difference of the passes does not depend on the step: the second computes another function."""
SHORTENED_BELOW = 0.75
"""Of what rounding leaves of the perturbation along the gradient: less is told, since the penalty is as much weaker."""
SHORT = 1 / 30
"""Of the usual step, where something rounds: what a shorter one changes may be rounded away, alike both ways."""


class Guard:
    """Refuses to begin with a penalty that is none, and says so if it happens later.

    It looks at what rounding leaves of the perturbation in every second pass, and every `check_every` updates at what
    becomes of the penalty when the step is taken the other way.
    """

    def __init__(self, config: GradientRegularizationConfig, *, notice: Callable[[str], None]) -> None:
        self.minimum = config.min_perturbation_kept
        self.check_every = config.check_every
        self.notice = notice
        self.passed = False
        """Whether a perturbation survived rounding."""
        self.warned = False
        self.coarse = False
        """Whether it was told that rounding takes a part of the penalty."""
        self.checked: int | None = None
        """The last update whose consistency was measured; None before the first, which is refused where it is bad."""
        self.inconsistent = 0
        """Measurements below what is told."""

    def probe(self, perturbation: Perturbation, config: GradientRegularizationConfig) -> None:
        """Check the perturbation along a random direction, before anything is spent on a run.

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
            self.check(kept, perturbation)

    def check(self, kept: Kept, perturbation: Perturbation) -> None:
        """UserError at the first perturbation that rounding swallows, a notice at a later one."""
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

    def due(self, update: int) -> bool:
        """Whether an informative update is to be checked for consistency."""
        if not self.check_every:
            return False
        return self.checked is None or update - self.checked >= self.check_every

    def judge(
        self, consistency: float, kept: Kept, *, update: int, h: float, way: Direction, perturbation: Perturbation
    ) -> None:
        """UserError where the run's first penalty is none, a notice where a later one is not or any is coarse."""
        if math.isnan(consistency):  # an update that is left out tells nothing: the next one is asked
            return
        if consistency < TOLD_BELOW:
            message = inconsistency(consistency, h=h, way=way, perturbation=perturbation)
            if self.checked is None and consistency < REFUSED_BELOW:
                raise UserError(message)
            self.inconsistent += 1
            if math.log10(self.inconsistent).is_integer():
                self.notice(f"{message} (update {update}; seen {self.inconsistent} times)")
        elif not self.coarse and (lost := rounded_away(kept, h=h, way=way, perturbation=perturbation)):
            self.coarse = True
            self.notice(lost)
        self.checked = update

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps for a resumed run."""
        return {
            "guard_passed": self.passed,
            "guard_warned": self.warned,
            "guard_coarse": self.coarse,
            "guard_checked": self.checked,
            "guard_inconsistent": self.inconsistent,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, also from one without a measured consistency: its run has begun all the same."""
        self.passed = state["guard_passed"]
        self.warned = state.get("guard_warned", False)
        self.coarse = state.get("guard_coarse", False)
        self.checked = state.get("guard_checked", 0 if self.passed else None)
        self.inconsistent = state.get("guard_inconsistent", 0)


def rounded_away(kept: Kept, *, h: float, way: Direction, perturbation: Perturbation) -> str | None:
    """Notice of a consistent penalty that rounding diminishes; None where it takes little."""
    if not rounds(perturbation.through):
        return None
    if kept.along < SHORTENED_BELOW:
        return (
            f"gradient regularization: rounding leaves {kept.along:.2f} of the perturbation's length along the "
            "gradient, and the penalty is about as much weaker; raise gradient_regularization.step, or keep the weights"
            " in float32"
        )
    size, usual = relative_size(h, way, perturbation), default_step(perturbation)
    if size < SHORT * usual:
        dtype = str(perturbation.through).removeprefix("torch.")
        return (
            f"gradient regularization: the step is {size:.1e} of the weights' norm, where {usual:.0e} is usual in "
            f"{dtype}: most of what it changes may be rounded away; raise gradient_regularization.step"
        )
    return None


def inconsistency(consistency: float, *, h: float, way: Direction, perturbation: Perturbation) -> str:
    """Message about a penalty that depends on the sign of its step, with the fix."""
    size, usual = relative_size(h, way, perturbation), default_step(perturbation)
    dtype = str(perturbation.through).removeprefix("torch.")
    if consistency < ANOTHER_FUNCTION:
        fault = (
            "the second pass does not compute the first one's function: let the loss depend on nothing that it "
            "changes, such as a counter"
        )
    elif size > 2 * usual:
        fault = "the gradient bends over so long a step: lower gradient_regularization.step"
    elif rounds(perturbation.through):
        fault = (
            f"rounding to {dtype} drowns the difference of two gradients, or the gradient bends over the step: raise "
            "gradient_regularization.step, lower it if gradreg/step_consistency then falls, or compute in float32"
        )
    else:
        fault = (
            "rounding drowns the difference of two gradients: raise gradient_regularization.step"
            if size < usual / 2
            else "the gradient bends over the step, or is not the same in both passes (random numbers that are not "
            "replayed): lower gradient_regularization.step, or mend the loss"
        )
    return (
        f"gradient regularization: the penalty at the step and that at its opposite have a cosine of {consistency:.2f},"
        f" wanted {TOLD_BELOW} ({REFUSED_BELOW} to begin); the step is {size:.1e} of the weights' norm, {usual:.0e} is "
        f"usual in {dtype}; {fault}; gradient_regularization.check_every=0 leaves this check out"
    )
