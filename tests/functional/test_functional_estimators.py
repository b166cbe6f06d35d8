"""Estimators against enumeration, closed forms and plain resampling."""

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pytest

from flatpeak.functional import (
    PairedDifference,
    bootstrap_interval,
    estimators,
    maj_at_k,
    paired_bootstrap,
    pass_at_k,
    wilson_interval,
)


def test_pass_at_k_by_hand():
    # Of C(5, 2) = 10 pairs, C(3, 2) = 3 miss both of the 2 correct samples.
    assert pass_at_k(5, 2, 2) == 0.7
    assert pass_at_k(5, 2, 1) == 0.4
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(1, 1, 1) == 1.0


def test_pass_at_k_equals_enumeration():
    for n, c in ((6, 1), (6, 4), (7, 3)):
        for k in range(1, n + 1):
            draws = list(itertools.combinations(range(n), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(min(draw) < c for draw in draws) / len(draws), rel=1e-15)


def test_pass_at_k_keeps_its_digits_for_many_samples():
    # One correct sample of n is among k with probability k / n; a product of floats loses the last digits.
    assert pass_at_k(10_000, 1, 3) == 3 / 10_000
    assert pass_at_k(4_000, 1, 2_000) == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (0, 0, 1), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match="give a"):
        pass_at_k(n, c, k)


def enumerated_majority(answers, correct, k):
    """maj@k from its definition: every draw, and every answer tied for most votes with equal chance."""
    judged = {a: [c for b, c in zip(answers, correct, strict=True) if b == a] for a in set(answers)}
    credit = []
    for draw in itertools.combinations(answers, k):
        votes = Counter(a for a in draw if a is not None)
        most = [a for a, n in votes.items() if n == max(votes.values())]
        credit.append(sum(sum(judged[a]) / len(judged[a]) for a in most) / len(most) if most else 0.0)
    return sum(credit) / len(credit)


def test_maj_at_k_by_hand():
    answers, correct = ["7", "7", "8"], [True, True, False]
    assert maj_at_k(answers, correct, 1) == pytest.approx(2 / 3, rel=1e-14)
    # Pairs 77, 78, 78: 1 + 1/2 + 1/2 of 3.
    assert maj_at_k(answers, correct, 2) == pytest.approx(2 / 3, rel=1e-14)
    assert maj_at_k(answers, correct, 3) == 1.0
    assert maj_at_k(answers, [False, False, True], 3) == 0.0


def test_maj_at_k_of_all_samples_breaks_ties_evenly():
    assert maj_at_k(["1", "2", "3"], [True, False, False], 3) == pytest.approx(1 / 3, rel=1e-14)
    assert maj_at_k(["1", "2", "1", "2", "3"], [True, False, True, False, True], 5) == pytest.approx(0.5, rel=1e-14)


def test_no_answer_has_no_vote():
    # One 5 beats any number of silent samples; draws of silence alone are wrong: 1 of C(4, 2) = 6 draws per pair.
    assert maj_at_k([None, "5", None, None], [False, True, False, False], 4) == 1.0
    assert maj_at_k([None, "5", None, None], [False, True, False, False], 2) == pytest.approx(0.5, rel=1e-14)
    assert maj_at_k([None, None], [False, False], 2) == 0.0
    assert maj_at_k([None, None], [True, True], 1) == 0.0


def test_an_answer_judged_both_ways_is_right_to_the_share_judged_right():
    assert maj_at_k(["5", "5", "5", "5", "6"], [True, False, True, True, True], 5) == 0.75


@pytest.mark.parametrize("seed", range(6))
def test_maj_at_k_equals_enumeration(seed):
    generator = np.random.default_rng(seed)
    n = 9
    answers = [None if a == 0 else a for a in generator.integers(0, 5, n).tolist()]
    correct = [a in (1, 4) if seed % 2 else bool(generator.integers(2)) for a in answers]
    for k in range(1, n + 1):
        assert maj_at_k(answers, correct, k) == pytest.approx(enumerated_majority(answers, correct, k), abs=1e-13)


def test_maj_at_k_of_two_answers_is_hypergeometric():
    n, c, k = 1500, 800, 101
    expected = sum(math.comb(c, u) * math.comb(n - c, k - u) for u in range(51, 102)) / math.comb(n, k)
    assert maj_at_k(["a"] * c + ["b"] * (n - c), [True] * c + [False] * (n - c), k) == pytest.approx(
        expected, rel=1e-10
    )


