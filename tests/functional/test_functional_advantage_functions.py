"""OPO, ReMax, MaxRL, pass@k and GDPO against sums written out in numpy and all subsets; whitening and limits."""

from __future__ import annotations

import itertools
from math import comb

import numpy as np
import pytest
import torch
from torch import Tensor

from flatpeak.functional import gdpo, limit_spreads, max_rl, opo, pass_at_k_advantages, remax, whiten

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0], [0.25, 0.5, 0.5, 2.0, -1.0], [1.0] * 5], dtype=torch.float64)
VALID = torch.tensor([[True] * 5, [True, True, False, True, True], [True] * 5])
GIVEN = REWARDS.masked_fill(~VALID, 0.0)
LENGTHS = torch.tensor([[3, 1, 7, 2, 9], [4, 4, 100, 1, 6], [2, 3, 4, 5, 6]])


def valid_of(values_PG: Tensor, group: int) -> np.ndarray:
    """The values of a group's valid completions."""
    return values_PG[group][VALID[group]].numpy()


def check(advantages_PG: Tensor, expected: list[np.ndarray]) -> None:
    """Advantages of the first two groups as expected, those of the third, of equal rewards, 0, and 0 where missing."""
    assert advantages_PG.dtype == torch.float64
    for group, values in enumerate(expected):
        np.testing.assert_allclose(valid_of(advantages_PG, group), values, rtol=1e-9, atol=1e-12)
    assert advantages_PG[2].tolist() == [0.0] * 5
    assert float(advantages_PG[1, 2]) == 0.0


def test_opo_weighs_the_baseline_by_the_lengths() -> None:
    rewards, lengths = [valid_of(GIVEN, g) for g in range(2)], [valid_of(LENGTHS, g) for g in range(2)]
    expected = [r - (r * n).sum() / n.sum() for r, n in zip(rewards, lengths, strict=True)]
    check(opo(GIVEN, VALID, LENGTHS), expected)


def test_max_rl_divides_by_the_mean_and_leaves_groups_without_a_positive_one() -> None:
    expected = [(r - r.mean()) / r.mean() for r in (valid_of(GIVEN, 0), valid_of(GIVEN, 1))]
    check(max_rl(GIVEN, VALID), expected)
    negative = max_rl(-GIVEN, VALID)
    assert not bool(negative.any())


def test_remax_compares_with_the_greedy_completion_and_groups_of_equal_rewards_teach() -> None:
    greedy_P = torch.tensor([0.0, float("nan"), 0.5], dtype=torch.float64)
    advantages_PG = remax(GIVEN, VALID, greedy_P)
    assert advantages_PG.tolist() == [[1.0, 0.0, 0.0, 1.0, 0.0], [0.0] * 5, [0.5] * 5]


def by_enumeration(rewards: np.ndarray, k: int) -> np.ndarray:
    """The mean over the subsets with an answer, less that over all, by their standard deviation."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = np.array([max(rewards[list(subset)]) for subset in subsets])
    own = [np.mean([b for b, s in zip(best, subsets, strict=True) if answer in s]) for answer in range(len(rewards))]
    return (np.array(own) - best.mean()) / best.std()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_mean_advantage_of_the_subsets_with_the_answer(k: int) -> None:
    advantages_PG = pass_at_k_advantages(GIVEN, VALID, k=k)
    check(advantages_PG, [by_enumeration(valid_of(GIVEN, group), k) for group in range(2)])


def test_pass_at_k_of_right_and_wrong_answers_is_the_papers_formula() -> None:
    """N = 5 answers, c = 2 right, k = 2: B = 1 - C(3, 2) / C(5, 2)."""
    advantages_PG = pass_at_k_advantages(GIVEN[:1], VALID[:1], k=2)
    rate = 1 - 3 / 10
    spread = np.sqrt(rate * (1 - rate))
    right, wrong = (1 - rate) / spread, (1 - rate - 2 / 4) / spread
    np.testing.assert_allclose(advantages_PG[0].numpy(), [right, wrong, wrong, right, wrong], rtol=1e-9)


def test_pass_at_k_of_too_few_answers_has_no_advantages() -> None:
    valid_PG = torch.tensor([[True, True, False, False]])
    assert not bool(pass_at_k_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), valid_PG, k=2).any())
    with pytest.raises(ValueError, match="k=4 with groups of 4: give at least 1 and less than the group's size"):
        pass_at_k_advantages(torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), k=4)


def test_pass_at_k_takes_large_groups_and_large_rewards() -> None:
    """C(127, 63) has 37 digits, and the squares of the rewards 13."""
    right = torch.arange(128) < 3
    advantages_PG = pass_at_k_advantages(right[None].float() + 2.0**20, torch.ones(1, 128, dtype=torch.bool), k=64)
    without, others = comb(125, 64) / comb(128, 64), comb(124, 63) / comb(127, 63)
    expected = np.where(right.numpy(), without, without - others) / np.sqrt(without * (1 - without))
    np.testing.assert_allclose(advantages_PG[0].numpy(), expected, rtol=1e-5)


def test_gdpo_standardizes_each_component_by_itself() -> None:
    format_PG = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0], [1.0] * 5], dtype=torch.float64)
    parts = {"correctness": GIVEN, "format": format_PG, "watched": -GIVEN}
    weights = {"correctness": 1.0, "format": 0.25, "watched": 0.0}
    advantages_PG = gdpo(GIVEN, VALID, parts, weights, eps=0.0)

    def standardized(values: np.ndarray) -> np.ndarray:
        return (values - values.mean()) / values.std(ddof=1)

    check(
        advantages_PG,
        [standardized(valid_of(GIVEN, g)) + 0.25 * standardized(valid_of(format_PG, g)) for g in range(2)],
    )
    with pytest.raises(ValueError, match="needs reward components with weights"):
        gdpo(GIVEN, VALID, parts, {})


def test_a_limit_in_spreads_is_that_of_each_group() -> None:
    advantages_PG = torch.tensor([[3.0, -1.0, -1.0, -1.0], [0.3, -0.1, -0.1, -0.1], [0.0] * 4], dtype=torch.float64)
    limited_PG = limit_spreads(advantages_PG, torch.ones(3, 4, dtype=torch.bool), 1.2)
    for group in range(2):
        spread = advantages_PG[group].numpy().std(ddof=1)
        np.testing.assert_allclose(
            limited_PG[group].numpy(), np.clip(advantages_PG[group], -1.2 * spread, 1.2 * spread)
        )
    assert limited_PG[0, 0] < 3.0
    assert limited_PG[2].tolist() == [0.0] * 4


def test_whitened_values_have_mean_0_and_deviation_1_over_what_is_counted() -> None:
    values, counted = torch.tensor([1.0, 2.0, 5.0, 100.0]), torch.tensor([True, True, True, False])
    result = whiten(values, counted, eps=0.0)
    expected = (np.array([1.0, 2.0, 5.0]) - 8 / 3) / np.array([1.0, 2.0, 5.0]).std(ddof=1)
    np.testing.assert_allclose(result.numpy(), [*expected, 0.0], rtol=1e-6)
    assert whiten(torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool)).tolist() == [0.0] * 3
    assert whiten(torch.tensor([0.7]), torch.tensor([True])).tolist() == [0.0]
