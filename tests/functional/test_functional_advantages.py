"""group_advantages and returns_to_go against numbers worked out by hand and recomputed in float64 NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flatpeak.functional import group_advantages, returns_to_go
from support.properties import repeatable

NAN = float("nan")


def test_mean_and_std_are_those_of_the_group_and_unbiased():
    # mean 1/2, variance (4 * 1/4) / 3 = 1/3.
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    half = 0.5 / (1 / math.sqrt(3) + 1e-6)
    torch.testing.assert_close(
        group_advantages(rewards_PG), torch.tensor([[half, -half, -half, half]], dtype=torch.float64)
    )


def test_eps_is_added_to_the_std():
    # mean 2, std sqrt(2), so 1 / (sqrt(2) + 0.5).
    advantages_PG = group_advantages(torch.tensor([[1.0, 3.0]]), eps=0.5)
    expected = 1 / (math.sqrt(2) + 0.5)
    torch.testing.assert_close(advantages_PG, torch.tensor([[-expected, expected]]))


def test_without_scale_the_advantage_is_the_centred_reward():
    advantages_PG = group_advantages(torch.tensor([[4.0, 1.0, 1.0], [0.0, 3.0, 6.0]]), scale="none")
    torch.testing.assert_close(advantages_PG, torch.tensor([[2.0, -1.0, -1.0], [-3.0, 0.0, 3.0]]))


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # 5 - (1 + 3)/2 = 3, 1 - (5 + 3)/2 = -3, 3 - (5 + 1)/2 = 0.
    advantages_PG = group_advantages(torch.tensor([[5.0, 1.0, 3.0]]), baseline="leave_one_out", scale="none")
    torch.testing.assert_close(advantages_PG, torch.tensor([[3.0, -3.0, 0.0]]))


def test_leave_one_out_divides_by_the_groups_own_std():
    # std of (5, 1, 3) is 2.
    advantages_PG = group_advantages(torch.tensor([[5.0, 1.0, 3.0]]), baseline="leave_one_out", eps=0.0)
    torch.testing.assert_close(advantages_PG, torch.tensor([[1.5, -1.5, 0.0]]))


def test_batch_std_is_over_all_raw_rewards_of_the_batch():
    # Of (1, 0, 0, 0): mean 1/4, variance (9/16 + 3/16) / 3 = 1/4.
    advantages_PG = group_advantages(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), scale="batch_std", eps=0.0)
    torch.testing.assert_close(advantages_PG, torch.tensor([[1.0, -1.0], [0.0, 0.0]]))


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_equal_rewards_have_advantage_exactly_zero(baseline, scale, eps):
    rewards_PG = torch.tensor([[1.2] * 8])
    # The trap: this mean is not 1.2, and its rounding over its own std is an advantage of order 1.
    assert rewards_PG.mean() != rewards_PG[0, 0]
    assert group_advantages(rewards_PG, baseline=baseline, scale=scale, eps=eps).tolist() == [[0.0] * 8]


def test_without_baseline_the_advantage_is_the_reward():
    rewards_PG = torch.tensor([[1.0, -2.0], [3.0, NAN]])
    advantages_PG = group_advantages(rewards_PG, baseline="none", scale="none", valid_PG=~rewards_PG.isnan())
    assert advantages_PG.tolist() == [[1.0, -2.0], [3.0, 0.0]]


def test_without_baseline_a_group_of_one_keeps_its_reward():
    assert group_advantages(torch.tensor([[2.5]]), baseline="none", scale="none").tolist() == [[2.5]]


@st.composite
def rewards_with_some_missing(draw):
    shape = draw(array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=6))
    rewards_PG = draw(arrays(np.float64, shape, elements=st.sampled_from([-2.0, 0.0, 0.25, 1.0, 7.5])))
    return rewards_PG, draw(arrays(bool, shape))


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
@given(batch=rewards_with_some_missing())
@repeatable
def test_advantages_are_those_of_numpy_whatever_is_missing_and_those_of_a_group_sum_to_zero(batch, baseline, scale):
    rewards_PG, valid_PG = batch
    expected_PG = np.zeros(rewards_PG.shape)
    for p in range(len(rewards_PG)):
        members = np.flatnonzero(valid_PG[p])
        for g in members if len(members) > 1 else ():
            others = members if baseline == "mean" else members[members != g]
            spread = {"std": rewards_PG[p, members], "batch_std": rewards_PG[valid_PG]}.get(scale)
            divisor = 1.0 if spread is None else spread.std(ddof=1) + 1e-3
            expected_PG[p, g] = (rewards_PG[p, g] - rewards_PG[p, others].mean()) / divisor
    rewards_PG = np.where(valid_PG, rewards_PG, NAN)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        advantages_PG = group_advantages(
            torch.tensor(rewards_PG, dtype=dtype),
            baseline=baseline,
            scale=scale,
            eps=1e-3,
            valid_PG=torch.tensor(valid_PG),
        )
        assert advantages_PG.dtype == dtype
        np.testing.assert_allclose(advantages_PG.numpy(), expected_PG, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(advantages_PG.sum(1).numpy(), 0, atol=10 * tolerance)


@pytest.mark.parametrize("scale", ["std", "batch_std"])
def test_no_baseline_refuses_a_scale(scale):
    with pytest.raises(ValueError, match='give scale="none"'):
        group_advantages(torch.tensor([[1.0, 0.0]]), baseline="none", scale=scale)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_group_of_one_has_no_group_baseline(baseline):
    with pytest.raises(ValueError, match='at least 2 completions per prompt; otherwise give baseline="none"'):
        group_advantages(torch.tensor([[1.0], [0.0]]), baseline=baseline)


@pytest.mark.parametrize("reward", [NAN, math.inf, -math.inf])
def test_valid_rewards_that_are_not_finite_are_refused(reward):
    with pytest.raises(ValueError, match="mark missing rewards False in valid_PG"):
        group_advantages(torch.tensor([[1.0, reward]]))


def test_unknown_names_and_wrong_tensors_are_refused():
    rewards_PG = torch.tensor([[1.0, 0.0]])
    with pytest.raises(ValueError, match="mean, leave_one_out, none"):
        group_advantages(rewards_PG, baseline="median")
    with pytest.raises(ValueError, match="std, batch_std, none"):
        group_advantages(rewards_PG, scale="range")
    with pytest.raises(ValueError, match=r"floats of shape \[P, G\]"):
        group_advantages(torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match=r"floats of shape \[P, G\]"):
        group_advantages(torch.tensor([[1, 0]]))
    with pytest.raises(ValueError, match=r"give torch.bool \[1, 2\]"):
        group_advantages(rewards_PG, valid_PG=torch.tensor([True, False]))


def test_a_return_to_go_is_the_reward_of_a_turn_of_those_after_it_and_of_the_end():
    rewards_PGK = torch.tensor([[[1.0, 0.0, -0.5], [0.25, 2.0, 0.0]]])
    returns_PGK = returns_to_go(rewards_PGK, torch.tensor([[0.0, 10.0]]))
    assert returns_PGK.tolist() == [[[0.5, -0.5, -0.5], [12.25, 12.0, 10.0]]]


def test_equal_rewards_to_come_give_equal_returns_whatever_came_before():
    # In the other order 0.1 + 0.2 - 0.1 differs from 0.7 + 0.2 - 0.7.
    rewards_PGK = torch.tensor([[[0.1, 0.2, 0.0], [0.7, 0.2, 0.0], [1e6, 0.2, 0.0]]])
    returns_PGK = returns_to_go(rewards_PGK, torch.zeros(1, 3))
    advantages_PG = group_advantages(returns_PGK[..., 1], eps=0.0)
    assert advantages_PG.tolist() == [[0.0] * 3]
