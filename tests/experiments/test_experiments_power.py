"""Power and the seeds it needs agree with statsmodels and with sums over every outcome."""

from __future__ import annotations

from fractions import Fraction
from math import comb
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestPower

from flatpeak.errors import UserError
from flatpeak.experiments import mcnemar_exact, power_of_mcnemar, power_of_paired_t, seeds_needed, seeds_needed_mcnemar
from flatpeak.experiments.power import MOST_SEEDS, MOST_SEEDS_MCNEMAR


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


@pytest.mark.parametrize(
    ("n", "effect"), [(2, 0.1), (2, 3.0), (5, 0.5), (5, 3.0), (8, 1.0), (20, 0.1), (20, 1.0), (81, 0.1), (81, 0.5)]
)
def test_the_power_of_the_paired_t_test_agrees_with_statsmodels(n: int, effect: float) -> None:
    for alpha in (0.05, 0.01):
        expected = TTestPower().power(effect, n, alpha)
        power = power_of_paired_t(n, sd=2.0, difference=-2.0 * effect, alpha=alpha)
        assert power == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_a_sure_difference_has_power_one() -> None:
    # The lower tail of so large a noncentrality has no float: SciPy has NaN for it, and so has statsmodels' power.
    assert np.isnan(TTestPower().power(7.0, 31, 0.05))
    assert power_of_paired_t(31, sd=1.0, difference=7.0) == 1.0
    assert power_of_paired_t(1, sd=1.0, difference=7.0) == 0.0


@pytest.mark.parametrize(("sd", "difference", "alpha"), [(0.35, 0.15, 0.01), (22.0, 46.0, 0.01), (1.0, 0.1, 0.05)])
def test_the_seeds_needed_are_the_fewest_that_have_the_power(sd: float, difference: float, alpha: float) -> None:
    n = seeds_needed(sd=sd, difference=difference, alpha=alpha, power=0.9)
    assert n is not None
    assert TTestPower().power(difference / sd, n, alpha) >= 0.9 > TTestPower().power(difference / sd, n - 1, alpha)


def test_a_difference_of_three_sevenths_of_the_spread_needs_85_seeds() -> None:
    # statsmodels: TTestPower().solve_power(0.15 / 0.35, power=0.9, alpha=0.01) = 84.5...
    exact = TTestPower().solve_power(0.15 / 0.35, power=0.9, alpha=0.01)
    assert seeds_needed(sd=0.35, difference=0.15, alpha=0.01, power=0.9) == int(np.ceil(exact))


def test_a_vanishing_difference_has_no_answer() -> None:
    assert seeds_needed(sd=1.0, difference=1e-4) is None
    largest = seeds_needed(sd=1.0, difference=0.0103)
    assert largest is not None
    assert 90_000 < largest < MOST_SEEDS
    assert seeds_needed_mcnemar(only_a=0.10, only_baseline=0.11) is None


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
        (lambda: seeds_needed(sd=0.0, difference=1.0), "sd=0.0: give the standard deviation"),
        (lambda: seeds_needed(sd=1.0, difference=0.0), "difference=0.0: give the difference"),
        (lambda: seeds_needed(sd=1.0, difference=1.0, alpha=5), "alpha=5: give a share"),
        (lambda: seeds_needed(sd=1.0, difference=1.0, power=90), "power=90: give a share"),
        (lambda: power_of_mcnemar(5, only_a=0.0, only_baseline=0.0), "whose sum is above 0 and at most 1"),
        (lambda: seeds_needed_mcnemar(only_a=0.7, only_baseline=0.7), "whose sum is above 0 and at most 1"),
        (lambda: seeds_needed_mcnemar(only_a=0.2, only_baseline=0.7, power=1), "power=1: give a share"),
    ],
)
def test_bad_sizes_are_one_line_that_names_the_fix(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
