"""Statistics over seeds keep their values, and say so where there is nothing to estimate."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from scipy import stats

from flatpeak.errors import UserError
from flatpeak.experiments import (
    holm,
    mean_over_seeds,
    paired_bca,
    paired_t,
    power_of_paired_t,
    seeds_needed,
    slope,
    tost,
    welch,
)
from flatpeak.experiments.statistics import MOST_SEEDS

SEEDS_10_TO_17 = [0.31, 0.12, 0.55, 0.90, 0.02, 0.71, 0.33, 0.41]
BASELINE = [0.05, 0.02, 0.60, 0.10, 0.03, 0.04, 0.30, 0.01]


def near(expected: float) -> Any:
    """What a figure has to agree with to a relative 1e-10."""
    return pytest.approx(expected, rel=1e-10, abs=1e-300)


def test_the_values_of_eight_seeds() -> None:
    # Computed by statsmodels 0.15: DescrStatsW, CompareMeans, ttost_paired.
    mean = mean_over_seeds(SEEDS_10_TO_17)
    assert (mean.estimate, mean.sd) == (near(0.41875), near(0.2931814406521278))
    assert (mean.low, mean.high) == (near(0.17364418178128166), near(0.6638558182187184))
    paired = paired_t(SEEDS_10_TO_17, BASELINE)
    assert (paired.estimate, paired.p) == (near(0.275), near(0.046302810284960284))
    assert (paired.low, paired.high) == (near(0.005947439676376676), near(0.5440525603236234))
    assert (paired.sd, paired.baseline_sd) == (near(0.3218251521733945), near(0.20708435134367004))
    assert (paired.d_z, paired.effect) == (near(paired.estimate / paired.sd), near(0.275 / paired.baseline_sd))
    assert (paired.paired, paired.n, paired.n_baseline, paired.left_out) == (True, 8, 8, 0)
    unpaired = welch(SEEDS_10_TO_17, BASELINE[:5])
    assert (unpaired.estimate, unpaired.p) == (near(0.25875), near(0.11971940003430286))
    assert (unpaired.low, unpaired.high) == (near(-0.0804514178478874), near(0.5979514178478875))
    assert (unpaired.paired, unpaired.n, unpaired.n_baseline) == (False, 8, 5)
    equal = tost(SEEDS_10_TO_17, BASELINE, bound=0.6)
    assert (equal.p_lower, equal.p_upper, equal.p) == (near(5.859888737176937e-05), near(equal.p), near(equal.p))
    assert (equal.low, equal.high, equal.p) == (
        near(0.05943034909649214), near(0.4905696509035079), near(0.012232873094866908)
    )  # fmt: skip


def test_equivalence_is_shown_exactly_where_the_interval_lies_within_the_bounds() -> None:
    generator = np.random.default_rng(5)
    decisions = set()
    for _ in range(200):
        a, baseline = generator.normal(size=(2, 8))
        result = tost(a, baseline, bound=0.8, alpha=0.1)
        assert (result.p < 0.1) == (result.low > -0.8 and result.high < 0.8)
        decisions.add(result.p < 0.1)
    assert decisions == {True, False}


@pytest.mark.parametrize(
    ("confidence", "seed", "low", "high"),
    [(0.95, 0, 0.1025, 0.5133702761752166), (0.8, 3, 0.15125, 0.44075906930877107)],
)
def test_the_bca_interval_of_eight_seeds(confidence: float, seed: int, low: float, high: float) -> None:
    result = paired_bca(SEEDS_10_TO_17, BASELINE, confidence=confidence, resamples=999, seed=seed)
    assert (result.low, result.high) == (near(low), near(high))
    assert math.isnan(result.p)


def test_the_bca_interval_is_fixed_by_its_seed() -> None:
    def interval(seed: int) -> tuple[float, float]:
        result = paired_bca(SEEDS_10_TO_17, BASELINE, seed=seed)
        return result.low, result.high

    assert interval(0) == interval(0)
    assert interval(0) != interval(1)


def test_the_bca_interval_of_two_seeds_ends_at_the_two_differences() -> None:
    # A resample is one of 0 (1/4), 0.5 (1/2) and 1 (1/4), so that both 2.5% quantiles are ends.
    result = paired_bca([0.0, 1.0], [0.0, 0.0])
    assert (result.low, result.high) == (0.0, 1.0)


def test_the_bca_interval_of_one_distant_difference_leans_towards_it() -> None:
    result = paired_bca([0.0] * 7 + [0.1, 1.0], [0.0] * 9)
    assert result.high - result.estimate > 2 * (result.estimate - result.low) > 0


def test_a_pair_with_a_missing_value_is_left_out_and_counted() -> None:
    a = [1.0, None, 3.0, 5.0, math.nan]
    baseline = [0.0, 9.0, None, 1.0, 7.0]
    # Two complete pairs, differences 1 and 4: mean 2.5, sd 4.5 ** 0.5, t(1) at 97.5% = tan(0.475 pi).
    half = math.tan(0.475 * math.pi) * math.sqrt(4.5 / 2)
    for result in (paired_t(a, baseline), tost(a, baseline, bound=1), paired_bca(a, baseline)):
        assert (result.n, result.left_out, result.estimate) == (2, 3, 2.5)
    assert paired_t(a, baseline).high == near(2.5 + half)
    # t with one degree of freedom is Cauchy's distribution: p = 1 - 2 arctan(t) / pi.
    assert paired_t(a, baseline).p == near(1 - 2 * math.atan(2.5 / math.sqrt(4.5 / 2)) / math.pi)
    unpaired = welch(a, baseline)
    assert (unpaired.n, unpaired.n_baseline, unpaired.left_out) == (3, 4, 3)
    alone = mean_over_seeds(a)
    assert (alone.n, alone.left_out, alone.estimate) == (3, 2, 3.0)


@pytest.mark.parametrize(
    ("a", "baseline", "estimate"),
    [
        pytest.param([0.5], [0.25], 0.25, id="one-seed"),
        pytest.param([0.25] * 4, [1.25] * 4, -1.0, id="constant"),
        pytest.param([0.1, 0.2, 0.7], [0.1, 0.2, 0.7], 0.0, id="equal"),
        # 0.3 - 0.1 and 0.4 - 0.2 differ in the last digit only.
        pytest.param([0.3, 0.4], [0.1, 0.2], 0.2, id="equal-but-for-rounding"),
        pytest.param([], [], math.nan, id="none"),
        pytest.param([None, 1.0], [1.0, None], math.nan, id="none-complete"),
    ],
)
def test_differences_without_spread_have_no_interval_and_no_p(a: Any, baseline: Any, estimate: float) -> None:
    for result in (paired_t(a, baseline), paired_bca(a, baseline), tost(a, baseline, bound=2.0)):
        assert result.estimate == pytest.approx(estimate, nan_ok=True)
        assert all(map(math.isnan, (result.low, result.high, result.p)))
    assert math.isnan(paired_t(a, baseline).d_z)


def test_constant_values_have_a_mean_without_interval() -> None:
    result = mean_over_seeds([0.1] * 7)
    assert (result.estimate, result.sd) == (0.1, 0.0)
    assert math.isnan(result.low)
    assert math.isnan(result.high)


def test_welchs_test_needs_two_values_of_each_and_some_spread() -> None:
    for a, baseline in (
        ([1.0], [2.0, 3.0]),
        ([1.0, 1.0], [2.0, 2.0]),
        ([0.1 + 0.2, 0.3], [2.0, 2.0]),
        ([], [1.0, 2.0]),
    ):
        result = welch(a, baseline)
        assert all(map(math.isnan, (result.low, result.high, result.p)))
    # Only the baseline varies: its own freedom, 2, decides. (1 - 3) / sqrt(1 / 3).
    one_constant = welch([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    assert one_constant.p == near(2 * stats.t.sf(2 * math.sqrt(3), 2))


def test_scale_changes_nothing_but_units() -> None:
    result = paired_t(SEEDS_10_TO_17, BASELINE)
    bootstrap = paired_bca(SEEDS_10_TO_17, BASELINE)
    for scale in (2.0**200, 2.0**-200):
        a, baseline = ([scale * value for value in values] for values in (SEEDS_10_TO_17, BASELINE))
        scaled = paired_t(a, baseline)
        assert (scaled.estimate / scale, scaled.sd / scale) == (result.estimate, result.sd)
        assert (scaled.p, scaled.d_z, scaled.effect) == (result.p, result.d_z, result.effect)
        assert (scaled.low / scale, scaled.high / scale) == (result.low, result.high)
        assert paired_bca(a, baseline).low / scale == bootstrap.low
        assert welch(a, baseline).p == welch(SEEDS_10_TO_17, BASELINE).p
        assert tost(a, baseline, bound=scale).p == tost(SEEDS_10_TO_17, BASELINE, bound=1.0).p


def test_slopes_are_fitted_by_seed_and_tested_over_seeds() -> None:
    generator = np.random.default_rng(3)
    doses = np.tile([0.01, 0.02, 0.04, 0.06], 10)
    seeds = np.repeat(np.arange(100, 110), 4)
    values = generator.normal(size=40) + 5 * doses + np.repeat(generator.normal(size=10), 4)
    result = slope(doses, values, list(seeds))
    fitted = [np.polyfit(doses[seeds == seed], values[seeds == seed], 1)[0] for seed in range(100, 110)]
    independent = stats.ttest_1samp(fitted, 0)
    assert result.slopes == pytest.approx(fitted, rel=1e-10)
    assert result.p == pytest.approx(independent.pvalue, rel=1e-10)
    assert (result.low, result.high) == pytest.approx(tuple(independent.confidence_interval()), rel=1e-10)
    assert (result.n, result.left_out) == (10, 0)


def test_a_seed_with_one_dose_has_no_slope_and_is_counted() -> None:
    doses = [1.0, 2.0, 1.0, 2.0, 3.0, 1.0, 1.0]
    values = [0.0, 1.0, 5.0, 8.0, None, 2.0, 3.0]
    result = slope(doses, values, [1, 1, 2, 2, 2, 3, 4])
    assert (result.slopes, result.n, result.left_out) == ((1.0, 3.0), 2, 3)
    assert math.isnan(slope([1.0], [1.0], [1]).estimate)


def test_holms_adjustment_keeps_the_order_and_leaves_missing_p_values_missing() -> None:
    # Sorted: .01 x 3, .03 x 2, .04 x 1 raised to the one before.
    adjusted = holm([0.04, None, 0.01, 0.03])
    assert adjusted == pytest.approx([0.06, math.nan, 0.03, 0.06], nan_ok=True)
    assert holm([0.04, math.nan, 0.01], hypotheses=8) == pytest.approx([0.28, math.nan, 0.08], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([0.01, 0.01]) == [0.02, 0.02]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("n", "effect", "at_5_percent", "at_1_percent"),
    [
        (2, 0.1, 0.0504971079100633, 0.010099817162785988),
        (2, 3.0, 0.26077071422910975, 0.05313215921440432),
        (5, 0.5, 0.14051668999029823, 0.034184098545573596),
        (8, 1.0, 0.6808339582062666, 0.3478113581383198),
        (20, 0.1, 0.0709411569703698, 0.0165777534305957),
        (81, 0.5, 0.9935298763474469, 0.9663750921340883),
    ],
)
def test_the_power_of_the_paired_t_test(n: int, effect: float, at_5_percent: float, at_1_percent: float) -> None:
    # Computed by statsmodels 0.15: TTestPower.
    for alpha, expected in ((0.05, at_5_percent), (0.01, at_1_percent)):
        assert power_of_paired_t(n, sd=2.0, difference=-2.0 * effect, alpha=alpha) == near(expected)


def test_a_sure_difference_has_power_one() -> None:
    # The lower tail of so large a noncentrality has no float.
    assert power_of_paired_t(31, sd=1.0, difference=7.0) == 1.0
    assert power_of_paired_t(1, sd=1.0, difference=7.0) == 0.0


@pytest.mark.parametrize(
    ("sd", "difference", "alpha", "expected"), [(0.35, 0.15, 0.01, 85), (22.0, 46.0, 0.01, 7), (1.0, 0.1, 0.05, 1053)]
)
def test_the_seeds_needed_are_the_fewest_that_have_the_power(
    sd: float, difference: float, alpha: float, expected: int
) -> None:
    n = seeds_needed(sd=sd, difference=difference, alpha=alpha, power=0.9)
    assert n == expected
    powers = [power_of_paired_t(n - fewer, sd=sd, difference=difference, alpha=alpha) for fewer in (0, 1)]
    assert powers[0] >= 0.9 > powers[1]


def test_a_vanishing_difference_has_no_answer() -> None:
    assert seeds_needed(sd=1.0, difference=1e-4) is None
    largest = seeds_needed(sd=1.0, difference=0.0103)
    assert largest is not None
    assert 90_000 < largest < MOST_SEEDS


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: seeds_needed(sd=0.0, difference=1.0), "sd=0.0: give the standard deviation"),
        (lambda: seeds_needed(sd=1.0, difference=0.0), "difference=0.0: give the difference"),
        (lambda: seeds_needed(sd=1.0, difference=1.0, alpha=5), "alpha=5: give a share"),
        (lambda: seeds_needed(sd=1.0, difference=1.0, power=90), "power=90: give a share"),
        (lambda: paired_t([1.0, 2.0], [1.0]), "2 values of the arm and 1 of the baseline"),
        (lambda: paired_t([1.0, math.inf], [1.0, 2.0]), "the arm: entry 1 is infinite"),
        (lambda: paired_t([1.7e308, 0.0], [-1.7e308, 0.0]), "overflows: rescale"),
        (lambda: mean_over_seeds([1.0, "high"]), "give a flat list of numbers"),  # type: ignore[list-item]
        (lambda: mean_over_seeds([1.0, 2.0], confidence=95), "confidence=95: give a share between 0 and 1"),
        (lambda: paired_bca([1.0, 2.0], [0.0, 0.0], resamples=50), "resamples=50: the tails need at least 100"),
        (lambda: paired_bca([1.0, 2.0], [0.0, 0.0], confidence=0), "confidence=0: give a share"),
        (lambda: tost([1.0, 2.0], [0.0, 0.0], bound=0), "bound=0: give the largest difference"),
        (lambda: tost([1.0, 2.0], [0.0, 0.0], bound=1, alpha=0.5), "alpha=0.5: give a level between 0 and 0.5"),
        (lambda: slope([1.0], [1.0], [1, 2]), "1 doses, 1 values and 2 seeds"),
        (lambda: holm([0.5, 1.5]), "p-values lie between 0 and 1"),
        (lambda: holm([0.5, 0.5], hypotheses=1), "hypotheses=1, but 2 p-values are given"),
    ],
)
def test_bad_input_is_one_line_that_names_the_fix(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_missing_scipy_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(UserError, match=r'need SciPy .*: pip install "flatpeak\[experiments\]"$'):
        paired_t([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
