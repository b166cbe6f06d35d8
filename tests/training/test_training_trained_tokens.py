"""Tokens that the policy did not sample are read, and take no part in any loss, length, ratio or metric."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.functional import completion_weights
from flatpeak.policy.model import Policy
from flatpeak.training.batch import collate, micro_batches, minibatches, take
from flatpeak.training.learner import PolicyStatistics
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig, SamplerCorrectionConfig
from flatpeak.training.reward_tensors import kl_penalty_N
from flatpeak.training.step_metrics import kl_metrics
from flatpeak.types import Batch, Group
from support.regularized_training import Gradient, double_qwen2, gradient_of, make_learner, off_policy, relative_error
from support.training import completion, prompt

KL = KLConfig(coefficient=0.3)
OBJECTIVES = {
    "GRPO": {},
    "GSPO": {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.05},
    "CISPO": {"loss": "truncated_policy_gradient", "cap": 1.1},
    "with entropy": {"entropy_coefficient": 0.1},
    "corrected": {"sampler_correction": SamplerCorrectionConfig(type="truncate", level="sequence", cap=1.2)},
}
REGULARIZATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "importance": {"strength": 1.0, "ratio_mode": "importance"},
    "clipped": {"strength": 1.0, "ratio_mode": "importance_clipped"},
    "exact": {"strength": 1.0, "difference": "exact", "perturbed": "all"},
}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return double_qwen2()


@pytest.fixture(scope="module")
def batch(policy: Policy) -> Batch:
    """Completions of which every third token, and all of the second one, were not sampled."""
    whole = off_policy(policy)
    trained_T = torch.arange(len(whole.tokens_T)) % 3 != 1
    trained_T[whole.sequence_T == 1] = False
    lengths_N = torch.bincount(whole.sequence_T[trained_T], minlength=len(whole.lengths_N))
    return replace(
        whole,
        trained_T=trained_T,
        weights_N=completion_weights(lengths_N, "sequence_mean").double(),
        sampler_logprobs_T=whole.old_logprobs_T - 0.1,
    )


def changed(batch: Batch) -> Batch:
    """Other numbers at every token that is not trained."""
    values = {name: getattr(batch, name) for name in ("advantages_T", "old_logprobs_T", "reference_logprobs_T")}
    values["sampler_logprobs_T"] = batch.sampler_logprobs_T
    return replace(batch, **{name: torch.where(batch.trained_T, value, -7.5) for name, value in values.items()})


def measure(policy: Policy, batch: Batch, **settings: Any) -> tuple[Gradient, dict[str, float]]:
    learner = make_learner(policy, **settings)
    statistics = learner.accumulate_gradients(batch)
    policy.model.zero_grad()
    return gradient_of(policy, batch, **settings), sums(statistics)


def sums(statistics: PolicyStatistics) -> dict[str, float]:
    """An update's loss and its statistics."""
    names = ("tokens", "entropy", "ratio", "clipped", "kl")
    found = {name: sum(float(getattr(one, name)) for one in statistics.tokens) for name in names}
    return {"loss": statistics.loss, **found, "gap": sum(float(one.sampler.gap) for one in statistics.tokens)}


@pytest.mark.parametrize("regularization", REGULARIZATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_stands_at_untrained_tokens_changes_neither_gradient_nor_metrics(
    policy: Policy, batch: Batch, objective: str, regularization: str
) -> None:
    settings = {"objective": ObjectiveConfig(**OBJECTIVES[objective]), "kl": KL, **REGULARIZATIONS[regularization]}
    gradient, statistics = measure(policy, batch, **settings)
    other_gradient, other_statistics = measure(policy, changed(batch), **settings)
    assert relative_error(other_gradient, gradient) == 0
    assert other_statistics == statistics
    assert statistics["tokens"] == int(batch.trained_T.sum())
    everywhere, _ = measure(policy, replace(batch, trained_T=None), **settings)
    assert relative_error(everywhere, gradient) > 0.01


@pytest.mark.parametrize("tokens", [12, 20])
def test_micro_batches_do_not_change_the_gradient_of_the_trained_tokens(
    policy: Policy, batch: Batch, tokens: int
) -> None:
    settings = {"objective": ObjectiveConfig(ratio="sequence"), "kl": KL, "strength": 1.0}
    whole = gradient_of(policy, batch, **settings)
    assert relative_error(gradient_of(policy, batch, micro_batch_tokens=tokens, **settings), whole) < 1e-10


def test_the_loss_is_that_of_the_trained_tokens_by_hand(policy: Policy, batch: Batch) -> None:
    objective = ObjectiveConfig(ratio="sequence", clip_low=0.05, clip_high=0.05)
    ours = gradient_of(policy, batch, objective=objective)
    logprobs_T = policy.token_logprobs(batch, temperature=1.0)[0]
    loss = torch.zeros((), dtype=torch.float64)
    counted = 0
    for number in range(len(batch.lengths_N)):
        tokens = ((batch.sequence_T == number) & batch.trained_T).nonzero()[:, 0]
        counted += 1
        if not len(tokens):
            continue
        ratio = (logprobs_T[tokens] - batch.old_logprobs_T[tokens]).mean().exp()
        advantage = batch.advantages_T[tokens[0]]
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage)
    (loss / counted).backward()
    by_hand = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}
    policy.model.zero_grad()
    assert relative_error(ours, by_hand) < 1e-6  # the weights are float32


