"""The policy loss of scored groups as a function of the present weights, as exact curvature needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from flatpeak.functional.weights import completion_weights
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import without_dropout
from flatpeak.training.advantage_function import Advantages
from flatpeak.training.batch import collate, micro_batches, take
from flatpeak.training.learner import token_budget, weighted_sum
from flatpeak.training.objective import Objective, with_old_logprobs
from flatpeak.training.reward_tensors import reward_tensors
from flatpeak.types import Batch, Group, Scores


@dataclass(frozen=True, kw_only=True)
class SampledLoss:
    """The loss that one update on some groups would descend, were they sampled by the present weights.

    sum_i w_i sum_t loss_it with the recipe's policy loss, advantages, treatment of truncated completions and weights,
    for all groups in one minibatch, at ratio 1, and without KL and entropy terms. Passes go through the plain model, so
    that they can be differentiated twice, and without dropout.
    """

    policy: Policy
    objective: Objective
    advantages: Advantages
    temperature: float
    """The temperature at which the groups are sampled."""
    max_new_tokens: int
    """`rollout.max_new_tokens`, which normalizations and overlong punishments refer to."""
    micro_batch_tokens: int | None = None

    def __call__(self, groups: Sequence[Group], scores: Scores) -> Callable[[], Iterator[Tensor]] | None:
        """A function that computes the loss of each micro-batch anew; None where no completion has an advantage."""
        batch = self.batch(groups, scores)
        return (lambda: self.losses(batch)) if len(batch.lengths_N) else None

    def batch(self, groups: Sequence[Group], scores: Scores) -> Batch:
        """The completions that have a gradient, with the weights that they have among all."""
        config = self.objective.config
        rewards = reward_tensors(
            groups,
            scores,
            config,
            max_new_tokens=self.max_new_tokens,
            group_baseline=self.advantages.compare_groups(len(groups[0].completions)),
        )
        advantages_PG = self.advantages(rewards.rewards_PG, rewards.valid_PG)
        completions = collate(groups, rewards.trained_PG, device=self.policy.device)
        advantages_N = advantages_PG[rewards.trained_PG].to(self.policy.device)
        weights_N = completion_weights(completions.lengths_N, config.normalization, max_tokens=self.max_new_tokens)
        batch = completions.to_batch(advantages_N=advantages_N, weights_N=weights_N, old_logprobs_T=None)
        signal_N = (weights_N > 0) & ((advantages_N != 0) | self.objective.loss.all_tokens)
        return take(batch, signal_N.nonzero()[:, 0])

    def losses(self, batch: Batch) -> Iterator[Tensor]:
        """The weighted loss of each micro-batch, to be differentiated before the next is drawn."""
        budget = token_budget(self.micro_batch_tokens, self.policy.device)
        for micro_batch in micro_batches(batch, budget, padded=True):
            with without_dropout(self.policy.model):
                logprobs_T, _ = self.policy.token_logprobs(
                    micro_batch, temperature=self.temperature, twice_differentiable=True
                )
            loss_T = self.objective.policy_loss_with_curvature(logprobs_T, with_old_logprobs(micro_batch, logprobs_T))
            yield weighted_sum(loss_T, micro_batch)
