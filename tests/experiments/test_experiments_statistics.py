"""Statistics over seeds agree with SciPy and statsmodels, and say so where there is nothing to estimate."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW, ttost_paired

from flatpeak.errors import UserError
from flatpeak.experiments import holm, mean_over_seeds, paired_bca, paired_t, slope, tost, welch

RANDOM_PAIRS = [
    pytest.param(*np.random.default_rng(n).normal(size=(2, n)) * scale + shift, id=f"{n}-seeds-scale-{scale}")
    for n in (2, 3, 5, 20, 81)
    for scale, shift in ((1.0, 0.0), (1e-9, 1e-8), (1e12, 3e12))
]
SEEDS_10_TO_17 = [0.31, 0.12, 0.55, 0.90, 0.02, 0.71, 0.33, 0.41]
BASELINE = [0.05, 0.02, 0.60, 0.10, 0.03, 0.04, 0.30, 0.01]


def near(expected: float) -> Any:
    """What a figure has to agree with to a relative 1e-10."""
    return pytest.approx(expected, rel=1e-10, abs=1e-300)


@pytest.mark.parametrize(("a", "baseline"), RANDOM_PAIRS)
def test_the_mean_over_seeds_agrees_with_statsmodels(a: Any, baseline: Any) -> None:
    del baseline
    for confidence in (0.5, 0.95, 0.999):
        result = mean_over_seeds(a, confidence=confidence)
        low, high = DescrStatsW(a).tconfint_mean(alpha=1 - confidence)
        assert result.estimate == near(a.mean())
        assert result.low == near(low)
        assert result.high == near(high)
        assert result.sd == near(a.std(ddof=1))


@pytest.mark.parametrize(("a", "baseline"), RANDOM_PAIRS)
def test_the_paired_t_test_agrees_with_scipy_and_statsmodels(a: Any, baseline: Any) -> None:
    result = paired_t(a, baseline)
    independent = stats.ttest_rel(a, baseline)
    low, high = DescrStatsW(a - baseline).tconfint_mean()
    assert result.p == near(independent.pvalue)
    assert result.low == near(low)
    assert result.high == near(high)
    assert result.estimate == near((a - baseline).mean())
    assert result.d_z == near((a - baseline).mean() / (a - baseline).std(ddof=1))
    assert result.effect == near((a - baseline).mean() / baseline.std(ddof=1))
    assert result.paired
    assert (result.n, result.n_baseline, result.left_out) == (len(a), len(a), 0)


@pytest.mark.parametrize(("a", "baseline"), RANDOM_PAIRS)
def test_welchs_test_agrees_with_scipy_and_statsmodels(a: Any, baseline: Any) -> None:
    a = np.concatenate([a, 3 * a[:2]])
    result = welch(a, baseline)
    low, high = CompareMeans(DescrStatsW(a), DescrStatsW(baseline)).tconfint_diff(usevar="unequal")
    assert result.p == near(stats.ttest_ind(a, baseline, equal_var=False).pvalue)
    assert result.low == near(low)
    assert result.high == near(high)
    assert not result.paired
    assert (result.n, result.n_baseline) == (len(a), len(baseline))


@pytest.mark.parametrize(("a", "baseline"), RANDOM_PAIRS)
def test_equivalence_agrees_with_statsmodels(a: Any, baseline: Any) -> None:
    bound = float(np.abs(a - baseline).max())
    result = tost(a, baseline, bound=bound)
    p, (_, p_lower, _), (_, p_upper, _) = ttost_paired(a, baseline, -bound, bound)
    low, high = DescrStatsW(a - baseline).tconfint_mean(alpha=0.1)
    assert result.p == near(p)
    assert result.p_lower == near(p_lower)
    assert result.p_upper == near(p_upper)
    assert result.low == near(low)
    assert result.high == near(high)


def test_equivalence_is_shown_exactly_where_the_interval_lies_within_the_bounds() -> None:
    generator = np.random.default_rng(5)
    decisions = set()
    for _ in range(200):
        a, baseline = generator.normal(size=(2, 8))
        result = tost(a, baseline, bound=0.8, alpha=0.1)
        assert (result.p < 0.1) == (result.low > -0.8 and result.high < 0.8)
        decisions.add(result.p < 0.1)
    assert decisions == {True, False}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [2, 5, 20, 81])
def test_the_bca_interval_is_scipys_for_the_same_draws(n: int, seed: int) -> None:
    a, baseline = np.random.default_rng(seed).lognormal(size=(2, n))
    for confidence in (0.8, 0.95):
        result = paired_bca(a, baseline, confidence=confidence, resamples=999, seed=seed)
        independent = stats.bootstrap(
            (a, baseline),
            lambda x, y, axis: (x - y).mean(axis=axis),
            paired=True,
            n_resamples=999,
            confidence_level=confidence,
            method="BCa",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        assert result.low == pytest.approx(independent.low, rel=1e-10)
        assert result.high == pytest.approx(independent.high, rel=1e-10)
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
    for a, baseline in (([1.0], [2.0, 3.0]), ([1.0, 1.0], [2.0, 2.0]), ([], [1.0, 2.0])):
        result = welch(a, baseline)
        assert all(map(math.isnan, (result.low, result.high, result.p)))
    # Only the baseline varies: its own freedom, 2, decides. (1 - 3) / sqrt(1 / 3).
    one_constant = welch([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    assert one_constant.p == near(2 * stats.t.sf(2 * math.sqrt(3), 2))


def test_scale_changes_nothing_but_units() -> None:
    result = paired_t(SEEDS_10_TO_17, BASELINE)
    bootstrap = paired_bca(SEEDS_10_TO_17, BASELINE)
    for scale in (2.0**1000, 2.0**-900):
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
    assert slope([1e-200, 2e-200], [1.0, 2.0], [7, 7]).slopes == (pytest.approx(1e200),)
    assert math.isnan(slope([1.0], [1.0], [1]).estimate)


@pytest.mark.parametrize("seed", range(3))
def test_holms_adjustment_agrees_with_statsmodels(seed: int) -> None:
    p_values = np.random.default_rng(seed).uniform(size=12) ** 4
    p_values[3] = p_values[7]
    close_to = multipletests(p_values, method="holm")[1]
    assert holm(p_values) == pytest.approx(close_to, rel=1e-12)


def test_holms_adjustment_keeps_the_order_and_leaves_missing_p_values_missing() -> None:
    # Sorted: .01 x 3, .03 x 2, .04 x 1 raised to the one before.
    adjusted = holm([0.04, None, 0.01, 0.03])
    assert adjusted == pytest.approx([0.06, math.nan, 0.03, 0.06], nan_ok=True)
    assert holm([0.04, math.nan, 0.01], hypotheses=8) == pytest.approx([0.28, math.nan, 0.08], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
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
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(UserError, match=r'need SciPy .*: pip install "flatpeak\[experiments\]"$'):
        paired_t([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
