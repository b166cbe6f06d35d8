"""Statistics over seeds: means, paired and unpaired differences, equivalence, trends over doses, Holm's adjustment.

The unit is a run, and a value is its metric. Differences are an arm minus its baseline. A missing value (None or NaN)
leaves its pair out, which is counted. Values without spread have no interval and no p: NaN, because a t statistic or
a bootstrap of them would claim certainty. Intervals and p-values are two-sided unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from flatpeak.errors import UserError

Values = Sequence[float | None] | NDArray[np.floating] | NDArray[np.bool_]
Method = Literal["paired t", "paired BCa bootstrap", "Welch's t"]

RESAMPLES: Final = 9_999
FEWEST_RESAMPLES: Final = 100
_ROUNDING: Final = 4 * float(np.finfo(np.float64).eps)
"""Differences within this share of the values they are of count as equal."""


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
    """Pairs, or the arm's values where the seeds are not shared."""
    n_baseline: int
    left_out: int
    """Pairs with a missing value, or missing values where the seeds are not shared."""
    estimate: float
    low: float
    high: float
    confidence: float
    p: float
    """NaN for the bootstrap, which is an interval only."""
    sd: float
    """The standard deviation of the paired differences; NaN where the seeds are not shared."""
    baseline_sd: float
    """The baseline's standard deviation between seeds: what a rerun with another seed changes anyway."""

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
    """Ends of the interval with confidence 1 - 2 alpha; within the bounds exactly where p < alpha."""
    bound: float
    alpha: float
    p_lower: float
    """Of the difference being at most -bound."""
    p_upper: float
    """Of the difference being at least bound."""

    @property
    def p(self) -> float:
        """The larger of both p-values, because both tests have to reject."""
        return max(self.p_lower, self.p_upper) if not math.isnan(self.p_lower) else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """The mean over seeds of each seed's least-squares slope."""

    n: int
    """Seeds with at least two doses."""
    left_out: int
    """Rows with a missing dose or value, and those of seeds with a single dose."""
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
    mean, sd = _mean_and_sd(known_N)
    low, high, _ = _t_inference(mean, sd / math.sqrt(max(1, known_N.size)), known_N.size - 1, confidence)
    left_out = values_N.size - known_N.size
    return MeanEstimate(
        n=known_N.size, left_out=left_out, estimate=mean, low=low, high=high, confidence=confidence, sd=sd
    )


def paired_t(a: Values, baseline: Values, *, confidence: float = 0.95) -> Difference:
    """Compare two arms on shared seeds by the t test of their differences (Student 1908)."""
    differences_N, baseline_N, left_out = paired_differences(a, baseline)
    mean, sd = _mean_and_sd(differences_N)
    low, high, p = _t_inference(mean, sd / math.sqrt(max(1, differences_N.size)), differences_N.size - 1, confidence)
    return Difference(
        method="paired t",
        n=differences_N.size,
        n_baseline=differences_N.size,
        left_out=left_out,
        estimate=mean,
        low=low,
        high=high,
        confidence=confidence,
        p=p,
        sd=sd,
        baseline_sd=_mean_and_sd(baseline_N)[1],
    )


