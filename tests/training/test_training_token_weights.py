"""Weights that a whole minibatch decides: the same gradient however it is cut, and what cutting it first would give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.functional import top_entropy
from flatpeak.policy.model import Policy
from flatpeak.training.batch import micro_batches
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig, TokenWeightsConfig
from flatpeak.training.user_functions import make_token_weights
from flatpeak.types import Batch
from support.regularized_training import (
    Gradient,
    double_qwen2,
    gradient_of,
    make_learner,
    off_policy,
    relative_error,
    with_sampler,
)

FUNCTIONS: dict[str, dict[str, float]] = {
    "top_entropy": {"fraction": 0.3},
    "clip_cov": {"fraction": 0.2, "low": 0.01, "high": 5.0},
    "kl_cov": {"fraction": 0.2, "coefficient": 0.5},
    "m2po": {"threshold": 0.02},
    "off_policy_mask": {"threshold": 0.01},
    "stapo": {"probability": 0.04, "entropy": 3.1},
    "damp_rare": {"alpha": 0.8},
}
REGULARIZATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "regularized": {"strength": 1.0},
    "some groups": {"strength": 1.0, "group_fraction": 0.67},
}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return double_qwen2()


@pytest.fixture(scope="module")
def batch(policy: Policy) -> Batch:
    """Off-policy, with another sampler and some tokens that were not sampled."""
    whole = with_sampler(off_policy(policy, groups=4))
    return replace(whole, trained_T=torch.arange(len(whole.tokens_T)) % 7 != 3)


def objective(name: str) -> ObjectiveConfig:
    return ObjectiveConfig(token_weights=TokenWeightsConfig(function=name, arguments=FUNCTIONS[name]))


def weighted_gradient(policy: Policy, batch: Batch, **settings: Any) -> Gradient:
    """The gradient of an update, as `Learner.update` prepares it."""
    with torch.random.fork_rng():
        torch.manual_seed(3)  # the groups with a penalty, and a seed for each minibatch
        weighted = make_learner(policy, **settings).weighted(batch)
        return gradient_of(policy, *weighted, **settings)


@pytest.mark.parametrize("regularization", REGULARIZATIONS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_micro_batches_do_not_change_the_gradient(policy: Policy, batch: Batch, name: str, regularization: str) -> None:
    settings = {"objective": objective(name), **REGULARIZATIONS[regularization]}
    whole = weighted_gradient(policy, batch, **settings)
    for tokens in (12, 25, 40):
        cut = weighted_gradient(policy, batch, micro_batch_tokens=tokens, **settings)
        assert relative_error(cut, whole) < 1e-10
    unweighted = gradient_of(policy, batch, objective=ObjectiveConfig(), **REGULARIZATIONS[regularization])
    assert relative_error(whole, unweighted) > 1e-3


def test_weights_of_each_micro_batch_by_itself_give_another_gradient(policy: Policy, batch: Batch) -> None:
    """TRL takes the entropy's quantile over the micro-batch at hand."""
    chosen = objective("top_entropy")
    whole = weighted_gradient(policy, batch, objective=chosen)
    learner = make_learner(policy, objective=chosen)
    parts = [part for piece in micro_batches(batch, 25) for part in learner.weighted(piece)]
    assert len(parts) > 2
    policy.model.zero_grad()
    by_part = [gradient_of(policy, part, objective=chosen) for part in parts]
    summed = {name: sum(gradient[name] for gradient in by_part) for name in whole}
    assert relative_error(summed, whole) > 0.05


def test_the_gradient_is_that_of_weights_by_hand(policy: Policy, batch: Batch) -> None:
    ours = weighted_gradient(policy, batch, objective=objective("top_entropy"), kl=KLConfig(coefficient=0.3))
    logprobs_T, entropy_T = policy.token_logprobs(batch, temperature=1.0)
    weights_T = torch.zeros_like(logprobs_T)
    weights_T[batch.trained_T] = top_entropy(entropy_T[batch.trained_T].detach(), fraction=0.3).double()
    ratio_T = (logprobs_T - batch.old_logprobs_T).exp()
    surrogate_T = torch.minimum(ratio_T * batch.advantages_T, ratio_T.clamp(0.8, 1.2) * batch.advantages_T)
    d_T = batch.reference_logprobs_T - logprobs_T
    loss_T = -weights_T * surrogate_T + 0.3 * (d_T.exp() - d_T - 1)  # the KL is not weighted
    (loss_T * batch.weights_N[batch.sequence_T] * batch.trained_T).sum().backward()
    by_hand = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}
    policy.model.zero_grad()
    assert relative_error(ours, by_hand) < 1e-10


def test_a_penalty_is_added_beside_the_policy_loss(policy: Policy, batch: Batch) -> None:
    weighted = make_learner(policy, objective=objective("kl_cov")).weighted(batch)
    (one,) = weighted
    assert one.penalty_weights_T is not None
    ours = gradient_of(policy, one, objective=objective("kl_cov"))
    plain = gradient_of(policy, batch)
    logprobs_T, _ = policy.token_logprobs(batch, temperature=1.0)
    penalty_T = one.penalty_weights_T * (logprobs_T - batch.old_logprobs_T).abs()
    (penalty_T * batch.weights_N[batch.sequence_T] * batch.trained_T).sum().backward()
    by_hand = {name: plain[name] + parameter.grad for name, parameter in policy.model.named_parameters()}
    policy.model.zero_grad()
    assert relative_error(ours, by_hand) < 1e-10
    assert int((one.penalty_weights_T > 0).sum()) == int(0.2 * int(batch.trained_T.sum()))


def halves(logprobs_T: Tensor, *, share: float) -> Tensor:
    return torch.full_like(logprobs_T, share)


def own(function: Any, **arguments: Any) -> Any:
    """The weights of a function that a recipe would name."""
    import sys
    import types

    module = types.ModuleType("own_weights")
    module.function = function  # type: ignore[attr-defined]
    sys.modules["own_weights"] = module
    return make_token_weights(TokenWeightsConfig(function="own_weights:function", arguments=arguments))


def test_a_function_of_the_users_is_called_with_what_it_asks_for(policy: Policy, batch: Batch) -> None:
    weights = own(halves, share=0.5)({"logprobs_T": torch.zeros(3)})
    assert weights.policy_T.tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logprobs_T: logprobs_T.mean(), r"returned torch\.float32 \[\] on cpu: return torch\.float32 \[12\]"),
        (lambda logprobs_T: logprobs_T * float("nan"), "a weight that is not finite"),
        (lambda logprobs_T: torch.rand_like(logprobs_T), "draw random numbers from its `seed`"),
        (lambda rewards: rewards, "missing a required argument: 'rewards'"),
    ],
)
def test_an_unfit_function_is_refused_before_a_run(function: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        own(function)
