"""Intervals cover and tests reject as often as they claim, by simulation with fixed seeds.

A share estimated from N simulations is within 4 sqrt(p (1 - p) / N) of the true p but for 1 in 16,000.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from flatpeak.experiments import mean_over_seeds, paired_bca, paired_t, power_of_paired_t, tost, welch

pytestmark = pytest.mark.slow

SIMULATIONS = 4000


def margin(share: float, simulations: int = SIMULATIONS) -> float:
    return 4 * math.sqrt(share * (1 - share) / simulations)


@pytest.mark.parametrize("n", [2, 5, 20])
def test_the_t_intervals_of_normal_values_cover_the_mean(n: int) -> None:
    samples = np.random.default_rng(n).normal(loc=3.0, size=(SIMULATIONS, 2, n))
    means = [mean_over_seeds(a, confidence=0.9) for a, _ in samples]
    assert abs(np.mean([r.low <= 3 <= r.high for r in means]) - 0.9) < margin(0.9)
    differences = [paired_t(a + 1, b) for a, b in samples]
    assert abs(np.mean([r.low <= 1 <= r.high for r in differences]) - 0.95) < margin(0.95)


def test_the_paired_t_test_rejects_as_often_as_its_power_says() -> None:
    samples = np.random.default_rng(0).normal(size=(SIMULATIONS, 2, 8))
    for difference, share in ((0.0, 0.05), (1.2, power_of_paired_t(8, sd=math.sqrt(2), difference=1.2))):
        rejected = np.mean([paired_t(a + difference, b).p < 0.05 for a, b in samples])
        assert abs(rejected - share) < margin(share)


def test_welchs_interval_covers_a_difference_of_unequal_spreads() -> None:
    generator = np.random.default_rng(1)
    wide, narrow = generator.normal(scale=3, size=(SIMULATIONS, 12)), generator.normal(size=(SIMULATIONS, 20))
    results = [welch(a, b) for a, b in zip(wide, narrow, strict=True)]
    # Welch's degrees of freedom are approximate: another half a percent.
    assert abs(np.mean([r.low <= 0 <= r.high for r in results]) - 0.95) < margin(0.95) + 0.005


def test_equivalence_is_claimed_at_its_level_on_the_bound() -> None:
    samples = np.random.default_rng(2).normal(size=(SIMULATIONS, 2, 20))
    # A true difference on the bound, eight standard errors from the other one: the level itself.
    claimed = np.mean([tost(a + 2.5, b, bound=2.5).p < 0.05 for a, b in samples])
    assert abs(claimed - 0.05) < margin(0.05)
    # With a spread as wide as the bounds the level is an upper bound.
    assert np.mean([tost(a + 0.5, b, bound=0.5).p < 0.05 for a, b in samples]) < 0.05 + margin(0.05)
    # Without any difference, narrow bounds against a small spread: nearly always.
    assert np.mean([tost(0.1 * a, 0.1 * b, bound=0.25).p < 0.05 for a, b in samples[:500]]) > 0.99


def test_the_bca_interval_covers_a_skewed_difference() -> None:
    # Differences of exponential values and a constant: mean 1, skewness 2. The bootstrap's variance lacks the factor
    # n / (n - 1) and its quantiles are normal, so that it covers too little by O(1 / n): at n = 50 less than 3%.
    simulations = 1500
    samples = np.random.default_rng(3).exponential(size=(simulations, 50))
    results = [paired_bca(a, np.zeros(50), resamples=999, seed=index) for index, a in enumerate(samples)]
    coverage = np.mean([r.low <= 1 <= r.high for r in results])
    assert 0.92 - margin(0.92, simulations) < coverage < 0.95 + margin(0.95, simulations)