def paired_bca(
    a: Values, baseline: Values, *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Difference:
    """Bootstrap the mean of the paired differences: bias-corrected and accelerated (Efron 1987), fixed by `seed`.

    Narrower than it should be for few seeds (docs/sweeps.md has its measured coverage): the t interval decides, and
    this one says whether skewed or clustered differences would change the conclusion.
    """
    _check_confidence(confidence)
    if resamples < FEWEST_RESAMPLES:
        raise UserError(
            f"resamples={resamples}: the tails need at least {FEWEST_RESAMPLES}; the default is {RESAMPLES}"
        )
    differences_N, baseline_N, left_out = paired_differences(a, baseline)
    mean, sd = _mean_and_sd(differences_N)
    low = high = math.nan
    if sd > 0:
        low, high = _bca_interval(differences_N, confidence=confidence, resamples=resamples, seed=seed)
    return Difference(
        method="paired BCa bootstrap",
        n=differences_N.size,
        n_baseline=differences_N.size,
        left_out=left_out,
        estimate=mean,
        low=low,
        high=high,
        confidence=confidence,
        p=math.nan,
        sd=sd,
        baseline_sd=_mean_and_sd(baseline_N)[1],
    )


def welch(a: Values, baseline: Values, *, confidence: float = 0.95) -> Difference:
    """Compare two arms that do not share seeds, without assuming equal variances (Welch 1947)."""
    samples = [as_values(a, "the arm"), as_values(baseline, "the baseline")]
    known = [sample_N[~np.isnan(sample_N)] for sample_N in samples]
    (mean_a, sd_a), (mean_b, sd_b) = (_mean_and_sd(sample_N) for sample_N in known)
    n_a, n_b = (sample_N.size for sample_N in known)
    low = high = p = math.nan
    largest = max(sd_a, sd_b) if n_a > 1 and n_b > 1 else math.nan
    if largest > 0:
        # Shares of the larger deviation: squares of the deviations themselves may overflow or vanish.
        share_a, share_b = (sd_a / largest) ** 2 / n_a, (sd_b / largest) ** 2 / n_b
        freedom = (share_a + share_b) ** 2 / (share_a**2 / (n_a - 1) + share_b**2 / (n_b - 1))
        low, high, p = _t_inference(mean_a - mean_b, largest * math.sqrt(share_a + share_b), freedom, confidence)
    return Difference(
        method="Welch's t",
        n=n_a,
        n_baseline=n_b,
        left_out=sum(sample_N.size for sample_N in samples) - n_a - n_b,
        estimate=mean_a - mean_b,
        low=low,
        high=high,
        confidence=confidence,
        p=p,
        sd=math.nan,
        baseline_sd=sd_b,
    )


def tost(a: Values, baseline: Values, *, bound: float, alpha: float = 0.05) -> Equivalence:
    """Test whether the paired difference lies within plus or minus `bound` (two one-sided t tests, Schuirmann 1987)."""
    if not (bound > 0 and math.isfinite(bound)):
        raise UserError(f"bound={bound}: give the largest difference that still counts as none, above 0")
    if not 0 < alpha < 0.5:
        raise UserError(f"alpha={alpha}: give a level between 0 and 0.5, such as 0.05")
    differences_N, _, left_out = paired_differences(a, baseline)
    mean, sd = _mean_and_sd(differences_N)
    error, freedom = sd / math.sqrt(max(1, differences_N.size)), differences_N.size - 1
    low, high, _ = _t_inference(mean, error, freedom, 1 - 2 * alpha)
    p_lower = p_upper = math.nan
    if error > 0:
        p_lower = float(special().stdtr(freedom, -(mean + bound) / error))
        p_upper = float(special().stdtr(freedom, (mean - bound) / error))
    return Equivalence(
        n=differences_N.size,
        left_out=left_out,
        estimate=mean,
        low=low,
        high=high,
        bound=bound,
        alpha=alpha,
        p_lower=p_lower,
        p_upper=p_upper,
    )


def slope(doses: Values, values: Values, seeds: Sequence[Hashable], *, confidence: float = 0.95) -> Slope:
    """Estimate a linear trend over doses, the seeds being the clusters: one slope per seed, then a t test over seeds.

    Runs of one seed share their start, so that the rows are no independent observations; the slopes are (the summary
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
    slopes, used = [], 0
    for rows in rows_by_seed.values():
        if np.ptp(doses_N[rows]) > 0:
            slopes.append(_least_squares_slope(doses_N[rows], values_N[rows]))
            used += len(rows)
    mean, sd = _mean_and_sd(np.asarray(slopes))
    low, high, p = _t_inference(mean, sd / math.sqrt(max(1, len(slopes))), len(slopes) - 1, confidence)
    return Slope(
        n=len(slopes),
        left_out=len(doses_N) - used,
        estimate=mean,
        low=low,
        high=high,
        confidence=confidence,
        p=p,
        sd=sd,
        slopes=tuple(slopes),
    )


def holm(p_values: Values, *, hypotheses: int | None = None) -> list[float]:
    """Adjust p-values for several tests by Holm's step-down method (Holm 1979), in the order given.

    A missing p-value stays NaN. `hypotheses` is the number of tests that were planned: all that have a p-value unless
    it says more.
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


def as_values(values: Values, name: str) -> NDArray[np.float64]:
    """The values as float64, missing ones as NaN; UserError for infinite ones and for no numbers."""
    try:
        array_N = np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: give a flat list of numbers, None where one is missing ({error})") from None
    if np.isinf(array_N).any():
        raise UserError(f"{name}: entry {int(np.flatnonzero(np.isinf(array_N))[0])} is infinite; leave it out as None")
    return array_N


def paired_differences(a: Values, baseline: Values) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """The differences of complete pairs, the baseline's values in them, and the number of pairs left out.

    Differences that are equal but for rounding are made equal.
    """
    a_N, baseline_N = as_values(a, "the arm"), as_values(baseline, "the baseline")
    if a_N.size != baseline_N.size:
        raise UserError(
            f"{a_N.size} values of the arm and {baseline_N.size} of the baseline: give one of each per shared seed, in "
            "the same order, or use welch"
        )
    complete_N = ~(np.isnan(a_N) | np.isnan(baseline_N))
    a_N, baseline_N = a_N[complete_N], baseline_N[complete_N]
    with np.errstate(over="ignore"):
        differences_N = a_N - baseline_N
    if not np.isfinite(differences_N).all():
        raise UserError("a difference of two values overflows: rescale the metric")
    largest = max(np.abs(a_N).max(initial=0), np.abs(baseline_N).max(initial=0))
    if differences_N.size and np.ptp(differences_N) <= _ROUNDING * largest:
        differences_N = np.full_like(differences_N, differences_N[0])
    return differences_N, baseline_N, int((~complete_N).sum())


def special() -> Any:
    """SciPy's distribution functions, loaded when a statistic needs them."""
    try:
        return import_module("scipy.special")
    except ImportError as error:
        raise UserError(f'statistics over seeds need SciPy ({error}): pip install "flatpeak[experiments]"') from None


def _mean_and_sd(values_N: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation (n - 1), without overflow or underflow of the squares; sd exactly 0 for constants."""
    if not values_N.size:
        return math.nan, math.nan
    exponent = int(np.frexp(np.abs(values_N).max())[1])
    scaled_N = np.ldexp(values_N, -exponent)
    constant = bool((values_N == values_N[0]).all())
    mean = float(scaled_N[0] if constant else scaled_N.mean())
    sd = math.nan if values_N.size < 2 else 0.0 if constant else float(scaled_N.std(ddof=1))
    return math.ldexp(mean, exponent), sd if math.isnan(sd) else math.ldexp(sd, exponent)


def _t_inference(estimate: float, error: float, freedom: float, confidence: float) -> tuple[float, float, float]:
    """The t interval's ends and the two-sided p of an estimate with a standard error; NaN without spread."""
    _check_confidence(confidence)
    if not error > 0:
        return math.nan, math.nan, math.nan
    half = float(special().stdtrit(freedom, (1 + confidence) / 2)) * error
    return estimate - half, estimate + half, 2 * float(special().stdtr(freedom, -abs(estimate) / error))


def _bca_interval(
    values_N: NDArray[np.float64], *, confidence: float, resamples: int, seed: int
) -> tuple[float, float]:
    """The BCa interval of the mean of values that differ."""
    exponent = int(np.frexp(np.abs(values_N).max())[1])
    scaled_N = np.ldexp(values_N, -exponent)
    draws_BN = np.random.default_rng(seed).integers(0, scaled_N.size, (resamples, scaled_N.size))
    means_B, mean = scaled_N[draws_BN].mean(axis=1), scaled_N.mean()
    ndtr, ndtri = special().ndtr, special().ndtri
    below = ((means_B < mean).sum() + (means_B <= mean).sum()) / (2 * resamples)
    bias = float(ndtri(min(max(below, 0.5 / resamples), 1 - 0.5 / resamples)))
    # Leaving out value i moves the mean by (mean - value_i) / (n - 1): the jackknife's skewness is that of the values.
    centred_N = (scaled_N - mean) / np.abs(scaled_N - mean).max()
    acceleration = float((centred_N**3).sum() / (6 * (centred_N**2).sum() ** 1.5))
    ends = []
    for tail in ((1 - confidence) / 2, (1 + confidence) / 2):
        shifted = bias + float(ndtri(tail))
        shrink = 1 - acceleration * shifted
        level = float(ndtr(bias + shifted / shrink)) if shrink > 0 else float(shifted > 0)
        ends.append(math.ldexp(float(np.quantile(means_B, level)), exponent))
    return ends[0], ends[1]


def _least_squares_slope(doses_N: NDArray[np.float64], values_N: NDArray[np.float64]) -> float:
    """The least-squares slope of values over doses that differ."""
    width = np.ptp(doses_N)
    centred_N = (doses_N - doses_N.mean()) / width
    return float((centred_N * (values_N - values_N.mean())).sum() / (centred_N**2).sum() / width)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise UserError(f"confidence={confidence}: give a share between 0 and 1, such as 0.95")