def test_advantages_may_differ_from_token_to_token(policy: Policy) -> None:
    whole = off_policy(policy)
    generator = torch.Generator().manual_seed(3)
    batch = replace(whole, advantages_T=torch.randn(len(whole.tokens_T), generator=generator, dtype=torch.float64))
    ours = gradient_of(policy, batch, objective=ObjectiveConfig(loss="unclipped_surrogate"))
    logprobs_T = policy.token_logprobs(batch, temperature=1.0)[0]
    ratio_T = (logprobs_T - batch.old_logprobs_T).exp()
    (-ratio_T * batch.advantages_T * batch.weights_N[batch.sequence_T]).sum().backward()
    by_hand = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}
    policy.model.zero_grad()
    assert relative_error(ours, by_hand) < 1e-10


def interrupted() -> list[Group]:
    """A group whose first completion has a tool's answer of two tokens in its middle."""
    first = replace(completion((5, 6, 7, 8, 9), limit=9), trained=(True, False, False, True, True))
    return [Group(prompt=prompt("x", (4, 5)), completions=(first, completion((8, 9), limit=9)))]


def test_a_sampler_says_which_tokens_it_drew() -> None:
    completions = collate(interrupted(), torch.ones(1, 2, dtype=torch.bool), device=torch.device("cpu"))
    assert completions.trained_T is not None
    assert completions.trained_T.tolist() == [True, False, False, True, True, True, True]
    second = take(completions, torch.tensor([1]))
    assert second.trained_T is not None
    assert second.trained_T.tolist() == [True, True]


@pytest.mark.parametrize(
    ("normalization", "weights"),
    [("sequence_mean", [1 / 6, 1 / 4]), ("token_mean", [1 / 5] * 2), ("longest", [1 / 6] * 2)],
)
def test_lengths_in_normalizations_are_those_of_the_trained_tokens(normalization: Any, weights: list[float]) -> None:
    completions = collate(interrupted(), torch.ones(1, 2, dtype=torch.bool), device=torch.device("cpu"))
    (one,) = minibatches(
        completions,
        1,
        advantages_T=torch.tensor([1.0, 0, 0, 1, 1, -1, -1]),
        old_logprobs_T=completions.sampler_logprobs_T,
        normalization=normalization,
        max_tokens=9,
        seed=0,
        all_tokens=False,
    )
    assert one.weights_N.tolist() == pytest.approx(weights)
    assert [len(part.tokens_T) for part in micro_batches(one, 7)] == [5, 2]  # untrained tokens need memory all the same


def test_a_kl_to_the_reference_is_that_of_the_trained_tokens() -> None:
    completions = collate(interrupted(), torch.ones(1, 2, dtype=torch.bool), device=torch.device("cpu"))
    logprobs_T = torch.tensor([-1.0, -9, -9, -2, -3, -4, -5])
    completions = replace(completions, sampler_logprobs_T=logprobs_T, reference_logprobs_T=logprobs_T - 0.5)
    penalty_N: Tensor = kl_penalty_N(
        completions, logprobs_T, KLConfig(estimator="k1", coefficient=2.0, placement="reward")
    )
    assert penalty_N.tolist() == pytest.approx([3.0, 2.0])
    assert kl_metrics(completions)["rollout/kl_sequence"] == pytest.approx(2.5 / 2)
