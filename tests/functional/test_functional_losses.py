"""Ratios and per-token losses: values by hand on both sides of every clip, gradients against hand derivations."""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatpeak.functional import losses, policy_losses
from flatpeak.functional.losses import (
    clipped_surrogate,
    importance_ratio,
    policy_gradient,
    sequence_importance_ratio,
    truncated_policy_gradient,
    unclipped_surrogate,
)
from support.properties import repeatable

SIGNATURES = {
    "beyond_kl": "logprobs, ratio, advantages, *, threshold_low=0.05, threshold_high=0.05",
    "beyond_total_variation": "logprobs, ratio, advantages, *, threshold_low=0.15, threshold_high=0.15",
    "capped_policy_loss": "logprobs_T, ratio_T, advantages_T, *, cap, floor=0.0",
    "clipped_geometric_ratio": ("logprobs_T, old_logprobs_T, advantages_T, sequence_T, num, *, clip_low, clip_high"),
    "clipped_surrogate": "ratio, advantages, *, clip_low, clip_high, dual_clip=None",
    "dppo_kl": "logprobs, ratio, advantages, *, threshold_low=0.05, threshold_high=0.05",
    "dppo_tv": "logprobs, ratio, advantages, *, threshold_low=0.15, threshold_high=0.15",
    "gmpo": "ratio, advantages",
    "frozen_policy_loss": "logprobs_T, coefficients_T",
    "importance_ratio": "logprobs, old_logprobs",
    "policy_gradient": "logprobs, advantages",
    "reweighted_policy_loss": "logprobs_T, first_logprobs_T, coefficients_T, *, sequence_T=None, num_sequences=0",
    "sequence_importance_ratio": "logprobs_T, old_logprobs_T, sequence_T, num",
    "sapo": "ratio, advantages, *, temperature_positive=1.0, temperature_negative=1.05",
    "topr": "logprobs, ratio, advantages",
    "truncated_policy_gradient": "logprobs, ratio, advantages, *, cap, floor=0.0",
    "vespo": (
        "logprobs, ratio, advantages, *, shape_positive=2.0, rate_positive=3.0, shape_negative=3.0, rate_negative=2.0"
    ),
    "unclipped_surrogate": "ratio, advantages",
}
"""Argument names and defaults that users write."""


