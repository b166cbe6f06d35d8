"""The evaluator of a run, with its measurement of sharpness."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.evaluation.choice_ranking import LetterRanker
from flatpeak.evaluation.evaluate import PolicyEvaluator
from flatpeak.evaluation.sharpness import SharpnessProbe
from flatpeak.gradreg.parameters import perturbed_parameters
from flatpeak.gradreg.perturbation import Perturbation
from flatpeak.pipeline.request import Algorithm
from flatpeak.policy.model import Policy
from flatpeak.protocols import Sampler
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.training.sampled_loss import SampledLoss
from flatpeak.types import Prompt

UNBOUNDED_CONTEXT = 2**30


def build_evaluator(
    config: RunConfig,
    policy: Policy,
    sampler: Sampler,
    reward: RewardSet,
    make_algorithm: Callable[[], Algorithm],
    *,
    task: str,
    prompts: Sequence[Prompt],
) -> PolicyEvaluator:
    """The evaluator of a policy on these prompts; UserError for letters that cannot be ranked, or nothing to perturb.

    `make_algorithm` is called where sharpness is measured: other evaluations need none of the user's functions for it.
    """
    ranker = None
    if config.evaluation.choices == "rank":
        ranker = LetterRanker(policy=policy, tokenizer=policy.tokenizer)
        ranker.check(prompts)
    return PolicyEvaluator(
        config=config.evaluation,
        task=task,
        prompts=prompts,
        sampler=sampler,
        reward=reward,
        max_new_tokens=config.rollout.max_new_tokens,
        stop=config.rollout.stop,
        tokenizer=policy.tokenizer,
        prompt=config.prompt,
        longest_prompt=longest_prompt(config, policy.context_length),
        may_lack_accuracy=config.may_lack_accuracy,
        ranker=ranker,
        sharpness=_sharpness_probe(config, policy, reward, make_algorithm),
    )


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
        ),
    )


def longest_prompt(config: RunConfig, context: int | None) -> int:
    """The most tokens that a prompt may have beside a completion; UserError where the model's context leaves none."""
    context, limit = context or UNBOUNDED_CONTEXT, config.rollout.max_new_tokens
    if limit >= context:
        raise UserError(
            f"rollout.max_new_tokens={limit} leaves no room for a prompt in the model's context of {context} tokens: "
            "lower it, or take a model with a longer context"
        )
    return context - limit
