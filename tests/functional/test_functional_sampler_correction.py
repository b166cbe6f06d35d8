"""Importance weights of a sampler: values by hand, bounds, and verl's formulas on the same numbers."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor

from flatpeak import functional
from flatpeak.functional import (
    importance_ratio,
    masked_importance_weights,
    sampler_correction,
    sequence_importance_ratio,
    sequence_probability_ratio,
    truncated_importance_weights,
)

SIGNATURES = {
    "masked_importance_weights": "ratio, *, cap, floor=0.0",
    "sequence_probability_ratio": "logprobs_T, sampler_logprobs_T, sequence_T, num",
    "truncated_importance_weights": "ratio, *, cap, floor=0.0",
    "over_completions": "values_T, sequence_T, num, *, by",
    "effective_sample_size": "total, squares, count",
}
LENGTHS = (3, 1, 5, 2)
SEQUENCE_T = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_as_published(name):
    signature = inspect.signature(getattr(functional, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)).strip("()") == SIGNATURES[name]
    assert set(sampler_correction.__all__) == set(SIGNATURES)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_a_sequence_ratio_is_the_product_of_its_tokens_ratios():
    logprobs_T, sampled_T = double([-1.0, -2.0, -0.5, -3.0]), double([-1.5, -1.8, -0.5, -2.0])
    ratio_T = sequence_probability_ratio(logprobs_T, sampled_T, torch.tensor([0, 0, 0, 1]), 2)
    torch.testing.assert_close(ratio_T, double([math.exp(0.3)] * 3 + [math.exp(-1.0)]))
    mean_T = sequence_importance_ratio(logprobs_T, sampled_T, torch.tensor([0, 0, 0, 1]), 2)
    torch.testing.assert_close(mean_T, double([math.exp(0.1)] * 3 + [math.exp(-1.0)]))


def test_a_sequence_ratio_is_finite_whatever_the_sum():
    ratio_T = sequence_probability_ratio(double([-1.0] * 4), double([-50.0] * 2 + [0.0] * 2), torch.arange(4) // 2, 2)
    torch.testing.assert_close(ratio_T, double([math.exp(20)] * 2 + [math.exp(-2)] * 2))


def test_truncated_weights_are_the_ratio_up_to_the_cap():
    assert truncated_importance_weights(double([0.1, 1.0, 2.0, 2.5]), cap=2.0).tolist() == [0.1, 1.0, 2.0, 2.0]


def test_masked_weights_are_zero_beyond_the_bounds():
    ratio = double([0.1, 0.5, 1.0, 2.0, 2.5])
    assert masked_importance_weights(ratio, cap=2.0).tolist() == [0.1, 0.5, 1.0, 2.0, 0.0]
    assert masked_importance_weights(ratio, cap=2.0, floor=0.5).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]


@pytest.mark.parametrize("weights", [truncated_importance_weights, masked_importance_weights])
def test_weights_are_constants_and_a_cap_below_one_is_refused(weights):
    ratio = double([0.5, 3.0]).requires_grad_()
    assert not weights(ratio, cap=2.0).requires_grad
    with pytest.raises(ValueError, match=r"cap=0.9: equal policies have ratio 1"):
        weights(ratio, cap=0.9)


def test_exact_weights_give_the_expectation_under_the_other_policy():
    policy, sampler, values = double([0.5, 0.3, 0.2]), double([0.2, 0.3, 0.5]), double([1.0, -2.0, 4.0])
    weights = truncated_importance_weights(importance_ratio(policy.log(), sampler.log()), cap=10.0)
    assert float((sampler * weights * values).sum()) == pytest.approx(float((policy * values).sum()), abs=1e-15)


def padded(values_T: Tensor) -> Tensor:
    rows = values_T.split(LENGTHS)
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def verl_weights(old_NL: Tensor, rollout_NL: Tensor, mask_NL: Tensor, *, level: str, threshold: float) -> Tensor:
    """verl's truncated weights: the summed or single log-ratio within +-20, exponentiated, bounded above, masked."""
    log_ratio_NL = old_NL - rollout_NL
    if level == "sequence":
        log_ratio_NL = (log_ratio_NL * mask_NL).sum(-1, keepdim=True).expand_as(log_ratio_NL)
    return (log_ratio_NL.clamp(-20, 20).exp() * mask_NL).clamp(max=threshold)


def verl_kept(
    old_NL: Tensor, rollout_NL: Tensor, mask_NL: Tensor, *, level: str, threshold: float, lower: float
) -> Tensor:
    """The mask that verl's rejection leaves: of the same ratios, those within [lower, threshold]."""
    log_ratio_NL = old_NL - rollout_NL
    if level == "sequence":
        log_ratio_NL = (log_ratio_NL * mask_NL).sum(-1, keepdim=True).expand_as(log_ratio_NL)
    ratio_NL = log_ratio_NL.clamp(-20, 20).exp()
    return mask_NL * ((ratio_NL >= lower) & (ratio_NL <= threshold))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("spread", [0.02, 0.5, 3.0])
def test_weights_are_verls_on_the_same_numbers(level: str, spread: float) -> None:
    generator = torch.Generator().manual_seed(3)
    old_T = -torch.rand(len(SEQUENCE_T), generator=generator) * 3
    rollout_T = old_T + spread * torch.randn(len(SEQUENCE_T), generator=generator)
    if level == "token":
        ratio_T = importance_ratio(old_T, rollout_T)
    else:
        ratio_T = sequence_probability_ratio(old_T, rollout_T, SEQUENCE_T, len(LENGTHS))
    given = (padded(old_T), padded(rollout_T), padded(torch.ones(len(SEQUENCE_T))))
    ours_NL = padded(truncated_importance_weights(ratio_T, cap=2.0))
    theirs_NL = verl_weights(*given, level=level, threshold=2.0)
    torch.testing.assert_close(ours_NL, theirs_NL, rtol=1e-6, atol=0)
    for floor in (0.0, 0.5):
        # verl multiplies the weights and the mask, each of them if it is asked for.
        theirs_NL = verl_weights(*given, level=level, threshold=2.0) * verl_kept(
            *given, level=level, threshold=2.0, lower=floor
        )
        ours_NL = padded(masked_importance_weights(ratio_T, cap=2.0, floor=floor))
        torch.testing.assert_close(ours_NL, theirs_NL, rtol=1e-6, atol=0)
