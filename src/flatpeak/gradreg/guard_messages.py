"""The guard's messages: the measurements of a step, the likely fault, and the fix."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.directions import default_step
from flatpeak.gradreg.parameters import is_below_float32
from flatpeak.gradreg.perturbation import Perturbation, PerturbationFidelity

REFUSE_BELOW, NOTICE_BELOW = 0.5, 0.9
"""Bounds of the consistency. With independent errors, 0.9 is an error of a quarter of the penalty, and 0.5 of 0.7."""
ANOTHER_FUNCTION = -0.9
"""Below this consistency the difference of the passes does not depend on the step: they compute different functions."""
OTHER_STEPS = (0.1, 10.0)
"""Factors of the steps whose consistencies distinguish a step that is too long from one that rounding swamps."""
BETTER_BY = 0.1
"""The least consistency, and the least gain, of a better step: independent errors give -1/2 at every step."""
WEAK_BELOW = 0.75
"""Share of the perturbation along the gradient below which there is a notice: the penalty is weaker by that factor."""
SHORT_STEP = 1 / 30
"""Share of the usual step, in half precision: a shorter step may be rounded away, in the same way in both
directions."""
ROUNDED_AWAY = -math.inf
"""Replaces the consistency of a step if its perturbation is rounded away, or if its passes are not finite."""


def rounding_message(fidelity: PerturbationFidelity, *, size: float, perturbation: Perturbation) -> str | None:
    """The notice of a consistent penalty that rounding weakens; None if it weakens it little."""
    if not is_below_float32(perturbation.coarsest_dtype):
        return None
    if fidelity.along < WEAK_BELOW:
        return (
            f"gradient regularization: rounding leaves {fidelity.along:.2f} of the perturbation's length along the "
            "gradient, which weakens the penalty by about that factor; raise gradient_regularization.step, or keep the "
            "weights in float32"
        )
    usual = default_step(perturbation)
    if size < SHORT_STEP * usual:
        return (
            f"gradient regularization: the step is {size:.1e} of the weights' norm ({usual:.0e} is usual in "
            f"{_name(perturbation)}), and rounding may remove most of it; raise gradient_regularization.step"
        )
    return None


def is_meaningful(fidelity: PerturbationFidelity, *, size: float, perturbation: Perturbation) -> bool:
    """Whether the consistency of a step is meaningful: a perturbation that is rounded away is consistent too."""
    spoilt = rounding_message(fidelity, size=size, perturbation=perturbation)
    return spoilt is None and fidelity.along >= WEAK_BELOW


def new_step_message(tried: Mapping[float, float], factor: float, *, size: float) -> str:
    """The notice of a new step after a search; `size` is the relative step of factor 1."""
    return (
        f"gradient regularization: the step is now {factor * size:.1e} of the weights' norm, because there the penalty "
        f"and that at the opposite step agree ({_table(tried, size)})"
    )


def inconsistency_message(
    tried: Mapping[float, float],
    factor: float,
    *,
    size: float,
    perturbation: Perturbation,
    config: GradientRegularizationConfig,
) -> str:
    """The message about a penalty that depends on the sign of its step, with the fix.

    After a search it lists all steps that were tried; the run continues with that of `factor`.
    """
    fault = _fault(tried, size=size, perturbation=perturbation, config=config)
    off = "gradient_regularization.check_every=0 turns this check off"
    if config.finds_step:
        return (
            "gradient regularization: no step makes the penalty agree with that at the opposite step (cosine wanted "
            f"{NOTICE_BELOW}, {REFUSE_BELOW} to begin): {_table(tried, size)}; the step is {factor * size:.1e} of the "
            f"weights' norm; {fault}; {off}"
        )
    others = {"a tenth of": tried.get(OTHER_STEPS[0], math.nan), "ten times": tried.get(OTHER_STEPS[1], math.nan)}
    measured = "".join(f", at {text} the step {v:.2f}" for text, v in others.items() if not math.isnan(v))
    return (
        f"gradient regularization: the penalty at the step and that at its opposite have a cosine of {tried[1.0]:.2f},"
        f" wanted {NOTICE_BELOW} ({REFUSE_BELOW} to begin){measured}; the step is {size:.1e} of the weights' norm "
        f"({default_step(perturbation):.0e} is usual in {_name(perturbation)}); {fault}; {off}"
    )


def _name(perturbation: Perturbation) -> str:
    return str(perturbation.coarsest_dtype).removeprefix("torch.")


def _table(tried: Mapping[float, float], size: float) -> str:
    return ", ".join(
        f"{factor * size:.1e}: {'rounded away' if consistency == ROUNDED_AWAY else f'{consistency:.2f}'}"
        for factor, consistency in sorted(tried.items())
    )


def _fault(
    tried: Mapping[float, float],
    *,
    size: float,
    perturbation: Perturbation,
    config: GradientRegularizationConfig,
) -> str:
    """The likeliest fault, with the fix."""
    if max((value for value in tried.values() if math.isfinite(value)), default=0.0) < ANOTHER_FUNCTION:
        return (
            "the second pass computes another function than the first: the loss must not depend on state that it "
            "changes, such as a counter"
        )
    if not config.finds_step:
        return _step_fault(tried, size=size, perturbation=perturbation, config=config)
    if is_below_float32(perturbation.coarsest_dtype):
        rounding = f"rounding to {_name(perturbation)} swamps short steps"
        return f"{rounding}, and long steps exceed the range where the gradient is linear: compute in float32"
    return (
        "the gradient is not the same in both passes (random numbers that are not replayed: fix the loss), or is not "
        "smooth: perturb fewer parameters (gradient_regularization.perturbed)"
    )


def _step_fault(
    tried: Mapping[float, float],
    *,
    size: float,
    perturbation: Perturbation,
    config: GradientRegularizationConfig,
) -> str:
    """The fault of a step, from the consistencies of other steps; both causes if these do not decide."""
    half = is_below_float32(perturbation.coarsest_dtype)
    rounding = f"rounding to {_name(perturbation)}" if half else "rounding"
    precise = ", or compute in float32" if half else ""
    bends = "the gradient is not linear over so long a step: lower gradient_regularization.step"
    step = config.step or default_step(perturbation)
    shorter, longer = (tried.get(factor, math.nan) for factor in OTHER_STEPS)
    better = max(0.0, tried[1.0] + BETTER_BY)
    if shorter > better and not longer > shorter:
        return f"{bends} to {OTHER_STEPS[0] * step:.2g}{'' if shorter >= NOTICE_BELOW else ' or less'}"
    if longer > better:
        return (
            f"{rounding} swamps the difference of two gradients: raise gradient_regularization.step to "
            f"{OTHER_STEPS[1] * step:.2g}{'' if longer >= NOTICE_BELOW else ' or more'}{precise}"
        )
    if size > 2 * default_step(perturbation):
        return bends
    if half and config.direction == "random":
        return (
            "the gradient changes less along a random direction than along itself, so "
            f"{rounding} swamps the difference sooner: raise gradient_regularization.step, tenfold or more{precise}"
        )
    if half:
        return (
            f"{rounding} swamps the difference of two gradients, or the gradient is not linear over the step: raise "
            "gradient_regularization.step, lower it if gradreg/step_consistency then falls, or compute in float32"
        )
    return (
        "rounding swamps the difference of two gradients (raise gradient_regularization.step), or the gradient is not "
        "linear over the step (lower it), or is not the same in both passes (random numbers that are not replayed: fix "
        "the loss)"
    )