def test_the_public_losses_are_exactly_these():
    assert {*losses.__all__, *policy_losses.__all__} - {"PolicyLoss"} == set(SIGNATURES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_as_published(name):
    signature = inspect.signature(getattr(losses, name, None) or getattr(policy_losses, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)).strip("()") == SIGNATURES[name]


def leaf(values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def gradient(loss, at):
    return torch.autograd.grad(loss.sum(), at)[0]


def test_importance_ratio_is_the_exponential_of_the_difference():
    logprobs = leaf([-1.0, -2.0, -0.5])
    ratio = importance_ratio(logprobs, double([-1.0, -2.5, -0.1]))
    expected = double([1.0, math.exp(0.5), math.exp(-0.4)])
    torch.testing.assert_close(ratio, expected)
    torch.testing.assert_close(gradient(ratio, logprobs), expected)


@pytest.mark.parametrize(("log_ratio", "expected"), [(200.0, math.exp(20)), (-200.0, math.exp(-20))])
def test_extreme_log_ratios_stay_finite_and_have_no_gradient(log_ratio, expected):
    logprobs = torch.tensor([log_ratio - 300], requires_grad=True)
    ratio = importance_ratio(logprobs, torch.tensor([-300.0]))
    torch.testing.assert_close(ratio, torch.tensor([expected]))
    loss = clipped_surrogate(ratio, torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2)
    assert math.isfinite(loss.item())
    assert gradient(loss, logprobs).tolist() == [0.0]


def test_log_ratios_up_to_the_limit_keep_their_gradient():
    logprobs = leaf([19.9, -19.9])
    torch.testing.assert_close(
        gradient(importance_ratio(logprobs, double([0.0, 0.0])), logprobs), double([math.exp(19.9), math.exp(-19.9)])
    )


# Completion 0 has tokens 0 and 2, completion 1 none, completion 2 tokens 1, 3 and 4.
SEQUENCE_T = torch.tensor([0, 2, 0, 2, 2])
LOG_RATIOS_T = [0.1, -0.6, 0.3, 0.3, 0.0]


def test_sequence_ratio_is_the_exponential_of_the_mean_log_ratio_for_every_token():
    old_logprobs_T = double([-1.0, -2.0, -3.0, -0.5, -0.2])
    ratio_T = sequence_importance_ratio(old_logprobs_T + double(LOG_RATIOS_T), old_logprobs_T, SEQUENCE_T, 3)
    first, last = math.exp(0.2), math.exp(-0.1)
    torch.testing.assert_close(ratio_T, double([first, last, first, last, last]))


def test_sequence_ratio_gradient_is_the_ratio_over_the_length():
    logprobs_T = leaf(LOG_RATIOS_T)
    ratio_T = sequence_importance_ratio(logprobs_T, torch.zeros(5, dtype=torch.float64), SEQUENCE_T, 3)
    coefficients_T = double([2.0, -1.0, 5.0, 0.5, 3.0])
    # d/dlogp_t sum_u c_u s_u = (sum of c over t's completion) * s / len.
    first = (2.0 + 5.0) * math.exp(0.2) / 2
    last = (-1.0 + 0.5 + 3.0) * math.exp(-0.1) / 3
    torch.testing.assert_close(gradient(ratio_T * coefficients_T, logprobs_T), double([first, last, first, last, last]))


def test_sequence_ratio_is_exactly_one_on_policy():
    logprobs_T = torch.randn(50, generator=torch.Generator().manual_seed(0))
    sequence_T = torch.arange(50) % 7
    assert sequence_importance_ratio(logprobs_T, logprobs_T, sequence_T, 7).tolist() == [1.0] * 50


def test_sequence_ratio_clamps_the_mean_log_ratio():
    logprobs_T = torch.tensor([390.0, 10.0, 30.0, -10.0], requires_grad=True)
    ratio_T = sequence_importance_ratio(logprobs_T, torch.zeros(4), torch.tensor([0, 0, 1, 1]), 2)
    torch.testing.assert_close(ratio_T, torch.tensor([math.exp(20)] * 2 + [math.exp(10)] * 2))
    torch.testing.assert_close(gradient(ratio_T, logprobs_T), torch.tensor([0.0, 0.0] + [math.exp(10)] * 2))


def test_sequence_ratio_of_no_tokens_is_empty():
    empty_T = torch.zeros(0, requires_grad=True)
    ratio_T = sequence_importance_ratio(empty_T, torch.zeros(0), torch.zeros(0, dtype=torch.int64), 2)
    assert ratio_T.tolist() == []
    assert gradient(ratio_T, empty_T).tolist() == []


def test_policy_gradient_is_minus_advantage_times_logprob():
    logprobs = leaf([-1.5, -0.25])
    loss = policy_gradient(logprobs, double([2.0, -4.0]))
    torch.testing.assert_close(loss, double([3.0, -1.0]))
    torch.testing.assert_close(gradient(loss, logprobs), double([-2.0, 4.0]))


def test_unclipped_surrogate_is_minus_ratio_times_advantage():
    ratio = leaf([0.5, 3.0, 0.5, 3.0])
    loss = unclipped_surrogate(ratio, double([2.0, 2.0, -1.0, -1.0]))
    torch.testing.assert_close(loss, double([-1.0, -6.0, 0.5, 3.0]))
    torch.testing.assert_close(gradient(loss, ratio), double([-2.0, -2.0, 1.0, 1.0]))


RATIOS = [0.5, 0.9, 1.0, 1.1, 1.5]


def test_clipped_surrogate_of_a_positive_advantage_stops_above():
    ratio = leaf(RATIOS)
    loss = clipped_surrogate(ratio, double([2.0] * 5), clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss, double([-1.0, -1.8, -2.0, -2.2, -2.56]))
    torch.testing.assert_close(gradient(loss, ratio), double([-2.0, -2.0, -2.0, -2.0, 0.0]))


def test_clipped_surrogate_of_a_negative_advantage_stops_below():
    ratio = leaf(RATIOS)
    loss = clipped_surrogate(ratio, double([-1.0] * 5), clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss, double([0.8, 0.9, 1.0, 1.1, 1.5]))
    torch.testing.assert_close(gradient(loss, ratio), double([0.0, 1.0, 1.0, 1.0, 1.0]))


finite = st.floats(-4, 4)


@given(ratio=st.floats(0.01, 8), advantage=finite, low=st.floats(0, 0.9), high=st.floats(0, 2), dual=st.floats(1.1, 5))
@repeatable
def test_the_clip_only_ever_raises_the_loss_and_takes_the_gradient_where_it_does(ratio, advantage, low, high, dual):
    given_ratio, advantages = leaf([ratio]), double([advantage])
    loss = clipped_surrogate(given_ratio, advantages, clip_low=low, clip_high=high)
    plain = unclipped_surrogate(given_ratio, advantages)
    clipped = ratio > 1 + high if advantage > 0 else ratio < 1 - low
    bound = -min(max(ratio, 1 - low), 1 + high) * advantage
    assert loss.item() == pytest.approx(bound if clipped else plain.item(), abs=1e-12)
    assert loss >= plain - 1e-12
    assert gradient(loss, given_ratio).item() == (0.0 if clipped else -advantage)
    capped = clipped_surrogate(given_ratio, advantages, clip_low=low, clip_high=high, dual_clip=dual)
    assert capped.item() == pytest.approx(min(loss.item(), -dual * advantage) if advantage < 0 else loss.item())


def test_dual_clip_bounds_only_the_loss_of_negative_advantages():
    ratio = leaf([0.5, 2.0, 4.0, 4.0])
    loss = clipped_surrogate(ratio, double([-2.0, -2.0, -2.0, 2.0]), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    # -c A = 6 where A = -2; at A = 2 the ordinary clip holds at 1.2.
    torch.testing.assert_close(loss, double([1.6, 4.0, 6.0, -2.4]))
    torch.testing.assert_close(gradient(loss, ratio), double([0.0, 2.0, 0.0, 0.0]))


def test_on_policy_the_surrogates_have_the_gradient_of_reinforce():
    advantages = double([1.5, -0.5, 0.0])
    logprobs = leaf([-1.0, -2.0, -0.1])
    expected = -advantages
    for surrogate in (
        lambda ratio: unclipped_surrogate(ratio, advantages),
        lambda ratio: clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.2),
        lambda ratio: clipped_surrogate(ratio, advantages, clip_low=0.0, clip_high=0.0, dual_clip=3.0),
        lambda ratio: truncated_policy_gradient(logprobs, ratio, advantages, cap=5.0),
        lambda ratio: policy_gradient(logprobs, advantages),
    ):
        loss = surrogate(importance_ratio(logprobs, logprobs.detach()))
        torch.testing.assert_close(gradient(loss, logprobs), expected)


def test_truncated_policy_gradient_weighs_by_the_capped_ratio_and_keeps_every_gradient():
    old_logprobs = double([-2.0, -1.0, -2.0, -1.0])
    logprobs = leaf([-1.0, -1.5, -1.0, -1.5])
    ratio = importance_ratio(logprobs, old_logprobs)  # e, e^-1/2, e, e^-1/2
    advantages = double([2.0, 2.0, -1.0, -1.0])
    loss = truncated_policy_gradient(logprobs, ratio, advantages, cap=1.25)
    small = math.exp(-0.5)
    torch.testing.assert_close(loss, double([2.5, 3.0 * small, -1.25, -1.5 * small]))
    # The ratio is a constant here: -min(r, cap) A, with no term from d r.
    torch.testing.assert_close(gradient(loss, logprobs), double([-2.5, -2.0 * small, 1.25, small]))


def test_coefficients_out_of_range_are_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="distances from 1"):
        clipped_surrogate(one, one, clip_low=-0.1, clip_high=0.2)
    with pytest.raises(ValueError, match="give more than 1"):
        clipped_surrogate(one, one, clip_low=0.2, clip_high=0.2, dual_clip=1.0)
    with pytest.raises(ValueError, match="bounds the ratio itself"):
        truncated_policy_gradient(one, one, one, cap=0.0)
