"""Estimates over seeds as the pages show them, and Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatpeak.experiments.statistics import mean_over_seeds, paired_t, scipy_stats


def mean(values: Sequence[float]) -> float:
    """The mean of some values."""
    return sum(values) / len(values)


def interval(values: Sequence[float]) -> str:
    """Mean and half of its 95% t interval; empty without values."""
    if not values:
        return ""
    one = mean_over_seeds(list(values))
    half = one.high - one.estimate
    return f"{one.estimate:.3g}" if math.isnan(half) else f"{one.estimate:.3g} ± {half:.2g}"


def paired_difference(arm: Sequence[float], baseline: Sequence[float]) -> str:
    """Mean paired difference with its 95% t interval."""
    one = paired_t(list(arm), list(baseline))
    return f"{one.estimate:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"


def count(hits: Sequence[bool]) -> str:
    """The number of seeds; if it is 0, with the upper end of the exact 95% interval of their share."""
    return str(sum(hits)) if any(hits) else f"0 (≤ {upper_end_of_zero(len(hits)):.0%})"


def upper_end_of_zero(n: int) -> float:
    """The upper end of the two-sided 95% interval of Clopper and Pearson (1934) for 0 of n."""
    return float(scipy_stats().binomtest(0, n).proportion_ci(0.95, method="exact").high)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; values that differ only by rounding are tied."""
    rounded = [[round(value, 9) for value in values] for values in (a, b)]
    return float(scipy_stats().spearmanr(*rounded).statistic)


def spearman_with_interval(a: Sequence[float], b: Sequence[float]) -> str:
    """Rank correlation over seeds with its 95% interval of Bonett and Wright (2000)."""
    rho = spearman(a, b)
    half = scipy_stats().norm.ppf(0.975) * math.sqrt((1 + rho**2 / 2) / (len(a) - 3))
    low, high = (math.tanh(math.atanh(rho) + sign * half) for sign in (-1, 1))
    return f"{rho:+.2f} [{low:+.2f}, {high:+.2f}]"
