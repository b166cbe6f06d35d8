"""On a softmax bandit the ratio modes can be told apart exactly: reuse penalizes nothing, importance the true norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatpeak.functional import frozen_policy_loss, policy_gradient, reweighted_policy_loss
from flatpeak.gradreg.config import RatioMode
from flatpeak.training.learner import weighted_sum
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.regularized import record_first_pass, second_pass_loss
from flatpeak.types import Batch
from support.bandit import Bandit, penalty_of

SAMPLES = 200_000


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def every_action(bandit: Bandit) -> tuple[Tensor, Tensor]:
    """(actions, shares): each action once, with its probability."""
    return torch.arange(len(bandit.theta)), bandit.logprobs().detach().exp()


def sampled(bandit: Bandit) -> tuple[Tensor, Tensor]:
    """(actions, shares): draws from the policy, each with the same share."""
    generator = torch.Generator().manual_seed(0)
    actions_N = torch.multinomial(bandit.logprobs().detach().exp(), SAMPLES, replacement=True, generator=generator)
    return actions_N, torch.full((SAMPLES,), 1 / SAMPLES, dtype=torch.float64)


def penalty(bandit: Bandit, actions_N: Tensor, shares_N: Tensor, *, mode: RatioMode, difference: str) -> Tensor:
    """By the pure functions: REINFORCE first, then what the mode makes of it."""
    advantages_N = bandit.advantages(actions_N, shares_N)
    first_N = bandit.logprobs().detach()[actions_N]

    def first(logprobs_K: Tensor) -> Tensor:
        return (shares_N * policy_gradient(logprobs_K[actions_N], advantages_N)).sum()

    def second(logprobs_K: Tensor) -> Tensor:
        if mode == "reuse":
            return (shares_N * frozen_policy_loss(logprobs_K[actions_N], -advantages_N)).sum()
        return (shares_N * reweighted_policy_loss(logprobs_K[actions_N], first_N, -advantages_N)).sum()

    return penalty_of(bandit, first, second, difference=difference)


def test_the_true_penalty_is_that_of_the_softmax_by_hand() -> None:
    bandit = Bandit()
    pi = bandit.logprobs().detach().exp()
    rewards = bandit.rewards_K
    mean = (pi * rewards).sum()
    # dJ/dtheta_a = pi_a (r_a - J); d2J/dtheta_a dtheta_b = [a = b] g_a - pi_b g_a - pi_a g_b.
    g = pi * (rewards - mean)
    curvature = torch.diag(g) - torch.outer(g, pi) - torch.outer(pi, g)
    torch.testing.assert_close(bandit.true_penalty(), curvature @ g, rtol=1e-12, atol=0)


@pytest.mark.parametrize("difference", ["exact", "central", "forward"])
def test_importance_over_every_action_penalizes_the_true_norm(difference: str) -> None:
    bandit = Bandit()
    result = penalty(bandit, *every_action(bandit), mode="importance", difference=difference)
    assert error(result, bandit.true_penalty()) < {"exact": 1e-12, "central": 1e-8, "forward": 1e-4}[difference]


@pytest.mark.parametrize("difference", ["exact", "central", "forward"])
def test_reuse_over_every_action_penalizes_nothing(difference: str) -> None:
    bandit = Bandit()
    result = penalty(bandit, *every_action(bandit), mode="reuse", difference=difference)
    assert error(result, bandit.true_penalty()) == pytest.approx(1, abs=1e-8)
    assert result.norm() < 1e-8 * bandit.true_penalty().norm()


@pytest.mark.parametrize("difference", ["exact", "forward"])
def test_importance_over_samples_penalizes_the_true_norm_within_the_sampling_error(difference: str) -> None:
    bandit = Bandit()
    result = penalty(bandit, *sampled(bandit), mode="importance", difference=difference)
    assert error(result, bandit.true_penalty()) < 0.01


def test_reuse_over_samples_penalizes_nothing_whatever_was_drawn() -> None:
    bandit = Bandit()
    result = penalty(bandit, *sampled(bandit), mode="reuse", difference="forward")
    assert result.norm() < 1e-8 * bandit.true_penalty().norm()


def batch_of_actions(bandit: Bandit, actions_N: Tensor, shares_N: Tensor, *, ratios_N: Tensor) -> Batch:
    """Completions of one token, all of one prompt, whose sampler had log-probabilities `ratios_N` below."""
    count = len(actions_N)
    return Batch(
        prompts=((0,),),
        prompt_N=torch.zeros(count, dtype=torch.int64),
        lengths_N=torch.ones(count, dtype=torch.int64),
        tokens_T=actions_N,
        sequence_T=torch.arange(count),
        advantages_T=bandit.advantages(actions_N, shares_N),
        weights_N=shares_N / ratios_N,
        old_logprobs_T=bandit.logprobs().detach()[actions_N] - torch.log(ratios_N),
    )


@pytest.mark.parametrize("loss", ["clipped_surrogate", "unclipped_surrogate", "truncated_policy_gradient"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["importance", "reuse", "importance_clipped"])
def test_the_trainers_objective_penalizes_the_same(loss: str, ratio: str, mode: RatioMode) -> None:
    bandit = Bandit()
    actions_K, shares_K = every_action(bandit)
    # Drawn by another policy and weighted by what that leaves: in expectation still the bandit's own objective.
    ratios_K = torch.linspace(0.9, 1.1, len(actions_K), dtype=torch.float64)
    batch = batch_of_actions(bandit, actions_K, shares_K, ratios_N=ratios_K)
    objective = Objective(config=ObjectiveConfig(loss=loss, ratio=ratio), kl=KLConfig())
    frozen = record_first_pass(objective, bandit.logprobs()[actions_K], batch)

    def first(logprobs_K: Tensor) -> Tensor:
        return weighted_sum(objective(logprobs_K, torch.zeros_like(logprobs_K), batch)[0], batch)

    def second(logprobs_K: Tensor) -> Tensor:
        loss_T = second_pass_loss(objective, frozen, logprobs_K, torch.zeros_like(logprobs_K), batch, mode=mode)
        return weighted_sum(loss_T, batch)

    result = penalty_of(bandit, first, second, difference="central")
    true = bandit.true_penalty()
    if mode == "reuse":
        assert result.norm() < 1e-8 * true.norm()
    else:
        assert error(result, true) < 1e-8
