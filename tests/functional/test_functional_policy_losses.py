"""SAPO, VESPO, TOPR, GMPO, DPPO and two-sided CISPO: values and gradients against formulas written out in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from flatpeak.functional import (
    capped_policy_loss,
    clipped_geometric_ratio,
    dppo_kl,
    dppo_tv,
    gmpo,
    importance_ratio,
    sapo,
    topr,
    truncated_policy_gradient,
    vespo,
)
from flatpeak.functional.policy_losses import POLICY_LOSSES
from flatpeak.functional.sampler_correction import sequence_probability_ratio
from flatpeak.training.objective_config import ObjectiveConfig

Array = npt.NDArray[np.float64]
OLD = np.log(np.array([0.5, 0.9, 0.05, 0.3, 0.99, 0.2, 0.6, 0.4]))
NEW = np.log(np.array([0.7, 0.8, 0.30, 0.3, 0.60, 0.1, 0.9, 0.1]))
SEQUENCE = np.array([0, 0, 0, 1, 1, 2, 3, 3])
A = np.array([1.5, 1.5, 1.5, -0.5, -0.5, 2.0, -1.0, -1.0])
"""A's sign is that of the completion; the second one holds r = 1."""
R = np.exp(NEW - OLD)
WHOLE = np.array([np.prod(R[number == SEQUENCE]) for number in range(4)])[SEQUENCE]
MAX_ERROR = 1e-9


def sigmoid(values: Array) -> Array:
    return 1 / (1 + np.exp(-values))


TAU = np.where(A > 0, 0.7, 1.4)
GATE = sigmoid(TAU * (R - 1))
SHAPE, RATE = np.where(A > 0, 2.0, 3.0), np.where(A > 0, 3.0, 2.0)
KERNEL = WHOLE**SHAPE * np.exp(RATE * (1 - WHOLE))
TAPER = np.where(A > 0, 1.0, np.minimum(WHOLE, 1.0))
CAPPED = np.clip(R, 0.6, 1.3)
CHANGE = np.exp(NEW) - np.exp(OLD)
BEYOND_TV = np.where(A > 0, CHANGE > 0.1, CHANGE < -0.2)
KL = np.exp(OLD) * (OLD - NEW) + (1 - np.exp(OLD)) * np.log((1 - np.exp(OLD)) / (1 - np.exp(NEW)))
BEYOND_KL = np.where(A > 0, (KL > 0.1) & (CHANGE > 0), (KL > 0.3) & (CHANGE < 0))

CASES: dict[str, tuple[dict[str, object], Array, Array]] = {
    "sapo": (
        {"arguments": {"temperature_positive": 0.7, "temperature_negative": 1.4}},
        -4 / TAU * GATE * A,
        -4 * GATE * (1 - GATE) * R * A,
    ),
    "vespo": ({}, -KERNEL * A * NEW, -KERNEL * A),
    "topr": ({}, -TAPER * A * NEW, -TAPER * A),
    "dppo_tv": (
        {"arguments": {"threshold_high": 0.1, "threshold_low": 0.2}},
        -R * A,
        np.where(BEYOND_TV, 0.0, -R * A),
    ),
    "dppo_kl": (
        {"arguments": {"threshold_high": 0.1, "threshold_low": 0.3}},
        -R * A,
        np.where(BEYOND_KL, 0.0, -R * A),
    ),
    "truncated_policy_gradient": ({"floor": 0.6, "cap": 1.3}, -CAPPED * A * NEW, -CAPPED * A),
}
"""Settings, the loss of each token, and the gradient by its log-probability."""


def evaluate(name: str, config: ObjectiveConfig) -> tuple[Array, Array]:
    """The loss of each token as a recipe computes it, and the gradient of the sum."""
    logprobs_T, advantages_T = torch.from_numpy(NEW.copy()).requires_grad_(), torch.from_numpy(A)
    loss = POLICY_LOSSES[name]
    ratio_T = importance_ratio(logprobs_T, torch.from_numpy(OLD))
    if loss.ratio is not None:
        ratio_T = loss.ratio(logprobs_T, torch.from_numpy(OLD), advantages_T, torch.from_numpy(SEQUENCE), 4, config)
    loss_T = loss.value(logprobs_T, ratio_T, advantages_T, config)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprobs_T)
    return loss_T.detach().numpy(), gradient_T.numpy()


@pytest.mark.parametrize("name", CASES)
def test_a_loss_has_the_values_and_the_gradient_of_its_paper(name: str) -> None:
    settings, expected, expected_gradient = CASES[name]
    loss, gradient = evaluate(name, ObjectiveConfig(loss=name, **settings))
    np.testing.assert_allclose(loss, expected, rtol=MAX_ERROR, atol=MAX_ERROR)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=MAX_ERROR, atol=MAX_ERROR)


def test_each_case_has_tokens_on_both_sides_of_its_bound() -> None:
    for beyond in (BEYOND_TV, BEYOND_KL, CAPPED != R, TAPER != 1):
        assert 0 < beyond.sum() < len(beyond)
    assert (BEYOND_TV != BEYOND_KL).any()


