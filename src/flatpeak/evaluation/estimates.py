"""Estimates of metrics: the mean over questions, its 95% interval, and the interval's method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from flatpeak.functional.estimators import bootstrap_interval, wilson_interval

Method = Literal["wilson", "bootstrap"]
COUNTS: Final = frozenset({"length", "sampled/length"})
"""Metrics that are not shares, even if all their values are 0 or 1."""
DIFFERENCES: Final = "sharpness/fall_"
"""Prefix of metrics that are differences, and therefore not shares either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A metric's mean over the questions that have it."""

    mean: float
    """NaN if no question has the metric."""
    questions: int
    """The number of questions that have the metric."""
    interval: tuple[float, float] | None
    """The 95% interval; None for fewer than two questions."""
    method: Method | None
    """`wilson` if every value is 0 or 1, else `bootstrap` (of questions)."""


def known_of(
    values: Sequence[float | None], weights: Sequence[float] | None = None
) -> tuple[list[float], list[float] | None]:
    """The values that are not missing, and their weights."""
    known = [value for value in values if value is not None]
    if weights is None:
        return known, None
    return known, [weight for weight, value in zip(weights, values, strict=True) if value is not None]


def mean_of(values: Sequence[float | None], weights: Sequence[float] | None = None) -> float:
    """The mean of the values that are not missing; NaN if all are."""
    known, weights = known_of(values, weights)
    return float(np.average(known, weights=weights)) if known else math.nan


def estimate(values: Sequence[float | None], *, metric: str, weights: Sequence[float] | None = None) -> Estimate:
    """Estimate the mean of one metric; missing values (None) are left out.

    With weights, Wilson's interval is that of (sum w)^2 / sum w^2 questions (Kish 1965).
    """
    mean = mean_of(values, weights)
    known, weights = known_of(values, weights)
    if len(known) < 2:
        return Estimate(mean=mean, questions=len(known), interval=None, method=None)
    if _are_shares(known, metric=metric):
        size = _effective_size(known, weights)
        interval = wilson_interval(sum(known) if weights is None else mean * size, size)
        return Estimate(mean=mean, questions=len(known), interval=interval, method="wilson")
    interval = bootstrap_interval(known, weights=weights)
    return Estimate(mean=mean, questions=len(known), interval=interval, method="bootstrap")


def _are_shares(values: Sequence[float], *, metric: str) -> bool:
    counted = metric in COUNTS or metric.startswith(DIFFERENCES)
    return not counted and all(value in (0.0, 1.0) for value in values)


def _effective_size(values: Sequence[float], weights: Sequence[float] | None) -> float:
    return len(values) if weights is None else sum(weights) ** 2 / sum(weight**2 for weight in weights)


def interval_of_differences(
    pairs: Sequence[tuple[float, float]], *, metric: str, weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """The 95% interval of the mean of b - a: a bootstrap of the questions; the score interval of Tango (1998) of shares
    whose differences are all equal, of which a bootstrap would be certain."""
    gains = [b - a for a, b in pairs]
    if len(set(gains)) == 1 and _are_shares([value for pair in pairs for value in pair], metric=metric):
        # z^2 / (n + z^2) if no question changed, and twice that if all did: the roots of |T(D)| = z.
        width = (1 + abs(gains[0])) * wilson_interval(0, _effective_size(gains, weights))[1]
        return max(-1.0, gains[0] - width), min(1.0, gains[0] + width)
    return bootstrap_interval(gains, weights=weights)


def format_estimate(value: Estimate | None, *, of: int | None = None) -> str:
    """`0.25 [0.21, 0.29]`, followed by ` of 98` if the mean is over fewer questions than `of`."""
    if value is None or not value.questions:
        return "-"
    text = f"{value.mean:.4g}"
    if value.interval is not None:
        text += f" [{value.interval[0]:.4g}, {value.interval[1]:.4g}]"
    return text if of is None or value.questions == of else f"{text} of {value.questions}"
