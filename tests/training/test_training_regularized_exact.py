"""What each ratio mode penalizes, against exact curvature of surrogates that are written out here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.functional import hessian_vector_product
from flatpeak.policy.model import Policy
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.types import Batch
from support.regularized_training import (
    WHOLE,
    Gradient,
    blocks_of,
    double_qwen2,
    gradient_of,
    norm,
    off_policy,
    penalty_of,
    plain_rows,
    relative_error,
)
from support.training import tiny_policy

TOKEN = ObjectiveConfig(dual_clip=1.5)
SEQUENCE = ObjectiveConfig(ratio="sequence", clip_low=0.05, clip_high=0.1)
CAPPED = ObjectiveConfig(loss="truncated_policy_gradient", cap=1.2)
CAPPED_SEQUENCE = ObjectiveConfig(loss="truncated_policy_gradient", cap=1.05, ratio="sequence")
REINFORCE = ObjectiveConfig(loss="policy_gradient")
FINE: dict[str, Any] = {"difference": "central", "step": 1e-6}
"""In float64 its error is about 5e-9."""

Surrogate = Callable[[Tensor, Tensor, Batch], Tensor]
"""(log-probabilities, the first pass's, batch) -> the loss of every token."""


@cache
def setting() -> tuple[Policy, Batch]:
    policy = double_qwen2()
    return policy, off_policy(policy)


def advantages(batch: Batch) -> Tensor:
    return batch.advantages_T


def ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    return torch.exp(logprobs - batch.old_logprobs_T)


def sequence_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """A completion's geometric mean of ratios, at each of its tokens."""
    pieces = torch.log(ratio(logprobs, batch)).split(batch.lengths_N.tolist())
    return torch.cat([torch.exp(piece.mean()).expand(len(piece)) for piece in pieces])


def kept(first_ratio: Tensor, batch: Batch, *, low: float, high: float, dual: float = 1e9) -> Tensor:
    """The tokens that clipping leaves a gradient."""
    a = advantages(batch)
    lost = ((a > 0) & (first_ratio > high)) | ((a < 0) & ((first_ratio < low) | (first_ratio > dual)))
    assert 0 < int(lost.sum()) < len(lost)
    return ~lost


def masked_token(logprobs: Tensor, first: Tensor, batch: Batch) -> Tensor:
    mask = kept(ratio(first, batch), batch, low=0.8, high=1.2, dual=1.5)
    return -ratio(logprobs, batch) * advantages(batch) * mask


def masked_sequence(logprobs: Tensor, first: Tensor, batch: Batch) -> Tensor:
    mask = kept(sequence_ratio(first, batch), batch, low=0.95, high=1.1)
    return -sequence_ratio(logprobs, batch) * advantages(batch) * mask


def capped(logprobs: Tensor, first: Tensor, batch: Batch) -> Tensor:
    """Below the cap the gradient r A grad log p is that of r A; above it the cap is a constant."""
    below = -ratio(logprobs, batch) * advantages(batch)
    return torch.where(ratio(first, batch) > 1.2, -1.2 * advantages(batch) * logprobs, below)


def capped_sequence(logprobs: Tensor, first: Tensor, batch: Batch) -> Tensor:
    below = -sequence_ratio(logprobs, batch) * advantages(batch)
    return torch.where(sequence_ratio(first, batch) > 1.05, -1.05 * advantages(batch) * logprobs, below)


def reweighted(logprobs: Tensor, first: Tensor, batch: Batch) -> Tensor:
    """REINFORCE with weights for the step from the first pass's policy."""
    return -advantages(batch) * torch.exp(logprobs - first)


def frozen_token(logprobs: Tensor, first: Tensor, batch: Batch) -> Tensor:
    first_ratio = ratio(first, batch)
    mask = kept(first_ratio, batch, low=0.8, high=1.2, dual=1.5)
    return -first_ratio * advantages(batch) * mask * logprobs


def frozen_sequence(logprobs: Tensor, first: Tensor, batch: Batch) -> Tensor:
    first_ratio = sequence_ratio(first, batch)
    return -first_ratio * advantages(batch) * kept(first_ratio, batch, low=0.95, high=1.1) * logprobs


def frozen_capped(logprobs: Tensor, first: Tensor, batch: Batch) -> Tensor:
    return -ratio(first, batch).clamp(max=1.2) * advantages(batch) * logprobs


def frozen_reinforce(logprobs: Tensor, first: Tensor, batch: Batch) -> Tensor:
    return -advantages(batch) * logprobs


def clipped_token(logprobs: Tensor, first: Tensor, batch: Batch) -> Tensor:
    """The loss itself, clip and dual clip included."""
    r, a = ratio(logprobs, batch), advantages(batch)
    loss = -torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
    return torch.where(a < 0, torch.minimum(loss, -1.5 * a), loss)


def clipped_sequence(logprobs: Tensor, first: Tensor, batch: Batch) -> Tensor:
    s, a = sequence_ratio(logprobs, batch), advantages(batch)
    return -torch.minimum(s * a, s.clamp(0.95, 1.1) * a)


CASES: dict[str, tuple[str, ObjectiveConfig, Surrogate]] = {
    "importance": ("importance", TOKEN, masked_token),
    "importance, sequence ratio": ("importance", SEQUENCE, masked_sequence),
    "importance, capped": ("importance", CAPPED, capped),
    "importance, capped, sequence ratio": ("importance", CAPPED_SEQUENCE, capped_sequence),
    "importance, REINFORCE": ("importance", REINFORCE, reweighted),
    "reuse": ("reuse", TOKEN, frozen_token),
    "reuse, sequence ratio": ("reuse", SEQUENCE, frozen_sequence),
    "reuse, capped": ("reuse", CAPPED, frozen_capped),
    "reuse, REINFORCE": ("reuse", REINFORCE, frozen_reinforce),
    "clipped again": ("importance_clipped", TOKEN, clipped_token),
    "clipped again, sequence ratio": ("importance_clipped", SEQUENCE, clipped_sequence),
    "clipped again, capped": ("importance_clipped", CAPPED, capped),
    "clipped again, capped, sequence ratio": ("importance_clipped", CAPPED_SEQUENCE, capped_sequence),
    "clipped again, REINFORCE": ("importance_clipped", REINFORCE, frozen_reinforce),
}
"""Ratio mode, objective, and the function whose curvature along its gradient is the penalty's gradient."""


def by_hand(
    policy: Policy, batch: Batch, surrogate: Surrogate, *, weigh_kl: Callable[[Tensor, Batch], Tensor] | None = None
) -> tuple[Gradient, Gradient]:
    """(g1, H g1) of the blocks: the gradient, and that of half its squared norm, of the surrogate written out.

    With `weigh_kl` the loss has a KL term, weighted by that ratio, and an entropy bonus.
    """
    held = blocks_of(policy)
    weights_T = batch.weights_N[batch.sequence_T]

    def loss() -> Tensor:
        logprobs, entropy = plain_rows(policy, batch)
        loss_T = surrogate(logprobs, logprobs.detach(), batch)
        if weigh_kl is not None:
            assert batch.reference_logprobs_T is not None
            d = batch.reference_logprobs_T - logprobs
            loss_T = loss_T + 0.3 * weigh_kl(logprobs, batch) * (torch.exp(d) - d - 1) - 0.2 * entropy
        return (weights_T * loss_T).sum()

    g1 = torch.autograd.grad(loss(), list(held.values()), materialize_grads=True)
    curvature = hessian_vector_product(loss, list(held.values()), g1)
    return dict(zip(held, g1, strict=True)), dict(zip(held, curvature, strict=True))


def in_blocks(policy: Policy, gradient: Gradient) -> Gradient:
    return {name: gradient[name] for name in blocks_of(policy)}


@pytest.mark.parametrize("case", CASES)
def test_the_penalty_is_the_curvature_of_the_surrogate_along_its_gradient(case: str) -> None:
    policy, batch = setting()
    mode, objective, surrogate = CASES[case]
    g1, expected = by_hand(policy, batch, surrogate)
    plain = gradient_of(policy, batch, objective=objective)
    assert relative_error(in_blocks(policy, plain), g1) < 1e-12
    result = penalty_of(policy, batch, plain=plain, objective=objective, ratio_mode=mode, **FINE)
    assert relative_error(in_blocks(policy, result), expected) < 1e-7
    # Outside the perturbed set there is no penalty at all.
    assert norm({name: component for name, component in result.items() if name not in expected}) == 0


@pytest.mark.parametrize("case", CASES)
def test_kl_and_entropy_are_penalized_as_they_are_written(case: str) -> None:
    policy, batch = setting()
    mode, objective, surrogate = CASES[case]
    given = {
        "objective": objective.model_copy(update={"entropy_coefficient": 0.2}),
        "kl": KLConfig(coefficient=0.3, ratio_weighted=True),
    }
    weigh_kl = sequence_ratio if objective.ratio == "sequence" else ratio
    g1, expected = by_hand(policy, batch, surrogate, weigh_kl=weigh_kl)
    plain = gradient_of(policy, batch, **given)
    assert relative_error(in_blocks(policy, plain), g1) < 1e-12
    result = penalty_of(policy, batch, plain=plain, ratio_mode=mode, **given, **FINE)
    assert relative_error(in_blocks(policy, result), expected) < 1e-7


def test_these_surrogates_have_different_curvatures() -> None:
    policy, batch = setting()
    surrogates = (masked_token, masked_sequence, capped, reweighted, frozen_token, frozen_capped, frozen_reinforce)
    result = [by_hand(policy, batch, surrogate)[1] for surrogate in surrogates]
    for index, one in enumerate(result):
        assert all(relative_error(one, other) > 0.05 for other in result[index + 1 :])


@cache
def single_precision() -> tuple[Policy, Batch]:
    """The same in float32, as a run has it."""
    policy = tiny_policy()
    return policy, off_policy(policy)


@pytest.mark.parametrize("case", CASES)
def test_exact_curvature_by_the_learner_equals_the_curvature_by_hand(case: str) -> None:
    policy, batch = single_precision()
    mode, objective, surrogate = CASES[case]
    _, expected = by_hand(policy, batch, surrogate)
    for micro_batch_tokens in (WHOLE, 20):
        result = penalty_of(
            policy,
            batch,
            objective=objective,
            ratio_mode=mode,
            difference="exact",
            micro_batch_tokens=micro_batch_tokens,
        )
        assert relative_error(in_blocks(policy, result), expected) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_the_differences_agree_with_the_exact_curvature_in_float32(case: str) -> None:
    policy, batch = single_precision()
    mode, objective, _ = CASES[case]
    exact, forward, central = (
        penalty_of(policy, batch, objective=objective, ratio_mode=mode, difference=difference)
        for difference in ("exact", "forward", "central")
    )
    assert relative_error(forward, exact) < 5e-3
    assert relative_error(central, exact) < 5e-4


def test_the_regularized_gradient_is_the_plain_one_plus_strength_times_curvature() -> None:
    policy, batch = single_precision()
    _, curvature = by_hand(policy, batch, masked_token)
    plain = gradient_of(policy, batch, objective=TOKEN)
    expected = {name: component + 0.07 * curvature.get(name, 0) for name, component in plain.items()}
    result = gradient_of(policy, batch, objective=TOKEN, strength=0.07, difference="exact")
    assert relative_error(result, expected) < 1e-6
