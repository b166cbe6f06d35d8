"""The measurements of an update's penalty, and the guard against one that rounding or a long step has spoilt."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flatpeak.errors import UserError
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.directions import Direction, default_step, perturbation_direction, relative_step, step_size
from flatpeak.gradreg.parameters import is_below_float32
from flatpeak.gradreg.perturbation import Perturbation, PerturbationFidelity, RandomState
from flatpeak.gradreg.shards import noise_like

REFUSE_BELOW, NOTICE_BELOW = 0.5, 0.9
"""Bounds of the consistency. With independent errors 0.9 is an error of a quarter of the penalty, 0.5 of 0.7."""
ANOTHER_FUNCTION = -0.9
"""Consistency below which the difference of the passes does not depend on the step: they compute two functions."""
OTHER_STEPS = (0.1, 10.0)
"""Factors of the steps whose consistencies separate a step that is too long from one that rounding drowns."""
BETTER_BY = 0.1
"""The least gain in consistency of the better step, which is above 0: independent errors give -1/2 at every step."""
WEAK_BELOW = 0.75
"""Share of the perturbation along the gradient below which a notice is given: the penalty is as much weaker."""
SHORT_STEP = 1 / 30
"""Share of the usual step, in half precision: the changes of a shorter one may be rounded away, alike both ways."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Statistics of one update; norms and cosine are over the perturbed parameters, NaN where nothing was measured."""

    pass_count: int = 0
    """The number of passes after the first."""
    skipped: str | None = None
    """The reason for a penalty that is missing although there should be one."""
    strength: float = 0.0
    """This update's strength, warm-up and ratio included."""
    g1_norm: float = math.nan
    """Norm of the gradient without penalty, before any clipping."""
    penalty_ratio: float = math.nan
    """Norm of the penalty's gradient over that of g1."""
    cosine: float = math.nan
    """Cosine of g1 with the penalty's gradient."""
    kept: PerturbationFidelity | None = None
    """The agreement of the realized with the intended perturbation; None where nothing was perturbed."""
    consistency: float | None = None
    """Cosine of the penalty's gradient at the step and at its opposite; None in updates that do not check it."""
    seconds: float = 0.0
    """Wall time of everything after the first pass."""

    def __getattr__(self, name: str) -> int:
        if name != "passes":
            raise AttributeError(name)
        warnings.warn("Report.passes is now pass_count", DeprecationWarning, stacklevel=2)
        return self.pass_count

    def metrics(self) -> dict[str, float]:
        """The metrics by the names of docs/metrics.md; empty in updates without penalty."""
        if not self.pass_count and self.skipped is None and math.isnan(self.penalty_ratio):
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


