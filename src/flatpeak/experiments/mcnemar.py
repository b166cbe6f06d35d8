"""McNemar's exact test of two arms with a yes or no per shared seed: its p-values, Tango's interval and its power."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatpeak.errors import UserError
from flatpeak.experiments.statistics import check_share, complete_pairs, scipy_stats

MOST_SEEDS_MCNEMAR: Final = 1_000
"""The largest answer of `seeds_needed_mcnemar`."""


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
    """Ends of Tango's score interval. It may exclude 0 although the exact test, which is stricter, does not reject."""
    confidence: float
    p: float
    """Two-sided; 1 without discordant pairs."""
    p_more: float
    """One-sided; tests that the arm has no more yes than the baseline."""
    p_fewer: float
    """One-sided; tests that the arm has no fewer yes than the baseline."""

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
    """Compare two arms with a yes or no on shared seeds, by the binomial test of the discordant pairs.

    McNemar 1947, exact as in Fagerland et al. 2013; the interval is Tango's (1998).
    """
    check_share("confidence", confidence)
    a_N, baseline_N, left_out = complete_pairs(a, baseline, "outcomes")
    if not np.isin([a_N, baseline_N], (0.0, 1.0)).all():
        raise UserError("McNemar's test needs outcomes that are true or false: compare numbers by paired_t")
    both, only_a = int((a_N * baseline_N).sum()), int((a_N > baseline_N).sum())
    only_baseline, n = int((a_N < baseline_N).sum()), a_N.size
    low, high = tango_interval(only_a, only_baseline, n, confidence=confidence)
    discordant = only_a + only_baseline
    return McNemar(
        n=n,
        left_out=left_out,
        both=both,
        only_a=only_a,
        only_baseline=only_baseline,
        neither=n - both - discordant,
        low=low,
        high=high,
        confidence=confidence,
        p=_binomial_p(only_a, discordant, "two-sided"),
        p_more=_binomial_p(only_a, discordant, "greater"),
        p_fewer=_binomial_p(only_a, discordant, "less"),
    )


def tango_interval(only_a: int, only_baseline: int, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """The score interval of a difference of two proportions in paired data (Tango 1998, Statistics in Medicine 17).

    The differences D that the score test accepts, |T(D)| <= z with T(D) = (b - c - n D) / sqrt(n (2 q + D (1 - D))):
    b and c are the discordant counts of the arm and the baseline, and q is the probability of the baseline's that is
    likeliest under D, the larger root of 2 n q^2 - (b + c - (2 n - b + c) D) q - c D (1 - D) = 0. NaN without pairs.
    """
    if n < 1:
        return math.nan, math.nan
    z = float(scipy_stats().norm.ppf((1 + confidence) / 2))
    observed = (only_a - only_baseline) / n

    def statistic(difference: float) -> float:
        linear = -only_a - only_baseline + (2 * n - only_a + only_baseline) * difference
        constant = -only_baseline * difference * (1 - difference)
        q = (math.sqrt(max(0.0, linear**2 - 8 * n * constant)) - linear) / (4 * n)
        variance = n * (2 * q + difference * (1 - difference))
        deviation = only_a - only_baseline - n * difference
        if variance > 0:
            return deviation / math.sqrt(variance)
        return math.copysign(math.inf, deviation) if deviation else 0.0

    # T decreases in D; at the ends of its range T is infinite unless they were observed.
    bisect = import_module("scipy.optimize").bisect
    low = -1.0 if observed == -1 else bisect(lambda d: statistic(d) - z, -1.0, observed, xtol=1e-15)
    high = 1.0 if observed == 1 else bisect(lambda d: statistic(d) + z, observed, 1.0, xtol=1e-15)
    return low, high


def _binomial_p(successes: int, n: int, alternative: str) -> float:
    return float(scipy_stats().binomtest(successes, n, 0.5, alternative=alternative).pvalue) if n else 1.0


def power_of_mcnemar(n: int, *, only_a: float, only_baseline: float, alpha: float = 0.05) -> float:
    """The probability that McNemar's two-sided exact test rejects with n seeds.

    `only_a` and `only_baseline` are the probabilities of the two discordant outcomes. The number of discordant seeds is
    binomial, and given that number, so is the number of each kind: both are summed exactly.
    """
    rejections = _rejections(max(n, 0), only_a, only_baseline, alpha)
    return _mean_over_discordant(n, rejections, only_a + only_baseline) if n > 0 else 0.0


def seeds_needed_mcnemar(*, only_a: float, only_baseline: float, alpha: float = 0.05, power: float = 0.9) -> int | None:
    """The fewest seeds with which McNemar's exact test has the power; None if more than MOST_SEEDS_MCNEMAR.

    The power of an exact test may fall slightly from one n to the next; this is the first n with the power.
    """
    check_share("power", power)
    rejections = _rejections(MOST_SEEDS_MCNEMAR, only_a, only_baseline, alpha)
    for n in range(1, MOST_SEEDS_MCNEMAR + 1):
        if _mean_over_discordant(n, rejections, only_a + only_baseline) >= power:
            return n
    return None


def _rejections(most: int, only_a: float, only_baseline: float, alpha: float) -> NDArray[np.float64]:
    """The probability that the exact test rejects, given m discordant seeds, for m = 0 to `most`.

    It rejects if the rarer outcome has at most c(m) seeds, the largest c with 2 P(X <= c) <= alpha for
    X of m fair tosses.
    """
    check_share("alpha", alpha)
    discordant = only_a + only_baseline
    if not (only_a >= 0 and only_baseline >= 0 and 0 < discordant <= 1):
        raise UserError(
            f"only_a={only_a}, only_baseline={only_baseline}: give the probabilities of the two discordant outcomes, "
            "whose sum is above 0 and at most 1"
        )
    binom, m = scipy_stats().binom, np.arange(most + 1)
    # The quantile is the smallest c with P(X <= c) >= alpha / 2.
    critical = binom.ppf(alpha / 2, m, 0.5)
    critical -= 2 * binom.cdf(critical, m, 0.5) > alpha
    share = only_a / discordant
    rejections: NDArray[np.float64] = binom.cdf(critical, m, share) + binom.cdf(critical, m, 1 - share)
    return rejections


def _mean_over_discordant(n: int, rejections: NDArray[np.float64], discordant: float) -> float:
    """The mean of the probabilities of rejection over the binomial number of discordant seeds."""
    return float(scipy_stats().binom.pmf(np.arange(n + 1), n, discordant) @ rejections[: n + 1])
