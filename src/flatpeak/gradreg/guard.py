"""Measurements of an update's penalty, and a guard against penalties that rounding or a long step has spoilt."""

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
"""Factors of the steps that a search tries, before it tries the neighbours of the best.

Longer steps are closer together: curvature that is the same in both directions causes an error that the consistency
does not show.
"""
SHORT_ENOUGH = 0.99
"""Consistency at which shorter steps end: one more divides the error by ten, with a margin for changes in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Statistics of one update; norms and cosine are over the perturbed parameters, NaN if not measured."""

    pass_count: int = 0
    """The number of passes after the first."""
    skipped: str | None = None
    """The reason why an expected penalty is missing."""
    strength: float = 0.0
    """The strength of this update, including warm-up and ratio."""
    g1_norm: float = math.nan
    """Norm of the gradient without penalty, before clipping."""
    penalty_ratio: float = math.nan
    """Norm of the penalty's gradient divided by that of g1."""
    cosine: float = math.nan
    """Cosine of g1 with the penalty's gradient."""
    kept: PerturbationFidelity | None = None
    """Agreement of the realized with the intended perturbation; None without a perturbation."""
    consistency: float | None = None
    """Cosine between the penalty's gradients at the step and at its opposite; None in updates without a check."""
    step: float = math.nan
    """The step in use, in the unit of `step_scale`."""
    seconds: float = 0.0
    """Wall time of everything after the first pass."""

    def metrics(self) -> dict[str, float]:
        """The metrics, named as in docs/metrics.md; empty in updates without penalty."""
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
    """Checks of the penalty: an error for a bad penalty at the start of a run, a notice later.

    Every second pass measures how much of the perturbation survives rounding. Every `check_every` updates an additional
    pass measures whether the penalty is the same with the opposite step. If it is not, and the user has set no step,
    the guard measures other steps and keeps the best.
    """

    def __init__(self, config: GradientRegularizationConfig, *, notice: Callable[[str], None]) -> None:
        self.minimum = config.min_perturbation_kept
        self.check_every = config.check_every
        self.config = config
        self.notice = notice
        self.factor = 1.0
        """The step that a search chose, divided by the default step."""
        self.passed = False
        """Whether any perturbation has survived rounding."""
        self.warned = False
        """Whether a notice of a later perturbation that rounding removed was given."""
        self.coarse = False
        """Whether a notice of a penalty that rounding weakens was given."""
        self.checked: int | None = None
        """The last update with a measured consistency; None before the first, which raises if it is bad."""
        self.inconsistent = 0
        """The number of measurements below NOTICE_BELOW."""
        self.lost = 0
        """The number of penalties skipped because the second pass was not finite."""

    def probe(self, perturbation: Perturbation, config: GradientRegularizationConfig) -> None:
        """Check the perturbation along a random direction, before the run spends any time.

        An absolute step multiplies the gradient, which is not known yet: the first update checks it.
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
        """Raise UserError if rounding removes the first perturbation; give a notice if it removes a later one.

        Unless the step is `final`, a search may follow the first check.
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
            f"{fidelity.cosine:.2f} between intended and realized, wanted {self.minimum}; norm "
            f"{fidelity.norm:.2f} of the intended; {where}): keep the weights in float32 and run both passes in it, "
            "raise gradient_regularization.step, or perturb adapters in float32"
        )
        if not self.passed:
            raise UserError(message)
        if not self.warned:
            self.notice(message)
            self.warned = True

    def report_lost_penalty(self, *, update: int) -> None:
        """Give a notice of the first, 10th, 100th, ... penalty that is skipped because it is not finite."""
        self.lost += 1
        if math.log10(self.lost).is_integer():
            penalties = "1 penalty" if self.lost == 1 else f"{self.lost} penalties"
            self.notice(
                f"gradient regularization: {penalties} so far left out (now in update {update}), because the second "
                "pass was NaN or infinite; lower gradient_regularization.step if gradreg/skipped keeps rising"
            )

    def is_due(self, update: int) -> bool:
        """Whether to measure the consistency of an informative update."""
        if not self.check_every:
            return False
        return self.checked is None or update - self.checked >= self.check_every

    def needs_other_steps(self, consistency: float, fidelity: PerturbationFidelity) -> bool:
        """Whether a check has to measure other steps: to choose one, or to name the cause in a message."""
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
        """Check a step of relative `size`; return its consistency, or that of the step that replaces it.

        `measure` returns the consistency of another step by its factor, NaN if that is not meaningful. Raise UserError
        if the first penalty is inconsistent. Give a notice of a later inconsistency, of rounding, and of a new step.
        """
        if math.isnan(consistency):  # a skipped update measures nothing: check the next update
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

        In half precision a search starts with longer steps, because rounding is the likelier fault.
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
        """Restore `state`; if the config gives a step, it replaces the step of a search."""
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
    """Add the consistencies of these steps to `tried`, until one reaches `enough` or is worse than the best."""
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
