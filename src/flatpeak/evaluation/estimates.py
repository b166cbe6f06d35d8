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


def estimate(values: Sequence[float | None], *, metric: str) -> Estimate:
    """Estimate the mean of one metric; missing values (None) are left out."""
    known = [value for value in values if value is not None]
    mean = float(np.mean(known)) if known else math.nan
    if len(known) < 2:
        return Estimate(mean=mean, questions=len(known), interval=None, method=None)
    if metric not in COUNTS and not metric.startswith(DIFFERENCES) and all(value in (0.0, 1.0) for value in known):
        interval = wilson_interval(int(sum(known)), len(known))
        return Estimate(mean=mean, questions=len(known), interval=interval, method="wilson")
    return Estimate(mean=mean, questions=len(known), interval=bootstrap_interval(known), method="bootstrap")


def format_estimate(value: Estimate | None, *, of: int | None = None) -> str:
    """`0.25 [0.21, 0.29]`, followed by ` of 98` if the mean is over fewer questions than `of`."""
    if value is None or not value.questions:
        return "-"
    text = f"{value.mean:.4g}"
    if value.interval is not None:
        text += f" [{value.interval[0]:.4g}, {value.interval[1]:.4g}]"
    return text if of is None or value.questions == of else f"{text} of {value.questions}"
