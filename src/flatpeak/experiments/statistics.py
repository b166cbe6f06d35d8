"""Statistics over seeds: means, differences, equivalence, trends over doses, power; computed with SciPy.

The unit is a run, and a value is its metric. Differences are an arm minus its baseline. A missing value (None or NaN)
excludes its pair, and excluded pairs are counted. Values without spread have interval and p NaN, because a t statistic
or a bootstrap of them would claim certainty. Intervals and p-values are two-sided unless a name says otherwise.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from flatpeak.errors import UserError

Values = Sequence[float | None] | NDArray[np.floating] | NDArray[np.bool_]
Method = Literal["paired t", "paired BCa bootstrap", "Welch's t"]

RESAMPLES: Final = 9_999
FEWEST_RESAMPLES: Final = 100
MOST_SEEDS: Final = 100_000
"""The largest answer of `seeds_needed`."""
_ROUNDING: Final = 4 * float(np.finfo(np.float64).eps)
"""Differences within this share of the compared values count as equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanEstimate:
    """The mean over seeds with its t interval."""

    n: int
    left_out: int
    """Missing values."""
    estimate: float
    """NaN without values."""
    low: float
    high: float
    confidence: float
    sd: float
    """The standard deviation between seeds (n - 1 in the denominator); NaN for fewer than two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The mean difference of an arm from its baseline."""

    method: Method
    n: int
    """Pairs, or the arm's values if the seeds are not shared."""
    n_baseline: int
    left_out: int
    """Pairs with a missing value, or missing values if the seeds are not shared."""
    estimate: float
    low: float
    high: float
    confidence: float
    p: float
    """NaN for the bootstrap, which gives only an interval."""
    sd: float
    """The standard deviation of the paired differences; NaN if the seeds are not shared."""
    baseline_sd: float
    """The baseline's standard deviation between seeds: the change to expect from another seed alone."""

    @property
    def paired(self) -> bool:
        """Whether arm and baseline share their seeds."""
        return self.method != "Welch's t"

    @property
    def effect(self) -> float:
        """The difference in standard deviations of the baseline between seeds (Glass's Delta)."""
        return self.estimate / self.baseline_sd if self.baseline_sd > 0 else math.nan

    @property
    def d_z(self) -> float:
        """The difference in standard deviations of the paired differences (Cohen's d_z), which sets the power."""
        return self.estimate / self.sd if self.sd > 0 else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Equivalence:
    """Two one-sided tests of whether a paired difference lies within plus or minus a bound."""

    n: int
    left_out: int
    estimate: float
    low: float
    high: float
    """Ends of the interval with confidence 1 - 2 alpha; within the bounds exactly if p < alpha."""
    bound: float
    alpha: float
    p_lower: float
    """Tests that the difference is at most -bound."""
    p_upper: float
    """Tests that the difference is at least bound."""

    @property
    def p(self) -> float:
        """The larger of both p-values, because both tests must reject."""
        return max(self.p_lower, self.p_upper) if not math.isnan(self.p_lower) else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """The mean over seeds of each seed's least-squares slope."""

    n: int
    """Seeds with at least two doses."""
    left_out: int
    """Rows with a missing dose or value, and rows of seeds with a single dose."""
    estimate: float
    low: float
    high: float
    confidence: float
    p: float
    sd: float
    slopes: tuple[float, ...]
    """One per seed, in order of first appearance."""


def mean_over_seeds(values: Values, *, confidence: float = 0.95) -> MeanEstimate:
    """Estimate the mean with its t interval: mean +- t(n - 1) sd / sqrt(n)."""
    values_N = as_values(values, "values")
    known_N = values_N[~np.isnan(values_N)]
    summary, _ = _t_test(known_N, confidence)
    return MeanEstimate(left_out=values_N.size - known_N.size, **summary)