def test_maj_at_k_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="give a k from 1 to 2"):
        maj_at_k(["1", "2"], [True, False], 3)
    with pytest.raises(ValueError, match="one verdict per answer"):
        maj_at_k(["1", "2"], [True], 1)


def test_bootstrap_interval_is_the_percentiles_of_resampled_means():
    values = [0.0, 1.0, 1.0, 4.0, 2.5]
    generator = np.random.default_rng(11)
    means = sorted(np.mean([values[i] for i in generator.integers(5, size=5)]) for _ in range(200))
    low, high = bootstrap_interval(values, confidence=0.9, num_resamples=200, seed=11)
    assert low == pytest.approx(np.quantile(means, 0.05), rel=1e-12)
    assert high == pytest.approx(np.quantile(means, 0.95), rel=1e-12)


def test_bootstrap_interval_of_many_values_is_close_to_the_normal_one():
    # Mean 1/2, standard error 1/2 / sqrt(400) = 0.025.
    low, high = bootstrap_interval([0.0, 1.0] * 200)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.003)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.003)


def test_bootstrap_is_the_same_for_the_same_seed_and_however_it_is_cut(monkeypatch):
    values = np.random.default_rng(0).normal(size=37)
    first = bootstrap_interval(values, num_resamples=500, seed=3)
    assert bootstrap_interval(values, num_resamples=500, seed=3) == first
    assert bootstrap_interval(values, num_resamples=500, seed=4) != first
    monkeypatch.setattr(estimators, "_RESAMPLED_AT_ONCE", 37 * 7 + 5)
    assert bootstrap_interval(values, num_resamples=500, seed=3) == first


def test_bootstrap_of_one_value_is_that_value():
    assert bootstrap_interval([0.25], num_resamples=50) == (0.25, 0.25)


def test_paired_bootstrap_compares_item_by_item():
    a = [0.0, 1.0, 0.0, 10.0]
    b = [1.0, 2.0, 1.0, 11.0]
    # Every item gains exactly 1, however much the items differ.
    assert paired_bootstrap(a, b) == PairedDifference(difference=1.0, low=1.0, high=1.0)
    assert paired_bootstrap(b, a).difference == -1.0


def test_paired_bootstrap_is_the_bootstrap_of_the_differences():
    a, b = [0.0, 1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0, 1.0]
    result = paired_bootstrap(a, b, confidence=0.8, num_resamples=300, seed=2)
    assert result.difference == pytest.approx(0.2, rel=1e-12)
    interval = bootstrap_interval([1.0, 0.0, -1.0, 1.0, 0.0], confidence=0.8, num_resamples=300, seed=2)
    assert (result.low, result.high) == interval
    assert result.low < 0.2 < result.high


def test_wilsons_interval_has_a_width_where_the_bootstrap_has_none():
    assert bootstrap_interval([0.0] * 10) == (0.0, 0.0)
    z2 = 1.959963984540054**2
    assert wilson_interval(0, 10) == (0.0, pytest.approx(z2 / (10 + z2), rel=1e-12))
    assert wilson_interval(10, 10) == (pytest.approx(10 / (10 + z2), rel=1e-12), 1.0)


def test_wilsons_interval_is_where_the_score_test_stops_rejecting():
    # At either end the observed share lies z standard errors of that end's own share away.
    for successes, total, confidence, z in ((3, 17, 0.95, 1.959963984540054), (40, 50, 0.9, 1.6448536269514722)):
        for end in wilson_interval(successes, total, confidence):
            error = math.sqrt(end * (1 - end) / total)
            assert abs(successes / total - end) == pytest.approx(z * error, rel=1e-9)


def test_wilsons_interval_refuses_what_is_no_share():
    for successes, total in ((0, 0), (-1, 4), (5, 4)):
        with pytest.raises(ValueError, match="give a total of at least 1"):
            wilson_interval(successes, total)
    with pytest.raises(ValueError, match="confidence between 0 and 1"):
        wilson_interval(1, 2, 95)


def test_a_paired_difference_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        paired_bootstrap([0.0], [1.0]).low = 0.0


def test_bootstraps_refuse_what_they_cannot_resample():
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="all finite"):
        bootstrap_interval([1.0, math.nan])
    with pytest.raises(ValueError, match="confidence between 0 and 1"):
        bootstrap_interval([1.0], confidence=95)
    with pytest.raises(ValueError, match="at least 1 resample"):
        bootstrap_interval([1.0], num_resamples=0)
    with pytest.raises(ValueError, match="pairs are by index"):
        paired_bootstrap([1.0, 2.0], [1.0])
