"""McNemar's exact test and its power are sums over every outcome; Tango's interval agrees with its definition."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from math import comb
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats

from flatpeak.errors import UserError
from flatpeak.experiments import mcnemar_exact, power_of_mcnemar, seeds_needed_mcnemar
from flatpeak.experiments.mcnemar import MOST_SEEDS_MCNEMAR, tango_interval

Z = 1.959963984540054


def outcomes(both: int, only_a: int, only_baseline: int, neither: int) -> tuple[list[bool | None], list[bool | None]]:
    pairs = [(True, True)] * both + [(True, False)] * only_a + [(False, True)] * only_baseline
    pairs += [(False, False)] * neither
    return [a for a, _ in pairs], [baseline for _, baseline in pairs]


def summed_power(n: int, only_a: Fraction, only_baseline: Fraction, alpha: Fraction) -> Fraction:
    """The power of McNemar's test as the sum of the probabilities of all discordant counts that reject."""
    total = Fraction(0)
    for b in range(n + 1):
        for c in range(n + 1 - b):
            tail = Fraction(sum(comb(b + c, k) for k in range(min(b, c) + 1)), 2 ** (b + c))
            if min(Fraction(1), 2 * tail) <= alpha:
                rest = n - b - c
                ways = comb(n, b) * comb(n - b, c)
                total += ways * only_a**b * only_baseline**c * (1 - only_a - only_baseline) ** rest
    return total


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
def test_the_p_values_are_shares_of_all_tosses_of_a_coin(only_a: int, only_baseline: int) -> None:
    result = mcnemar_exact(*outcomes(3, only_a, only_baseline, 4))
    tosses = only_a + only_baseline
    assert (result.n, result.both, result.neither) == (7 + tosses, 3, 4)
    assert (result.only_a, result.only_baseline) == (only_a, only_baseline)

    def at_most(heads: int) -> float:
        return sum(comb(tosses, k) for k in range(heads + 1)) / 2**tosses

    assert result.p == pytest.approx(min(1.0, 2 * at_most(min(only_a, only_baseline))), rel=1e-12)
    assert result.p_more == pytest.approx(at_most(only_baseline), rel=1e-12)
    assert result.p_fewer == pytest.approx(at_most(only_a), rel=1e-12)


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


@pytest.mark.parametrize("n", [1, 6, 8, 16])
@pytest.mark.parametrize(("only_a", "only_baseline"), [("0", "5/8"), ("1/4", "1/4"), ("1/10", "9/10"), ("1/20", "1/2")])
def test_the_power_of_mcnemars_test_is_the_sum_over_all_counts(n: int, only_a: str, only_baseline: str) -> None:
    for alpha in (Fraction(1, 20), Fraction(1, 100)):
        expected = summed_power(n, Fraction(only_a), Fraction(only_baseline), alpha)
        power = power_of_mcnemar(
            n, only_a=float(Fraction(only_a)), only_baseline=float(Fraction(only_baseline)), alpha=float(alpha)
        )
        assert power == pytest.approx(float(expected), rel=1e-10, abs=1e-14)


def test_mcnemars_power_is_the_rate_at_which_the_test_rejects() -> None:
    # 3,000 experiments of 20 seeds: within four standard errors of the exact power.
    power = power_of_mcnemar(20, only_a=0.1, only_baseline=0.5)
    cells = np.random.default_rng(0).multinomial(20, [0.1, 0.5, 0.4], size=3000)
    p = [mcnemar_exact([True] * b + [False] * (20 - b), [False] * b + [True] * c + [False] * (20 - b - c)).p
         for b, c, _ in cells]  # fmt: skip
    rate = np.mean(np.array(p) <= 0.05)
    assert abs(rate - power) < 4 * np.sqrt(power * (1 - power) / 3000)


def test_a_vanishing_difference_has_no_answer() -> None:
    assert seeds_needed_mcnemar(only_a=0.10, only_baseline=0.11) is None


def test_eight_discordant_seeds_are_needed_where_every_seed_is_one() -> None:
    # 2 / 2^8 = .0078 is the first below .01.
    assert seeds_needed_mcnemar(only_a=0.0, only_baseline=1.0, alpha=0.01) == 8


def test_the_seeds_of_mcnemars_test_are_the_first_with_the_power() -> None:
    n = seeds_needed_mcnemar(only_a=0.0, only_baseline=5 / 8, alpha=0.01, power=0.9)
    assert n is not None
    # Reject from 8 of n discordant seeds on, all of one kind.
    powers = stats.binom.sf(7, np.arange(1, n + 1), 5 / 8)
    assert powers[-1] >= 0.9 > powers[-2]
    assert n <= MOST_SEEDS_MCNEMAR


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mcnemar_exact([True], [True, False]), "1 outcomes of the arm and 2 of the baseline"),
        (lambda: mcnemar_exact([0.5], [True]), "true or false: compare numbers by paired_t"),  # type: ignore[list-item]
        (lambda: mcnemar_exact([True], [True], confidence=1), "confidence=1: give a share"),
        (lambda: power_of_mcnemar(5, only_a=0.0, only_baseline=0.0), "whose sum is above 0 and at most 1"),
        (lambda: seeds_needed_mcnemar(only_a=0.7, only_baseline=0.7), "whose sum is above 0 and at most 1"),
        (lambda: seeds_needed_mcnemar(only_a=0.2, only_baseline=0.7, power=1), "power=1: give a share"),
    ],
)
def test_bad_outcomes_are_one_line_that_names_the_fix(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
