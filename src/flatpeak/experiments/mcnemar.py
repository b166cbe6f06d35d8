"""McNemar's exact test of two arms with a yes or no per shared seed, and the score interval of their difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatpeak.errors import UserError
from flatpeak.experiments.statistics import as_values, special


@dataclass(frozen=True, kw_only=True, slots=True)
class McNemar:
    """The counts of pairs by outcome, the difference in proportions with its interval, and the exact p-values."""

    n: int
    left_out: int
    """Pairs with a missing outcome."""
    both: int
    only_a: int
    """Discordant: yes in the arm, no in the baseline."""
    only_baseline: int
    neither: int
    low: float
    high: float
    """Ends of Tango's score interval. It may leave out 0 where the exact test, which is stricter, does not reject."""
    confidence: float
    p: float
    """Two-sided; 1 without discordant pairs."""
    p_more: float
    """One-sided: of the arm having no more yes than the baseline."""
    p_fewer: float
    """One-sided: of the arm having no fewer yes than the baseline."""

    @property
    def estimate(self) -> float:
        """The arm's proportion of yes minus the baseline's."""
        return (self.only_a - self.only_baseline) / self.n if self.n else math.nan


def mcnemar_exact(
    a: Sequence[bool | None] | NDArray[np.bool_],
    baseline: Sequence[bool | None] | NDArray[np.bool_],
    *,
    confidence: float = 0.95,
) -> McNemar:
    """Compare two arms that end in yes or no on shared seeds, by the binomial test of the discordant pairs.

    McNemar 1947, exact as in Fagerland et al. 2013; the interval is Tango's (1998).
    """
    if not 0 < confidence < 1:
        raise UserError(f"confidence={confidence}: give a share between 0 and 1, such as 0.95")
    a_N, baseline_N = as_values(a, "the arm"), as_values(baseline, "the baseline")
    if a_N.size != baseline_N.size:
        raise UserError(
            f"{a_N.size} outcomes of the arm and {baseline_N.size} of the baseline: give one of each per shared seed, "
            "in the same order"
        )
    complete_N = ~(np.isnan(a_N) | np.isnan(baseline_N))
    if not np.isin(np.concatenate([a_N[complete_N], baseline_N[complete_N]]), (0.0, 1.0)).all():
        raise UserError("McNemar's test needs outcomes that are true or false: compare numbers by paired_t")
    yes_N, baseline_yes_N = a_N[complete_N] == 1, baseline_N[complete_N] == 1
    both, only_a = int((yes_N & baseline_yes_N).sum()), int((yes_N & ~baseline_yes_N).sum())
    only_baseline, n = int((~yes_N & baseline_yes_N).sum()), int(complete_N.sum())
    low, high = tango_interval(only_a, only_baseline, n, confidence=confidence)
    discordant = only_a + only_baseline
    return McNemar(
        n=n,
        left_out=int((~complete_N).sum()),
        both=both,
        only_a=only_a,
        only_baseline=only_baseline,
        neither=n - both - discordant,
        low=low,
        high=high,
        confidence=confidence,
        p=min(1.0, 2 * _binomial_cdf(min(only_a, only_baseline), discordant)),
        p_more=_binomial_cdf(only_baseline, discordant),
        p_fewer=_binomial_cdf(only_a, discordant),
    )


def tango_interval(only_a: int, only_baseline: int, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """The score interval of a difference of two proportions in paired data (Tango 1998, Statistics in Medicine 17).

    The differences D that the score test accepts, |T(D)| <= z with T(D) = (b - c - n D) / sqrt(n (2 q + D (1 - D))):
    b and c are the discordant counts of the arm and the baseline, and q is the probability of the baseline's that is
    likeliest under D, the larger root of 2 n q^2 - (b + c - (2 n - b + c) D) q - c D (1 - D) = 0. NaN without pairs.
    """
    if n < 1:
        return math.nan, math.nan
    z = float(special().ndtri((1 + confidence) / 2))
    observed = (only_a - only_baseline) / n

    def statistic(difference: float) -> float:
        linear = -only_a - only_baseline + (2 * n - only_a + only_baseline) * difference
        constant = -only_baseline * difference * (1 - difference)
        q = (math.sqrt(max(0.0, linear**2 - 8 * n * constant)) - linear) / (4 * n)
        variance = n * (2 * q + difference * (1 - difference))
        deviation = only_a - only_baseline - n * difference
        return deviation / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, deviation)

    # T falls as D grows; at the ends of its range T is infinite unless they were observed.
    low = -1.0 if observed == -1 else _bisect(lambda d: statistic(d) > z, -1.0, observed)
    high = 1.0 if observed == 1 else _bisect(lambda d: statistic(d) >= -z, observed, 1.0)
    return low, high


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The point between `low`, where the condition holds, and `high`, where it does not, at which that changes."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2


def _binomial_cdf(successes: int, n: int) -> float:
    """The probability of at most so many successes in n tosses of a fair coin; 1 for no toss."""
    return float(special().bdtr(successes, n, 0.5)) if n else 1.0