def test_gmpo_is_the_geometric_mean_of_ratios_that_are_clipped_one_by_one() -> None:
    low, high = 0.3, 0.4
    log_ratio = NEW - OLD
    kept = np.where(A > 0, log_ratio <= high, log_ratio >= -low)
    bounded = np.where(A > 0, np.minimum(log_ratio, high), np.maximum(log_ratio, -low))
    means = np.array([np.exp(bounded[number == SEQUENCE].mean()) for number in range(4)])[SEQUENCE]
    loss, gradient = evaluate("gmpo", ObjectiveConfig(loss="gmpo", clip_low=low, clip_high=high))
    np.testing.assert_allclose(loss, -means * A, rtol=MAX_ERROR)
    # Each of the completion's len tokens has the same loss, whose derivative by a kept token is -s A / len.
    np.testing.assert_allclose(gradient, np.where(kept, -means * A, 0.0), rtol=MAX_ERROR)
    assert 0 < kept.sum() < len(kept)


@pytest.mark.parametrize("name", ["gmpo", "dppo_tv", "dppo_kl"])
def test_the_clip_counts_the_tokens_whose_gradient_it_removes(name: str) -> None:
    config = ObjectiveConfig(loss=name, clip_low=0.3, clip_high=0.4) if name == "gmpo" else ObjectiveConfig(loss=name)
    logprobs_T, ratio_T = torch.from_numpy(NEW), torch.from_numpy(R)
    advantages_T = torch.from_numpy(A)
    clipped_T = POLICY_LOSSES[name].clipped(logprobs_T, ratio_T, advantages_T, config)
    _, gradient = evaluate(name, config)
    np.testing.assert_array_equal(clipped_T.numpy(), gradient == 0)
    assert 0 < int(clipped_T.sum()) < len(A)
    assert not POLICY_LOSSES[name].clipped(logprobs_T, ratio_T, torch.zeros_like(advantages_T), config).any()


ON_POLICY: dict[str, Callable[..., torch.Tensor]] = {
    "sapo": lambda logprobs, ratio, advantages: sapo(ratio, advantages),
    "vespo": vespo,
    "topr": topr,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "gmpo": lambda logprobs, ratio, advantages: gmpo(ratio, advantages),
}


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_every_loss_has_the_gradient_of_the_plain_policy_gradient(name: str) -> None:
    logprobs = torch.from_numpy(NEW.copy()).requires_grad_()
    advantages = torch.from_numpy(A)
    ratio = importance_ratio(logprobs, logprobs.detach())
    (gradient,) = torch.autograd.grad(ON_POLICY[name](logprobs, ratio, advantages).sum(), logprobs)
    torch.testing.assert_close(gradient, -advantages, rtol=1e-12, atol=0)


def test_a_ratio_of_a_completion_is_that_of_all_its_tokens() -> None:
    sequence_T = torch.from_numpy(SEQUENCE)
    ratio_T = sequence_probability_ratio(torch.from_numpy(NEW), torch.from_numpy(OLD), sequence_T, 4)
    np.testing.assert_allclose(ratio_T.numpy(), WHOLE, rtol=1e-12)


def test_a_floor_of_the_ratio_has_the_curvature_of_the_bounded_ratio() -> None:
    logprobs = torch.from_numpy(NEW.copy()).requires_grad_()
    ratio = importance_ratio(logprobs, torch.from_numpy(OLD))
    losses = [
        function(logprobs, ratio, torch.from_numpy(A), cap=1.3, floor=0.6)
        for function in (truncated_policy_gradient, capped_policy_loss)
    ]
    gradients = [torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)[0] for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="so give 0 <= floor < cap"):
        truncated_policy_gradient(logprobs, ratio, torch.from_numpy(A), cap=1.3, floor=1.3)


@pytest.mark.parametrize("extreme", [-200.0, -1e-12, 0.0])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_extreme_tokens_among_ordinary_ones_stay_finite(name: str, extreme: float) -> None:
    new_T = torch.tensor([extreme, -1.0, -0.5], requires_grad=True)
    old_T, advantages_T = torch.tensor([-1.0, extreme, -0.5]), torch.tensor([1.0, -1.0, -1.0])
    loss, config = POLICY_LOSSES[name], ObjectiveConfig(loss=name)
    ratio_T = importance_ratio(new_T, old_T)
    if loss.ratio is not None:
        ratio_T = loss.ratio(new_T, old_T, advantages_T, torch.tensor([0, 1, 1]), 2, config)
    loss_T = loss.value(new_T, ratio_T, advantages_T, config)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), new_T)
    assert bool(loss_T.isfinite().all()), loss_T
    assert bool(gradient_T.isfinite().all()), gradient_T


def test_the_clip_of_log_ratios_has_the_whole_completion_in_it() -> None:
    logprobs_T = torch.from_numpy(NEW.copy())
    ratio_T = clipped_geometric_ratio(
        logprobs_T,
        torch.from_numpy(OLD),
        torch.from_numpy(A),
        torch.from_numpy(SEQUENCE),
        4,
        clip_low=10.0,
        clip_high=10.0,
    )
    lengths = np.bincount(SEQUENCE)[SEQUENCE]
    np.testing.assert_allclose(ratio_T.numpy(), WHOLE ** (1 / lengths), rtol=1e-12)
