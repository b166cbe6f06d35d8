"""McNemar's exact test agrees with statsmodels, and Tango's interval with its definition."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats
from statsmodels.stats.contingency_tables import mcnemar

from flatpeak.errors import UserError
from flatpeak.experiments import mcnemar_exact
from flatpeak.experiments.mcnemar import tango_interval

Z = 1.959963984540054


def outcomes(both: int, only_a: int, only_baseline: int, neither: int) -> tuple[list[bool | None], list[bool | None]]:
    pairs = [(True, True)] * both + [(True, False)] * only_a + [(False, True)] * only_baseline
    pairs += [(False, False)] * neither
    return [a for a, _ in pairs], [baseline for _, baseline in pairs]


def profile_statistic(difference: float, only_a: int, only_baseline: int, n: int) -> float:
    """The score statistic with the likeliest discordant probabilities under a difference, by root finding."""
    concordant = n - only_a - only_baseline

    def slope(q: float) -> float:
        return only_a / (q + difference) + only_baseline / q - 2 * concordant / (1 - 2 * q - difference)

    q = optimize.brentq(
        slope, max(0.0, -difference) + 1e-13, (1 - difference) / 2 - 1e-13, xtol=1e-16, rtol=1e-15, maxiter=500
    )
    variance = n * (2 * q + difference - difference**2)
    return (only_a - only_baseline - n * difference) / math.sqrt(variance)


@pytest.mark.parametrize(("only_a", "only_baseline"), product([0, 1, 2, 5, 9], repeat=2))
def test_the_p_values_agree_with_statsmodels_and_the_binomial_test(only_a: int, only_baseline: int) -> None:
    result = mcnemar_exact(*outcomes(3, only_a, only_baseline, 4))
    assert (result.n, result.both, result.neither) == (7 + only_a + only_baseline, 3, 4)
    assert (result.only_a, result.only_baseline) == (only_a, only_baseline)
    if only_a + only_baseline:
        independent = mcnemar([[3, only_a], [only_baseline, 4]], exact=True).pvalue
        assert result.p == pytest.approx(min(1.0, independent), rel=1e-12)
        for p, alternative in ((result.p_more, "greater"), (result.p_fewer, "less")):
            test = stats.binomtest(only_a, only_a + only_baseline, 0.5, alternative=alternative)
            assert p == pytest.approx(test.pvalue, rel=1e-12)
    else:
        assert (result.p, result.p_more, result.p_fewer) == (1.0, 1.0, 1.0)


def test_eight_seeds_against_three_are_five_heads_of_five() -> None:
    result = mcnemar_exact(*outcomes(3, 0, 5, 0))
    assert (result.p, result.p_fewer, result.p_more) == (2 / 32, 1 / 32, 1.0)
    assert result.estimate == -5 / 8


@pytest.mark.parametrize(("only_a", "only_baseline", "n"), [(3, 1, 8), (1, 6, 20), (5, 5, 11), (40, 2, 100)])
def test_the_score_statistic_is_z_at_both_ends_of_the_interval(only_a: int, only_baseline: int, n: int) -> None:
    low, high = tango_interval(only_a, only_baseline, n)
    assert low < (only_a - only_baseline) / n < high
    assert profile_statistic(low, only_a, only_baseline, n) == pytest.approx(Z, rel=1e-9)
    assert profile_statistic(high, only_a, only_baseline, n) == pytest.approx(-Z, rel=1e-9)


@pytest.mark.parametrize("n", [1, 5, 50])
def test_the_interval_without_discordant_pairs_narrows_with_n(n: int) -> None:
    # b = c = 0: q = 0 and T^2 = n D / (1 - D), which is z^2 at D = z^2 / (n + z^2).
    end = Z**2 / (n + Z**2)
    assert tango_interval(0, 0, n) == pytest.approx((-end, end), rel=1e-10)


@pytest.mark.parametrize("n", [1, 5, 50])
def test_the_interval_of_only_discordant_pairs_ends_at_one(n: int) -> None:
    # b = n, c = 0: the larger root is q = (1 - D) / 2, T^2 = n (1 - D) / (1 + D), and z^2 at D = (n - z^2) / (n + z^2).
    end = (n - Z**2) / (n + Z**2)
    assert tango_interval(n, 0, n) == (pytest.approx(end, rel=1e-10), 1.0)
    assert tango_interval(0, n, n) == (-1.0, pytest.approx(-end, rel=1e-10))


@pytest.mark.parametrize(("only_a", "only_baseline", "n"), [(0, 0, 7), (3, 1, 8), (0, 5, 8), (8, 0, 8)])
def test_exchanging_the_arms_mirrors_everything(only_a: int, only_baseline: int, n: int) -> None:
    result = mcnemar_exact(*outcomes(0, only_a, only_baseline, n - only_a - only_baseline))
    mirrored = mcnemar_exact(*outcomes(0, only_baseline, only_a, n - only_a - only_baseline))
    assert (mirrored.p, mirrored.p_more, mirrored.p_fewer) == (result.p, result.p_fewer, result.p_more)
    assert mirrored.estimate == -result.estimate
    assert (mirrored.low, mirrored.high) == pytest.approx((-result.high, -result.low), abs=1e-12)


def test_a_pair_with_a_missing_outcome_is_left_out_and_counted() -> None:
    result = mcnemar_exact([True, None, False, True], [False, True, None, True])
    assert (result.n, result.left_out, result.both, result.only_a) == (2, 2, 1, 1)
    nothing = mcnemar_exact([None], [True])
    assert (nothing.n, nothing.p) == (0, 1.0)
    assert all(map(math.isnan, (nothing.estimate, nothing.low, nothing.high)))


def test_the_test_never_rejects_more_often_than_its_level() -> None:
    # 4,000 experiments of 15 seeds under the null; the exact size is below .05, so that the rate stays below
    # .05 + 4 sqrt(.05 x .95 / 4000) = .064.
    generator = np.random.default_rng(0)
    cells = generator.multinomial(15, [0.2, 0.3, 0.3, 0.2], size=4000)
    rate = np.mean([mcnemar_exact(*outcomes(*map(int, row))).p <= 0.05 for row in cells])
    assert 0.005 < rate < 0.064


def test_tangos_interval_covers_the_difference() -> None:
    # 3,000 experiments of 20 seeds; the mean coverage of the score interval is about nominal: .95 +- 4 x .004 + .01.
    generator = np.random.default_rng(1)
    cells = generator.multinomial(20, [0.3, 0.1, 0.4, 0.2], size=3000)
    intervals = np.array([tango_interval(int(row[1]), int(row[2]), 20) for row in cells])
    coverage = np.mean((intervals[:, 0] <= -0.3) & (intervals[:, 1] >= -0.3))
    assert 0.924 < coverage < 0.976


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mcnemar_exact([True], [True, False]), "1 outcomes of the arm and 2 of the baseline"),
        (lambda: mcnemar_exact([0.5], [True]), "true or false: compare numbers by paired_t"),  # type: ignore[list-item]
        (lambda: mcnemar_exact([True], [True], confidence=1), "confidence=1: give a share"),
    ],
)
def test_bad_outcomes_are_one_line_that_names_the_fix(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
