"""The measurements of an update's penalty, and the guard against one that rounding or a long step has spoilt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flatpeak.errors import UserError
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.directions import gradient_direction, step_size
from flatpeak.gradreg.guard_messages import (
    NOTICE_BELOW,
    OTHER_STEPS,
    REFUSE_BELOW,
    ROUNDED_AWAY,
    inconsistency_message,
    new_step_message,
    rounding_message,
)
from flatpeak.gradreg.parameters import is_below_float32
from flatpeak.gradreg.perturbation import Perturbation, PerturbationFidelity, RandomState
from flatpeak.gradreg.shards import noise_like

BETWEEN = 10**0.5
SHORTER, LONGER = (0.1, 0.01, 0.001), (BETWEEN, 10.0, 10 * BETWEEN, 100.0)
"""Factors of the steps that a search tries, before those on both sides of the best.

Longer ones are closer: what bends alike in both directions is an error that the consistency does not see.
"""
SHORT_ENOUGH = 0.99
"""Consistency at which shorter steps end: one more of them divides the error by ten, and leaves room for training."""


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
    step: float = math.nan
    """The step in use, in the unit of `step_scale`."""
    seconds: float = 0.0
    """Wall time of everything after the first pass."""

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
            metrics["gradreg/step"] = self.step
        if self.consistency is not None:
            metrics["gradreg/step_consistency"] = self.consistency
        return metrics


class Guard:
    """Checks of the penalty: a bad one is refused at the start of a run, and gives a notice later.

    Every second pass measures how much of the perturbation survives rounding, and every `check_every` updates an
    additional pass measures whether the penalty is the same with the opposite step. Where it is not, and the user has
    set no step, other steps are measured and the best is kept.
    """

    def __init__(self, config: GradientRegularizationConfig, *, notice: Callable[[str], None]) -> None:
        self.minimum = config.min_perturbation_kept
        self.check_every = config.check_every
        self.config = config
        self.notice = notice
        self.factor = 1.0
        """The step that was found, over the default one."""
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
        direction = gradient_direction(noise)
        longest = max(LONGER) if self.config.finds_step else 1.0
        h = longest * step_size(direction, perturbation, config)
        with perturbation.applied(direction.vector, step=h) as fidelity:
            self.check_rounding(fidelity, perturbation, final=True)

    def check_rounding(
        self, fidelity: PerturbationFidelity, perturbation: Perturbation, *, final: bool = False
    ) -> None:
        """Raise UserError at a first perturbation that rounding swallows, and give a notice of a later one.

        Unless the step is `final`, the first check may yet find a longer one.
        """
        if fidelity.cosine >= self.minimum:
            self.passed = True
            return
        if self.config.finds_step and self.checked is None and not final:
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

    def needs_other_steps(self, consistency: float, fidelity: PerturbationFidelity) -> bool:
        """Whether a check has to measure other steps: to find one, or to name the cause in a message."""
        if math.isnan(consistency):
            return False
        if self.config.finds_step:
            return consistency < NOTICE_BELOW or fidelity.cosine < self.minimum
        gives_message = self._refuses(consistency) or math.log10(self.inconsistent + 1).is_integer()
        return consistency < NOTICE_BELOW and gives_message

    def check_consistency(
        self,
        consistency: float,
        fidelity: PerturbationFidelity,
        *,
        measure: Callable[[float], float],
        update: int,
        size: float,
        perturbation: Perturbation,
    ) -> float:
        """Check a step of relative `size`; return its consistency, or that of the step that was found in its place.

        `measure` gives the consistency of another step by its factor, NaN where that says nothing. Raise UserError
        where the first penalty is inconsistent; give a notice of a later or a coarse one, and of another step.
        """
        if math.isnan(consistency):  # an update that is left out measures nothing: the next one is checked
            return consistency
        tried = {1.0: consistency}
        if self.needs_other_steps(consistency, fidelity):
            tried |= self._measure_steps(measure, consistency, fidelity, perturbation)
        best = best_factor(tried) if self.config.finds_step else 1.0
        factor = best if tried[best] >= REFUSE_BELOW else 1.0
        if tried[best] < NOTICE_BELOW:
            message = inconsistency_message(tried, factor, size=size, perturbation=perturbation, config=self.config)
            if self._refuses(tried[best]):
                raise UserError(message)
            self.inconsistent += 1
            if math.log10(self.inconsistent).is_integer():
                self.notice(f"{message} (update {update}; seen {self.inconsistent} times)")
        elif factor != 1:
            self.notice(f"{new_step_message(tried, factor, size=size)} (update {update})")
        elif not self.coarse and (lost := rounding_message(fidelity, size=size, perturbation=perturbation)):
            self.coarse = True
            self.notice(lost)
        self.checked = update
        self.factor *= factor
        return tried[factor] if factor != 1 else consistency

    def _measure_steps(
        self,
        measure: Callable[[float], float],
        consistency: float,
        fidelity: PerturbationFidelity,
        perturbation: Perturbation,
    ) -> dict[float, float]:
        """The consistencies of steps by their factors. A search ends in the first direction with a consistent step.

        In half precision a search begins with longer steps, since rounding is then the likelier fault.
        """
        if not self.config.finds_step:
            return {factor: measure(factor) for factor in OTHER_STEPS}
        tried = {1.0: consistency if fidelity.cosine >= self.minimum else ROUNDED_AWAY}
        half = is_below_float32(perturbation.coarsest_dtype)
        directions = ((SHORTER, SHORT_ENOUGH), (LONGER, NOTICE_BELOW))
        for factors, enough in reversed(directions) if half else directions:
            _try_steps(factors, tried, measure, enough=enough)
        best = best_factor(tried)
        for factor in (best / BETWEEN, best * BETWEEN):
            if not any(math.isclose(factor, other) for other in tried):
                _try_steps((factor,), tried, measure, enough=NOTICE_BELOW)
        return tried

    def _refuses(self, consistency: float) -> bool:
        return self.checked is None and consistency < REFUSE_BELOW

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps for a resumed run."""
        return {
            "guard_step_factor": self.factor,
            "guard_passed": self.passed,
            "guard_warned": self.warned,
            "guard_coarse": self.coarse,
            "guard_checked": self.checked,
            "guard_inconsistent": self.inconsistent,
            "guard_lost": self.lost,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; a step that the config gives is not searched for."""
        self.factor = state["guard_step_factor"] if self.config.finds_step else 1.0
        self.passed = state["guard_passed"]
        self.warned = state["guard_warned"]
        self.coarse = state["guard_coarse"]
        self.checked = state["guard_checked"]
        self.inconsistent = state["guard_inconsistent"]
        self.lost = state["guard_lost"]


def _try_steps(
    factors: Iterable[float], tried: dict[float, float], measure: Callable[[float], float], *, enough: float
) -> None:
    """Add the consistencies of these steps to `tried`, up to one that is `enough` or one beyond the best."""
    if max(tried.values()) >= NOTICE_BELOW:
        return
    for factor in factors:
        best = max(tried.values())
        consistency = measure(factor)
        tried[factor] = ROUNDED_AWAY if math.isnan(consistency) else consistency
        if tried[factor] >= enough or tried[factor] < best >= REFUSE_BELOW:
            return


def best_factor(tried: Mapping[float, float]) -> float:
    """The factor of the most consistent step."""
    return max(tried, key=tried.__getitem__)
