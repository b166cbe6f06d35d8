"""The guard's messages: what was measured of a step, the likely fault, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.directions import default_step
from flatpeak.gradreg.parameters import is_below_float32
from flatpeak.gradreg.perturbation import Perturbation, PerturbationFidelity

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
ROUNDED_AWAY = -math.inf
"""Stand-in for the consistency of a step whose perturbation is rounded away, or whose passes are not finite."""


def rounding_message(fidelity: PerturbationFidelity, *, size: float, perturbation: Perturbation) -> str | None:
    """The notice of a consistent penalty that rounding diminishes; None where it takes little."""
    if not is_below_float32(perturbation.coarsest_dtype):
        return None
    if fidelity.along < WEAK_BELOW:
        return (
            f"gradient regularization: rounding leaves {fidelity.along:.2f} of the perturbation's length along the "
            "gradient, and the penalty is about as much weaker; raise gradient_regularization.step, or keep the weights"
            " in float32"
        )
    usual = default_step(perturbation)
    if size < SHORT_STEP * usual:
        return (
            f"gradient regularization: the step is {size:.1e} of the weights' norm, where {usual:.0e} is usual in "
            f"{_name(perturbation)}: most of what it changes may be rounded away; raise gradient_regularization.step"
        )
    return None


def is_meaningful(fidelity: PerturbationFidelity, *, size: float, perturbation: Perturbation) -> bool:
    """Whether the consistency of a step says something: a perturbation that is rounded away is consistent as well."""
    spoilt = rounding_message(fidelity, size=size, perturbation=perturbation)
    return spoilt is None and fidelity.along >= WEAK_BELOW


def new_step_message(tried: Mapping[float, float], factor: float, *, size: float) -> str:
    """The notice of a step that was found; `size` is the relative step of factor 1."""
    return (
        f"gradient regularization: the step is now {factor * size:.1e} of the weights' norm, where the penalty "
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

    After a search it is about all steps that were tried, and the run goes on with that of `factor`.
    """
    fault = _fault(tried, size=size, perturbation=perturbation, config=config)
    off = "gradient_regularization.check_every=0 leaves this check out"
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
        f" wanted {NOTICE_BELOW} ({REFUSE_BELOW} to begin){measured}; the step is {size:.1e} of the weights' norm, "
        f"{default_step(perturbation):.0e} is usual in {_name(perturbation)}; {fault}; {off}"
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
            "the second pass does not compute the first one's function: let the loss depend on nothing that it "
            "changes, such as a counter"
        )
    if not config.finds_step:
        return _step_fault(tried, size=size, perturbation=perturbation, config=config)
    if is_below_float32(perturbation.coarsest_dtype):
        rounding = f"rounding to {_name(perturbation)} drowns short steps"
        return f"{rounding}, and the gradient bends over long ones: compute in float32"
    return (
        "the gradient is not the same in both passes (random numbers that are not replayed: mend the loss), or is not "
        "smooth: perturb fewer parameters (gradient_regularization.perturbed)"
    )


def _step_fault(
    tried: Mapping[float, float],
    *,
    size: float,
    perturbation: Perturbation,
    config: GradientRegularizationConfig,
) -> str:
    """The fault of a step, by the consistencies of other steps; both causes where these decide nothing."""
    half = is_below_float32(perturbation.coarsest_dtype)
    rounding = f"rounding to {_name(perturbation)}" if half else "rounding"
    precise = ", or compute in float32" if half else ""
    bends = "the gradient bends over so long a step: lower gradient_regularization.step"
    step = config.step or default_step(perturbation)
    shorter, longer = (tried.get(factor, math.nan) for factor in OTHER_STEPS)
    better = max(0.0, tried[1.0] + BETTER_BY)
    if shorter > better and not longer > shorter:
        return f"{bends} to {OTHER_STEPS[0] * step:.2g}{'' if shorter >= NOTICE_BELOW else ' or less'}"
    if longer > better:
        return (
            f"{rounding} drowns the difference of two gradients: raise gradient_regularization.step to "
            f"{OTHER_STEPS[1] * step:.2g}{'' if longer >= NOTICE_BELOW else ' or more'}{precise}"
        )
    if size > 2 * default_step(perturbation):
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
