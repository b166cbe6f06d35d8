"""Differences of arms on shared seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from flatpeak.experiments.statistics import Difference, paired_t

Values = Mapping[int, float]
"""A value per seed."""


def mean(values: Iterable[float]) -> float:
    """The mean of some values."""
    known = list(values)
    return sum(known) / len(known)


def paired(arm: Values, base: Values) -> Difference:
    """The difference over the seeds that both have."""
    seeds = sorted(arm.keys() & base.keys())
    return paired_t([arm[seed] for seed in seeds], [base[seed] for seed in seeds])


def interval(difference: Difference) -> str:
    """A difference with its 95% interval, which equal differences do not have."""
    if math.isnan(difference.low):
        return f"{difference.estimate:+.3f}"
    return f"{difference.estimate:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
