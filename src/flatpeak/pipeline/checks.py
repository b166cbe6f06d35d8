"""What a recipe cannot say by itself: whether its parts, once they are there, fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatpeak.config.run_config import RunConfig
from flatpeak.config.unused_settings import written
from flatpeak.errors import UserError
from flatpeak.evaluation.config import CURRENT_NAMES, EvaluationConfig
from flatpeak.gradreg.regularizer import GradientRegularizer
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.model import Policy
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.types import Prompt

GREEDY = ("accuracy", "reward", "length", "truncated", "accuracy/not_near_train")
SAMPLED = ("reward", "accuracy", "length", "truncated")
JUDGED = ("accuracy", "pass@", "maj@")
"""Metrics that need a part that says right or wrong; no reward part may be called accuracy."""


def check_accuracy(config: EvaluationConfig, reward: RewardSet) -> None:
    """UserError where `evaluation.accuracy` is none of the rewards."""
    if config.accuracy is not None and config.accuracy not in reward.weights:
        raise UserError(
            f"evaluation.accuracy={config.accuracy} names no reward: choose one of {', '.join(reward.weights)}, or "
            "null where none says right or wrong"
        )


def check_metric(config: EvaluationConfig, reward: RewardSet) -> None:
    """UserError where `evaluation.metric` is nothing that an evaluation has."""
    known = [*GREEDY, *reward.weights] if config.greedy else []
    if config.samples:
        known += [f"sampled/{name}" for name in (*SAMPLED, *reward.weights)]
        known += [f"{name}@{k}" for k in config.k for name in ("pass", "maj")]
    if config.accuracy is None:
        known = [name for name in known if not name.removeprefix("sampled/").startswith(JUDGED)]
    if config.metric not in known:
        hint = "" if config.samples else " (pass@k and maj@k need evaluation.samples)"
        raise UserError(f"evaluation.metric={config.metric}: choose one of {', '.join(known)}{hint}")


def check_policy(config: RunConfig, policy: Policy) -> None:
    """UserError where nothing can be trained, or held-out completions cannot fit into the context."""
    if not policy.masters():  # which refuses float16
        raise UserError("no parameter of the model has requires_grad: unfreeze what is to be trained")
    limit = config.evaluation.max_new_tokens or 0
    if policy.context_length is not None and limit > config.rollout.max_new_tokens:
        room = policy.context_length - limit
        if room < 1:
            raise UserError(
                f"evaluation.max_new_tokens={limit} leaves no room for a prompt in the model's context of "
                f"{policy.context_length} tokens: lower it, or take a model with a longer context"
            )
        longest = config.prompt.max_tokens
        if longest is None or longest > room:
            raise UserError(
                f"evaluation.max_new_tokens={limit} exceeds rollout.max_new_tokens, beside which prompts may fill the "
                f"context of {policy.context_length}: lower it, or set prompt.max_tokens to at most {room}"
            )


def check_aside(aside: int, train: Sequence[Prompt]) -> None:
    """UserError where the SFT check would take every training row."""
    if aside and aside >= len(train):
        raise UserError(
            f"sft.check_size={aside} sets all {len(train)} training rows aside for sft.stop_at: lower sft.check_size"
        )


def check_regularization(config: RunConfig, policy: Policy) -> None:
    """UserError where there is nothing to perturb, or rounding would swallow the perturbation."""
    if config.gradient_regularization.enabled:
        regularizer = GradientRegularizer(policy.model, config.gradient_regularization, masters=policy.masters())
        regularizer.guard.probe(regularizer.perturbation, regularizer.config)


def without_source(config: RunConfig, *, own: Mapping[str, Any], named: str) -> tuple[RunConfig, list[str]]:
    """The configuration for a caller's own model, which names no other, and the notices of what it leaves out.

    A model that `own`, the part of the recipe that was written for this call, names beside it is a UserError. One that
    comes from a shared recipe (called `named`), given by its name, resolved before or extended, is left out.
    """
    said = list(written(config.model, *(name for name in ModelConfig.model_fields if name != "dropout")))
    if not said:
        return config, []
    section = own.get("model", {})
    contradicted = [name for name in said if not isinstance(section, Mapping) or name in section]
    keys = ", ".join(f"model.{name}" for name in contradicted or said)
    if contradicted:
        raise UserError(f"{keys} beside train(model=...), which brings the model: leave {keys} out of the recipe")
    without = config.model_copy(update={"model": ModelConfig(dropout=config.model.dropout)})
    return without, [f"{keys} of {named} not used: train(model=...) brings the model"]


def overlong_demonstrations(dropped: int, *, left: int, context: int | None) -> str:
    """The notice of demonstrations that do not fit; UserError where none does."""
    total = dropped + left
    if not left:
        raise UserError(
            f"none of the {total} demonstrations fits into the model's context of {context} tokens: shorten questions "
            "or rationales, take a model with a longer context, or set sft.steps=0"
        )
    return (
        f"sft: {dropped} of {total} demonstrations dropped: question and rationale exceed the model's context of "
        f"{context} tokens"
    )


def renamed_settings(config: RunConfig) -> list[str]:
    """Old names that the recipe uses and that a later version will refuse."""
    return [
        f"evaluation.robustness: {old} is deprecated, it is called {new} now and its figures are robustness/{new}: "
        f"write {new}"
        for old, new in CURRENT_NAMES.items()
        if old in config.evaluation.robustness
    ]


def recipe_notices(config: RunConfig, policy: Policy) -> list[str]:
    """Notices about choices of a recipe that are valid and easily misread."""
    notices = []
    if policy.notice:
        notices.append(f"native engine not used: {policy.notice}; rollouts use generate, training pads")
    if config.rollout.sampling().filtered:
        notices.append(
            "rollout.top_p/top_k draw from a filtered distribution while the ratio is that of the full one: the "
            "importance ratio is approximate"
        )
    if config.rollout.min_new_tokens:
        notices.append("rollout.min_new_tokens forbids early ends that the policy would draw: the ratio is approximate")
    notices += renamed_settings(config)
    buffer, limit = config.objective.overlong_buffer, config.rollout.max_new_tokens
    if config.objective.truncated == "soft_penalty" and buffer > limit / 2:
        notices.append(
            f"objective.overlong_buffer={buffer} is over half of rollout.max_new_tokens={limit}: completions of more "
            f"than {limit - buffer} tokens lose reward; a quarter of the limit is {max(1, limit // 4)}"
        )
    if config.curriculum and 0 < config.training.steps <= config.curriculum.steps:
        notices.append(
            f"curriculum.steps={config.curriculum.steps} is not below training.steps={config.training.steps}: the main "
            f"task begins only if curriculum.until_pass_rate={config.curriculum.until_pass_rate} is reached before"
        )
    return notices