class Guard:
    """Checks of the penalty: a bad one is refused at the start of a run, and gives a notice later.

    Every second pass measures how much of the perturbation survives rounding, and every `check_every` updates an
    additional pass measures whether the penalty is the same with the opposite step.
    """

    def __init__(self, config: GradientRegularizationConfig, *, notice: Callable[[str], None]) -> None:
        self.minimum = config.min_perturbation_kept
        self.check_every = config.check_every
        self.config = config
        self.notice = notice
        self.passed = False
        """Whether any perturbation has survived rounding."""
        self.warned = False
        """Whether a notice of a later perturbation that did not survive was given."""
        self.coarse = False
        """Whether a notice of a penalty that rounding diminishes was given."""
        self.checked: int | None = None
        """The last update whose consistency was measured; None before the first, which is refused where it is bad."""
        self.inconsistent = 0
        """The number of measurements below NOTICE_BELOW."""
        self.lost = 0
        """The number of penalties left out because the second pass was not finite."""

    def probe(self, perturbation: Perturbation, config: GradientRegularizationConfig) -> None:
        """Check the perturbation along a random direction, before anything is spent on a run.

        An absolute step multiplies a gradient that is not known yet: the first update checks it.
        """
        if config.difference == "exact" or config.step_scale == "absolute":
            return
        before = RandomState.now()
        noise = {p: noise_like(p) for p in perturbation.parameters}
        before.restore()
        direction = perturbation_direction(noise, perturbation, scaling=config.scaling)
        h = step_size(direction, perturbation, config)
        with perturbation.applied(direction.vector, step=h) as fidelity:
            self.check_rounding(fidelity, perturbation)

    def check_rounding(self, fidelity: PerturbationFidelity, perturbation: Perturbation) -> None:
        """Raise UserError at a first perturbation that rounding swallows, and give a notice of a later one."""
        if fidelity.cosine >= self.minimum:
            self.passed = True
            return
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in perturbation.parameters})
        computed = perturbation.compute_dtype
        where = f"weights in {', '.join(dtypes)}" + (f", computed in {str(computed)[6:]}" if computed else "")
        message = (
            "gradient regularization: rounding keeps too little of the perturbation (cosine "
            f"{fidelity.cosine:.2f} of the intended with the realized one, wanted {self.minimum}; norm "
            f"{fidelity.norm:.2f} of the intended; {where}): keep the weights in float32 and run both passes in it, "
            "raise gradient_regularization.step, or perturb adapters in float32"
        )
        if not self.passed:
            raise UserError(message)
        if not self.warned:
            self.notice(message)
            self.warned = True

    def report_lost_penalty(self, *, update: int) -> None:
        """Give a notice of the first, 10th, 100th, ... penalty that is left out because it is not finite."""
        self.lost += 1
        if math.log10(self.lost).is_integer():
            penalties = "1 penalty" if self.lost == 1 else f"{self.lost} penalties"
            self.notice(
                f"gradient regularization: {penalties} so far left out (now in update {update}), because the second "
                "pass was NaN or infinite; lower gradient_regularization.step if gradreg/skipped goes on rising"
            )

    def is_due(self, update: int) -> bool:
        """Whether the consistency of an informative update is to be measured."""
        if not self.check_every:
            return False
        return self.checked is None or update - self.checked >= self.check_every

    def needs_other_steps(self, consistency: float) -> bool:
        """Whether `check_consistency` is about to give a message, which names the cause by other steps."""
        if not consistency < NOTICE_BELOW:  # or is not a number
            return False
        return self._refuses(consistency) or math.log10(self.inconsistent + 1).is_integer()

    def _refuses(self, consistency: float) -> bool:
        return self.checked is None and consistency < REFUSE_BELOW

    def check_consistency(
        self,
        consistency: float,
        fidelity: PerturbationFidelity,
        *,
        shorter: float = math.nan,
        longer: float = math.nan,
        update: int,
        h: float,
        direction: Direction,
        perturbation: Perturbation,
    ) -> None:
        """Raise UserError where the first penalty is inconsistent; give a notice of a later or a coarse one.

        `shorter` and `longer` are the consistencies of `OTHER_STEPS`, NaN where one is not known.
        """
        if math.isnan(consistency):  # an update that is left out measures nothing: the next one is checked
            return
        if consistency < NOTICE_BELOW:
            message = inconsistency_message(
                consistency, shorter, longer, h=h, direction=direction, perturbation=perturbation, config=self.config
            )
            if self._refuses(consistency):
                raise UserError(message)
            self.inconsistent += 1
            if math.log10(self.inconsistent).is_integer():
                self.notice(f"{message} (update {update}; seen {self.inconsistent} times)")
        elif not self.coarse and (
            lost := rounding_message(fidelity, h=h, direction=direction, perturbation=perturbation)
        ):
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
            "guard_lost": self.lost,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`, also one without a measured consistency: its run has begun all the same."""
        self.passed = state["guard_passed"]
        self.warned = state.get("guard_warned", False)
        self.coarse = state.get("guard_coarse", False)
        self.checked = state.get("guard_checked", 0 if self.passed else None)
        self.inconsistent = state.get("guard_inconsistent", 0)
        self.lost = state.get("guard_lost", 0)


def rounding_message(
    fidelity: PerturbationFidelity, *, h: float, direction: Direction, perturbation: Perturbation
) -> str | None:
    """The notice of a consistent penalty that rounding diminishes; None where it takes little."""
    if not is_below_float32(perturbation.coarsest_dtype):
        return None
    if fidelity.along < WEAK_BELOW:
        return (
            f"gradient regularization: rounding leaves {fidelity.along:.2f} of the perturbation's length along the "
            "gradient, and the penalty is about as much weaker; raise gradient_regularization.step, or keep the weights"
            " in float32"
        )
    size, usual = relative_step(h, direction, perturbation), default_step(perturbation)
    if size < SHORT_STEP * usual:
        dtype = str(perturbation.coarsest_dtype).removeprefix("torch.")
        return (
            f"gradient regularization: the step is {size:.1e} of the weights' norm, where {usual:.0e} is usual in "
            f"{dtype}: most of what it changes may be rounded away; raise gradient_regularization.step"
        )
    return None


def is_meaningful(
    fidelity: PerturbationFidelity, *, h: float, direction: Direction, perturbation: Perturbation
) -> bool:
    """Whether the consistency of a step says something: a perturbation that is rounded away is consistent as well."""
    spoilt = rounding_message(fidelity, h=h, direction=direction, perturbation=perturbation)
    return spoilt is None and fidelity.along >= WEAK_BELOW


def inconsistency_message(
    consistency: float,
    shorter: float,
    longer: float,
    *,
    h: float,
    direction: Direction,
    perturbation: Perturbation,
    config: GradientRegularizationConfig,
) -> str:
    """The message about a penalty that depends on the sign of its step, with the fix."""
    size, usual = relative_step(h, direction, perturbation), default_step(perturbation)
    dtype = str(perturbation.coarsest_dtype).removeprefix("torch.")
    clips = [name for name in ("g1_clip", "g2_clip") if getattr(config, name) is not None]
    others = {text: value for text, value in (("a tenth of", shorter), ("ten times", longer)) if not math.isnan(value)}
    if len(clips) == 1:
        fault = (
            f"{clips[0]} scales one of the two gradients whose difference is the penalty, which is then mostly their "
            "unlike lengths: leave it out"
        )
    elif clips:
        fault = "g1_clip and g2_clip scale the two gradients before their difference is taken: leave them out"
    elif max([consistency, *others.values()]) < ANOTHER_FUNCTION:
        fault = (
            "the second pass does not compute the first one's function: let the loss depend on nothing that it "
            "changes, such as a counter"
        )
    else:
        fault = _step_fault(
            consistency, shorter, longer, too_long=size > 2 * usual, perturbation=perturbation, config=config
        )
    measured = "".join(f", at {text} the step {value:.2f}" for text, value in others.items())
    return (
        f"gradient regularization: the penalty at the step and that at its opposite have a cosine of {consistency:.2f},"
        f" wanted {NOTICE_BELOW} ({REFUSE_BELOW} to begin){measured}; the step is {size:.1e} of the weights' norm, "
        f"{usual:.0e} is usual in {dtype}; {fault}; gradient_regularization.check_every=0 leaves this check out"
    )


def _step_fault(
    consistency: float,
    shorter: float,
    longer: float,
    *,
    too_long: bool,
    perturbation: Perturbation,
    config: GradientRegularizationConfig,
) -> str:
    """The fault of a step, by the consistencies of other steps; both causes where these decide nothing."""
    half = is_below_float32(perturbation.coarsest_dtype)
    rounding = f"rounding to {str(perturbation.coarsest_dtype).removeprefix('torch.')}" if half else "rounding"
    precise = ", or compute in float32" if half else ""
    bends = "the gradient bends over so long a step: lower gradient_regularization.step"
    step = config.step or default_step(perturbation)
    better = max(0.0, consistency + BETTER_BY)
    if shorter > better and not longer > shorter:
        return f"{bends} to {OTHER_STEPS[0] * step:.2g}{'' if shorter >= NOTICE_BELOW else ' or less'}"
    if longer > better:
        return (
            f"{rounding} drowns the difference of two gradients: raise gradient_regularization.step to "
            f"{OTHER_STEPS[1] * step:.2g}{'' if longer >= NOTICE_BELOW else ' or more'}{precise}"
        )
    if too_long:
        return bends
    if half and config.direction == "random":
        return (
            "along a random direction the gradient changes less than along its own, so that "
            f"{rounding} drowns the difference sooner: raise gradient_regularization.step, tenfold or more{precise}"
        )
    if half:
        return (
            f"{rounding} drowns the difference of two gradients, or the gradient bends over the step: raise "
            "gradient_regularization.step, lower it if gradreg/step_consistency then falls, or compute in float32"
        )
    return (
        "rounding drowns the difference of two gradients (raise gradient_regularization.step), or the gradient bends "
        "over the step (lower it), or is not the same in both passes (random numbers that are not replayed: mend the "
        "loss)"
    )
