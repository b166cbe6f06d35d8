"""The power of the paired t test and of McNemar's exact test, and the seeds that a wanted power needs."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatpeak.errors import UserError
from flatpeak.experiments.statistics import special

MOST_SEEDS: Final = 100_000
"""The largest answer for the paired t test."""
MOST_SEEDS_MCNEMAR: Final = 1_000
"""The largest answer for McNemar's test."""


def power_of_paired_t(n: int, *, sd: float, difference: float, alpha: float = 0.05) -> float:
    """The probability that the two-sided paired t test rejects with n seeds, by the noncentral t distribution.

    `sd` is the standard deviation of the paired differences, `difference` their mean.
    """
    if not (sd > 0 and math.isfinite(sd)):
        raise UserError(f"sd={sd}: give the standard deviation of the paired differences, above 0")
    if difference == 0 or not math.isfinite(difference):
        raise UserError(f"difference={difference}: give the difference that is to be detected, other than 0")
    _check_share("alpha", alpha)
    if n < 2:
        return 0.0
    noncentrality = abs(difference) / sd * math.sqrt(n)
    critical = float(special().stdtrit(n - 1, 1 - alpha / 2))
    upper = 1 - float(special().nctdtr(n - 1, noncentrality, critical))
    lower = float(special().nctdtr(n - 1, noncentrality, -critical))
    # SciPy returns NaN for a lower tail too small for a float.
    return min(1.0, upper + (0.0 if math.isnan(lower) else lower))


def seeds_needed(*, sd: float, difference: float, alpha: float = 0.05, power: float = 0.9) -> int | None:
    """The fewest seeds with which the paired t test has the power; None for more than MOST_SEEDS."""
    _check_share("power", power)
    # The power grows with n: double until it suffices, then halve the interval.
    low, high = 1, 2
    while power_of_paired_t(high, sd=sd, difference=difference, alpha=alpha) < power:
        if high > MOST_SEEDS:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        reached = power_of_paired_t(middle, sd=sd, difference=difference, alpha=alpha) >= power
        low, high = (low, middle) if reached else (middle, high)
    return high if high <= MOST_SEEDS else None


def power_of_mcnemar(n: int, *, only_a: float, only_baseline: float, alpha: float = 0.05) -> float:
    """The probability that McNemar's two-sided exact test rejects with n seeds.

    `only_a` and `only_baseline` are the probabilities of the two discordant outcomes. The number of discordant seeds is
    binomial, and so, given that number, is the number of each kind: both are summed over exactly.
    """
    rejections = _rejections(max(n, 0), only_a, only_baseline, alpha)
    return _mean_over_discordant(n, rejections, only_a + only_baseline) if n > 0 else 0.0


def seeds_needed_mcnemar(*, only_a: float, only_baseline: float, alpha: float = 0.05, power: float = 0.9) -> int | None:
    """The fewest seeds with which McNemar's exact test has the power; None for more than MOST_SEEDS_MCNEMAR.

    The power of an exact test may fall by a little from one n to the next; this is the first n that has it.
    """
    _check_share("power", power)
    rejections = _rejections(MOST_SEEDS_MCNEMAR, only_a, only_baseline, alpha)
    for n in range(1, MOST_SEEDS_MCNEMAR + 1):
        if _mean_over_discordant(n, rejections, only_a + only_baseline) >= power:
            return n
    return None


def _rejections(most: int, only_a: float, only_baseline: float, alpha: float) -> NDArray[np.float64]:
    """The probability that the exact test rejects, given m discordant seeds, for m = 0 to `most`.

    It rejects where the rarer outcome has at most c(m) seeds, 2 P(X <= c) <= alpha for X of m fair tosses; one seed
    more leaves c as it is or raises it by 1.
    """
    _check_share("alpha", alpha)
    discordant = only_a + only_baseline
    if not (only_a >= 0 and only_baseline >= 0 and 0 < discordant <= 1):
        raise UserError(
            f"only_a={only_a}, only_baseline={only_baseline}: give the probabilities of the two discordant outcomes, "
            "whose sum is above 0 and at most 1"
        )
    bdtr = special().bdtr
    rejections = np.zeros(most + 1)
    critical = -1
    for m in range(1, most + 1):
        if 2 * bdtr(critical + 1, m, 0.5) <= alpha:
            critical += 1
        if critical >= 0:
            share = only_a / discordant
            rejections[m] = bdtr(critical, m, share) + bdtr(critical, m, 1 - share)
    return rejections


def _mean_over_discordant(n: int, rejections: NDArray[np.float64], discordant: float) -> float:
    """The mean of the probabilities of rejection over the binomial number of discordant seeds."""
    cumulative = special().bdtr(np.arange(n + 1), n, discordant)
    return float(np.diff(cumulative, prepend=0.0) @ rejections[: n + 1])


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise UserError(f"{name}={value}: give a share between 0 and 1")