def paired_t(a: Values, baseline: Values, *, confidence: float = 0.95) -> Difference:
    """Compare two arms on shared seeds by the t test of their differences (Student 1908)."""
    differences_N, baseline_N, left_out = paired_differences(a, baseline)
    summary, p = _t_test(differences_N, confidence)
    n, baseline_sd = baseline_N.size, _mean_and_sd(baseline_N)[1]
    return Difference(method="paired t", n_baseline=n, left_out=left_out, p=p, baseline_sd=baseline_sd, **summary)


def paired_bca(
    a: Values, baseline: Values, *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Difference:
    """Bootstrap the mean of the paired differences: bias-corrected and accelerated (Efron 1987), fixed by `seed`.

    Too narrow for few seeds (docs/sweeps.md has its measured coverage): the t interval decides, and this interval shows
    whether skewed or clustered differences would change the conclusion.
    """
    if resamples < FEWEST_RESAMPLES:
        raise UserError(
            f"resamples={resamples}: the tails need at least {FEWEST_RESAMPLES}; the default is {RESAMPLES}"
        )
    by_t = paired_t(a, baseline, confidence=confidence)
    low = high = math.nan
    if by_t.sd > 0:
        bootstrap = scipy_stats().bootstrap
        if "rng" not in signature(bootstrap).parameters:
            raise UserError('the bootstrap over seeds needs SciPy 1.15 or newer: pip install "flatpeak[experiments]"')
        draws = {"n_resamples": resamples, "rng": np.random.default_rng(seed)}
        differences_N, _, _ = paired_differences(a, baseline)
        drawn = bootstrap((differences_N,), np.mean, confidence_level=confidence, method="BCa", **draws)
        low, high = map(float, drawn.confidence_interval)
    return replace(by_t, method="paired BCa bootstrap", low=low, high=high, p=math.nan)


def welch(a: Values, baseline: Values, *, confidence: float = 0.95) -> Difference:
    """Compare two arms that do not share seeds, without assuming equal variances (Welch 1947)."""
    check_share("confidence", confidence)
    samples = [as_values(a, "the arm"), as_values(baseline, "the baseline")]
    known = [sample_N[~np.isnan(sample_N)] for sample_N in samples]
    known = [_equal_up_to_rounding(sample_N, float(np.abs(sample_N).max(initial=0))) for sample_N in known]
    a_N, baseline_N = known
    (mean, sd), (baseline_mean, baseline_sd) = map(_mean_and_sd, known)
    low = high = p = math.nan
    if max(sd, baseline_sd) > 0 and min(a_N.size, baseline_N.size) > 1:
        low, high, p = _interval_and_p("ttest_ind", a_N, baseline_N, equal_var=False, confidence=confidence)
    return Difference(
        method="Welch's t",
        n=a_N.size,
        n_baseline=baseline_N.size,
        left_out=sum(sample_N.size for sample_N in samples) - a_N.size - baseline_N.size,
        estimate=mean - baseline_mean,
        low=low,
        high=high,
        confidence=confidence,
        p=p,
        sd=math.nan,
        baseline_sd=baseline_sd,
    )


def tost(a: Values, baseline: Values, *, bound: float, alpha: float = 0.05) -> Equivalence:
    """Test whether the paired difference lies within plus or minus `bound` (two one-sided t tests, Schuirmann 1987)."""
    if not (bound > 0 and math.isfinite(bound)):
        raise UserError(f"bound={bound}: give the largest difference that still counts as none, above 0")
    if not 0 < alpha < 0.5:
        raise UserError(f"alpha={alpha}: give a level between 0 and 0.5, such as 0.05")
    differences_N, _, left_out = paired_differences(a, baseline)
    summary, _ = _t_test(differences_N, 1 - 2 * alpha)
    _, p_lower = _t_test(differences_N, 1 - alpha, mean=-bound, alternative="greater")
    _, p_upper = _t_test(differences_N, 1 - alpha, mean=bound, alternative="less")
    del summary["confidence"], summary["sd"]
    return Equivalence(left_out=left_out, bound=bound, alpha=alpha, p_lower=p_lower, p_upper=p_upper, **summary)


def slope(doses: Values, values: Values, seeds: Sequence[Hashable], *, confidence: float = 0.95) -> Slope:
    """Estimate a linear trend over doses with seeds as clusters: one slope per seed, then a t test over seeds.

    Runs of one seed share their start, so the rows are not independent observations; the slopes are (the summary
    measures of Matthews et al. 1990).
    """
    doses_N, values_N = as_values(doses, "doses"), as_values(values, "values")
    if not len(doses_N) == len(values_N) == len(seeds):
        raise UserError(
            f"{len(doses_N)} doses, {len(values_N)} values and {len(seeds)} seeds: give one of each per run"
        )
    rows_by_seed: dict[Hashable, list[int]] = {}
    for index, seed in enumerate(seeds):
        if not math.isnan(doses_N[index]) and not math.isnan(values_N[index]):
            rows_by_seed.setdefault(seed, []).append(index)
    fitted = [rows for rows in rows_by_seed.values() if _varies(doses_N[rows])]
    slopes = tuple(float(scipy_stats().linregress(doses_N[rows], values_N[rows]).slope) for rows in fitted)
    summary, p = _t_test(np.asarray(slopes), confidence)
    return Slope(left_out=len(doses_N) - sum(map(len, fitted)), p=p, slopes=slopes, **summary)


def holm(p_values: Values, *, hypotheses: int | None = None) -> list[float]:
    """Adjust p-values for several tests by Holm's step-down method (Holm 1979), in the order given.

    A missing p-value stays NaN. `hypotheses` is the number of planned tests; by default the number of p-values that are
    not missing.
    """
    p_N = as_values(p_values, "p-values")
    known = np.flatnonzero(~np.isnan(p_N))
    if ((p_N[known] < 0) | (p_N[known] > 1)).any():
        raise UserError("p-values lie between 0 and 1: give p-values, not statistics")
    planned = known.size if hypotheses is None else hypotheses
    if planned < known.size:
        raise UserError(f"hypotheses={planned}, but {known.size} p-values are given: count every planned test")
    order = known[np.argsort(p_N[known], kind="stable")]
    adjusted_N = np.full(p_N.size, math.nan)
    adjusted_N[order] = np.minimum(1.0, np.maximum.accumulate(p_N[order] * (planned - np.arange(order.size))))
    return [float(value) for value in adjusted_N]


def power_of_paired_t(n: int, *, sd: float, difference: float, alpha: float = 0.05) -> float:
    """The probability that the two-sided paired t test rejects with n seeds, by the noncentral t distribution.

    `sd` is the standard deviation of the paired differences, `difference` their mean.
    """
    if not (sd > 0 and math.isfinite(sd)):
        raise UserError(f"sd={sd}: give the standard deviation of the paired differences, above 0")
    if difference == 0 or not math.isfinite(difference):
        raise UserError(f"difference={difference}: give the difference that is to be detected, other than 0")
    check_share("alpha", alpha)
    if n < 2:
        return 0.0
    noncentrality = abs(difference) / sd * math.sqrt(n)
    t, nct = scipy_stats().t, scipy_stats().nct
    critical = t.isf(alpha / 2, n - 1)
    return min(1.0, float(nct.sf(critical, n - 1, noncentrality) + nct.sf(critical, n - 1, -noncentrality)))


def seeds_needed(*, sd: float, difference: float, alpha: float = 0.05, power: float = 0.9) -> int | None:
    """The fewest seeds with which the paired t test has the power; None if more than MOST_SEEDS."""
    check_share("power", power)
    n = bisect_left(
        range(MOST_SEEDS + 1), power, key=lambda n: power_of_paired_t(n, sd=sd, difference=difference, alpha=alpha)
    )
    return n if n <= MOST_SEEDS else None


def as_values(values: Values, name: str) -> NDArray[np.float64]:
    """The values as float64, missing ones as NaN; UserError for infinite values and for no numbers."""
    try:
        array_N = np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: give a flat list of numbers, None where one is missing ({error})") from None
    if np.isinf(array_N).any():
        raise UserError(f"{name}: entry {int(np.flatnonzero(np.isinf(array_N))[0])} is infinite; leave it out as None")
    return array_N


def complete_pairs(
    a: Values, baseline: Values, what: str = "values"
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """The values of arm and baseline in pairs without missing values, and the number of the other pairs."""
    a_N, baseline_N = as_values(a, "the arm"), as_values(baseline, "the baseline")
    if a_N.size != baseline_N.size:
        raise UserError(
            f"{a_N.size} {what} of the arm and {baseline_N.size} of the baseline: give one of each per shared seed, in "
            "the same order"
        )
    complete_N = ~(np.isnan(a_N) | np.isnan(baseline_N))
    return a_N[complete_N], baseline_N[complete_N], int((~complete_N).sum())


def paired_differences(a: Values, baseline: Values) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """The differences of complete pairs, the baseline's values in them, and the number of pairs left out.

    Differences that are equal up to rounding are made equal.
    """
    a_N, baseline_N, left_out = complete_pairs(a, baseline)
    with np.errstate(over="ignore"):
        differences_N = a_N - baseline_N
    if not np.isfinite(differences_N).all():
        raise UserError("a difference of two values overflows: rescale the metric")
    largest = max(np.abs(a_N).max(initial=0), np.abs(baseline_N).max(initial=0))
    return _equal_up_to_rounding(differences_N, largest), baseline_N, left_out


def _equal_up_to_rounding(values_N: NDArray[np.float64], largest: float) -> NDArray[np.float64]:
    """The values, made equal if they differ by no more than the rounding of numbers as large as `largest`."""
    if values_N.size and np.ptp(values_N) <= _ROUNDING * largest:
        return np.full_like(values_N, values_N[0])
    return values_N


def scipy_stats() -> Any:
    """`scipy.stats`, loaded when a statistic first needs it."""
    try:
        return import_module("scipy.stats")
    except ImportError as error:
        raise UserError(f'statistics over seeds need SciPy ({error}): pip install "flatpeak[experiments]"') from None


def _varies(values_N: NDArray[np.float64]) -> bool:
    return bool((values_N != values_N[:1]).any())


def _mean_and_sd(values_N: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation (n - 1); the sd of equal values is exactly 0."""
    if not _varies(values_N):
        return (float(values_N[0]) if values_N.size else math.nan), (0.0 if values_N.size > 1 else math.nan)
    with np.errstate(over="ignore"):  # for a metric that diverged
        return float(values_N.mean()), float(values_N.std(ddof=1))


def _t_test(
    values_N: NDArray[np.float64], confidence: float, *, mean: float = 0.0, alternative: str = "two-sided"
) -> tuple[dict[str, Any], float]:
    """The mean of the values with its t interval, by field of the results here, and the p for a mean of `mean`."""
    check_share("confidence", confidence)
    estimate, sd = _mean_and_sd(values_N)
    low = high = p = math.nan
    if sd > 0:
        low, high, p = _interval_and_p("ttest_1samp", values_N, mean, alternative=alternative, confidence=confidence)
    fields = {"n": values_N.size, "estimate": estimate, "sd": sd, "low": low, "high": high, "confidence": confidence}
    return fields, p


def _interval_and_p(test: str, *arguments: Any, confidence: float, **options: Any) -> tuple[float, float, float]:
    """The interval and the p-value of a t test of scipy.stats."""
    with warnings.catch_warnings():
        # SciPy warns if one of two arms is constant, whose variance 0 is correct.
        warnings.simplefilter("ignore", RuntimeWarning)
        result = getattr(scipy_stats(), test)(*arguments, **options)
    low, high = result.confidence_interval(confidence)
    return float(low), float(high), float(result.pvalue)


def check_share(name: str, value: float) -> None:
    """Raise UserError if the value is not a share between 0 and 1."""
    if not 0 < value < 1:
        raise UserError(f"{name}={value}: give a share between 0 and 1")
