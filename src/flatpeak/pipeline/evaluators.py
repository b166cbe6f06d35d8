"""The evaluator of a run, with its measurement of sharpness and the loss that is sharp or flat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from flatpeak.config.run_config import RunConfig
from flatpeak.episodes.build import worded_prompt
from flatpeak.errors import UserError
from flatpeak.evaluation.choice_ranking import LetterRanker
from flatpeak.evaluation.evaluate import PolicyEvaluator
from flatpeak.evaluation.sharpness import SharpnessProbe
from flatpeak.functional.weights import completion_weights
from flatpeak.gradreg.parameters import perturbed_parameters
from flatpeak.gradreg.perturbation import Perturbation
from flatpeak.pipeline.request import Algorithm
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import without_dropout
from flatpeak.protocols import Sampler
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.training.batch import (
    collate,
    has_advantage,
    micro_batches,
    on_trained_tokens,
    take,
    trained_lengths,
)
from flatpeak.training.collect import advantage_inputs
from flatpeak.training.learner import token_budget, weighted_sum
from flatpeak.training.objective import Objective, with_old_logprobs
from flatpeak.training.reward_tensors import Advantages, reward_tensors
from flatpeak.types import Batch, Group, Prompt, Scores

UNBOUNDED_CONTEXT = 2**30


def build_evaluator(
    config: RunConfig,
    policy: Policy,
    sampler: Sampler,
    reward: RewardSet,
    make_algorithm: Callable[[], Algorithm],
    *,
    task: str,
    shares: Mapping[str, float],
    prompts: Sequence[Prompt],
    sets: Mapping[str, Sequence[Prompt]],
) -> PolicyEvaluator:
    """The evaluator of a policy on these prompts; UserError for letters that cannot be ranked, or nothing to perturb.

    `shares` are those of the tasks of a mixture, `sets` the prompts of further evaluation sets. `make_algorithm` is
    called where sharpness is measured: other evaluations need none of the user's functions for it.
    """
    ranker = None
    if config.evaluation.choices == "rank":
        ranker = LetterRanker(policy=policy, tokenizer=policy.tokenizer)
        for asked in (prompts, *sets.values()):
            ranker.check(asked)
    evaluator = PolicyEvaluator(
        config=config.evaluation,
        task=task,
        prompts=prompts,
        shares=shares,
        sampler=sampler,
        reward=reward,
        max_new_tokens=config.rollout.max_new_tokens,
        stop=config.rollout.stop,
        tokenizer=policy.tokenizer,
        prompt=worded_prompt(config.prompt, config.tools, config.environment, config.episodes, policy.tokenizer),
        longest_prompt=longest_prompt(config, policy.context_length),
        may_lack_accuracy=config.may_lack_accuracy,
        ranker=ranker,
        sharpness=_sharpness_probe(config, policy, reward, make_algorithm),
    )
    further = (replace(evaluator, task=name, prompts=asked, shares={}, sharpness=None) for name, asked in sets.items())
    return replace(evaluator, sets=tuple(further))


def _sharpness_probe(
    config: RunConfig, policy: Policy, reward: RewardSet, make_algorithm: Callable[[], Algorithm]
) -> SharpnessProbe | None:
    """The measurement of sharpness that the recipe asks for; UserError where nothing is to perturb, or for judges."""
    sharpness = config.evaluation.sharpness
    if sharpness is None:
        return None
    if reward.judges and not sharpness.judges:
        raise UserError(sharpness.refusal_of(reward.judges[0]))
    section = "evaluation.sharpness"
    chosen = perturbed_parameters(policy.model, sharpness.perturbed, section=section)
    if not isinstance(sharpness.perturbed, tuple):
        chosen = [parameter for parameter in chosen if parameter.ndim >= 2]
    if not chosen:
        raise UserError(f"{section}.perturbed={sharpness.perturbed}: no matrix is among them; use blocks or a pattern")
    algorithm = make_algorithm()
    return SharpnessProbe(
        config=sharpness,
        perturbation=Perturbation(policy.model, chosen),
        make_losses=SampledLoss(
            policy=policy,
            objective=algorithm.objective,
            advantages=algorithm.advantages,
            temperature=config.evaluation.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            micro_batch_tokens=config.training.micro_batch_tokens,
            reward_weights=reward.weights,
        ),
    )


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
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """The weights of the reward's components, for advantages that ask for them."""

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
            by_turn=self.advantages.config.credit == "turn",
        )
        inputs = advantage_inputs(self.advantages.asks, groups, scores, weights=self.reward_weights)
        advantages_PG = self.advantages(rewards.rewards_PG, rewards.valid_PG, **inputs)
        completions = collate(groups, rewards.trained_PG, device=self.policy.device)
        turns_T = self.advantages.by_turn(rewards, rewards.trained_PG)
        advantages_T = self.advantages.per_token(advantages_PG[rewards.trained_PG], completions, None, turns_T)
        weights_N = completion_weights(
            trained_lengths(completions), config.normalization, max_tokens=self.max_new_tokens
        )
        batch = completions.to_batch(advantages_T=advantages_T, weights_N=weights_N, old_logprobs_T=None)
        signal_N = (weights_N > 0) & (has_advantage(batch) | self.objective.loss.all_tokens)
        return take(batch, signal_N.nonzero()[:, 0])

    def losses(self, batch: Batch) -> Iterator[Tensor]:
        """The weighted loss of each micro-batch, to be differentiated before the next is drawn."""
        budget = token_budget(self.micro_batch_tokens, self.policy.device)
        for micro_batch in micro_batches(batch, budget, padded=True):
            with without_dropout(self.policy.model):
                logprobs_T, _ = self.policy.token_logprobs(
                    micro_batch, temperature=self.temperature, twice_differentiable=True
                )
            micro_batch, logprobs_T = on_trained_tokens(micro_batch, logprobs_T)
            micro_batch = with_old_logprobs(micro_batch, logprobs_T)
            loss_T = self.objective.policy_loss(logprobs_T, micro_batch, curvature=True)
            yield weighted_sum(loss_T, micro_batch)


def longest_prompt(config: RunConfig, context: int | None) -> int:
    """The most tokens that a prompt may have beside a completion; UserError where the model's context leaves none."""
    context, limit = context or UNBOUNDED_CONTEXT, config.rollout.max_new_tokens
    if limit >= context:
        raise UserError(
            f"rollout.max_new_tokens={limit} leaves no room for a prompt in the model's context of {context} tokens: "
            "lower it, or take a model with a longer context"
        )
    return context - limit
