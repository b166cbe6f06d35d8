"""The algorithm of a recipe in words: what a model card says of its objective, advantages, penalties and optimizers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from flatpeak.config.run_config import RunConfig
from flatpeak.training.config import AdvantageConfig, OptimizerConfig, is_reference
from flatpeak.utils.redaction import without_local_paths

_BASELINES: Final = {
    "mean": "the reward minus the mean of its group",
    "leave_one_out": "the reward minus the mean of the other completions of its group",
    "none": "the reward itself",
}
_SCALES: Final = {
    "std": ", over the standard deviation of the group",
    "batch_std": ", over the standard deviation of the batch",
    "none": "",
}
_NORMALIZATIONS: Final = {
    "sequence_mean": "the mean over a completion's tokens, then over completions",
    "constant": "the sum over a completion's tokens over the limit of tokens, then the mean over completions",
    "token_mean": "the mean over all tokens",
    "longest": "the sum over a completion's tokens over the longest one's, then the mean over completions",
    "sequence_sum": "the sum over a completion's tokens, then the mean over completions",
}
_TRUNCATED: Final = {
    "keep": "are treated like the others",
    "mask": "leave the loss",
    "zero_reward": "get no reward",
    "soft_penalty": "are punished softly as they near the limit",
}


def algorithm_tag(name: str) -> str:
    """The tag of an algorithm: `dr-grpo`, and `grpo` for one that is a variant of GRPO."""
    return "-".join(re.findall(r"[a-z]+", name.partition(" with ")[0].lower()))


def describe_rl(config: RunConfig) -> list[str]:
    """The sentences about RL: advantages, loss, penalties, sampling and updates."""
    objective, rollout, training = config.objective, config.rollout, config.training
    lines = [
        f"Advantage: {_advantage(config.advantage)}.",
        f"Loss: {_loss(config)}; {_NORMALIZATIONS[objective.normalization]} (`{objective.normalization}`).",
        _kl(config),
    ]
    correction = objective.sampler_correction
    if correction.enabled:
        bound = "truncated" if correction.type == "truncate" else "masked"
        lines.append(f"Sampler corrected by {bound} importance weights per {correction.level}, cap {correction.cap:g}.")
    if objective.entropy_coefficient:
        lines.append(f"Entropy bonus with coefficient {objective.entropy_coefficient:g}.")
    regularization = config.gradient_regularization
    if regularization.enabled:
        lines.append(f"Gradient regularization of strength {regularization.strength}.")
    lines.append(f"Completions that are cut at the limit of tokens {_TRUNCATED[objective.truncated]}.")
    if training.dynamic_sampling.max_resamples:
        lines.append(
            "Dynamic sampling: groups whose rewards are all equal are replaced, in at most "
            f"{training.dynamic_sampling.max_resamples} further rounds a step."
        )
    lines.append(
        f"A step: {rollout.prompts_per_step} prompts with {rollout.group_size} completions each of at most "
        f"{rollout.max_new_tokens} tokens, at temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k "
        f"{rollout.top_k}; epochs {training.epochs_per_rollout}, minibatches {training.minibatches}."
    )
    lines.append(_optimizer(config.optimizer))
    if config.curriculum is not None:
        lines.append(f"A first task (`{config.curriculum.task.type}`) for at most {config.curriculum.steps} steps.")
    return lines


def describe_sft(config: RunConfig) -> list[str]:
    """The sentences about SFT on the task's rationales."""
    section = config.sft
    return [
        f"At most {section.steps} steps on {section.batch_size} rationales of the task each, loss on answers only "
        f"(`{section.normalization}`).",
        _optimizer(section.optimizer),
    ]


def describe_reward_model(config: RunConfig) -> list[str]:
    """The sentences about the training of a reward model on preference pairs."""
    section = config.reward_model
    margin = f", with a margin of {section.margin:g}" if section.margin else ""
    center = f", scores kept around zero with coefficient {section.center:g}" if section.center else ""
    return [
        f"Bradley-Terry loss on pairs of a chosen and a rejected answer{margin}{center}.",
        f"{section.steps} steps of {section.batch_size} pairs.",
        _optimizer(section.optimizer),
    ]


def _advantage(advantage: AdvantageConfig) -> str:
    if advantage.function is not None:
        return _own(advantage.function, advantage.arguments)
    return f"{_BASELINES[advantage.baseline]}{_SCALES[advantage.scale]}"


def _own(reference: str, arguments: Mapping[str, Any]) -> str:
    """A function of the user's by its name, with its arguments; places on this machine are left out."""
    given = "".join(f", {name}={value}" for name, value in without_local_paths(arguments, ()).items())
    return f"a function of the user's own, `{reference.rpartition(':')[2]}`{given}"


def _loss(config: RunConfig) -> str:
    objective = config.objective
    if is_reference(objective.loss):
        return f"{_own(objective.loss, objective.arguments)}, with the {objective.ratio}-level importance ratio"
    clip = f"clipped {objective.clip_low:g} below and {objective.clip_high:g} above 1"
    words = {
        "clipped_surrogate": f"the {objective.ratio}-level importance ratio, {clip}, times the advantage",
        "unclipped_surrogate": f"the {objective.ratio}-level importance ratio times the advantage, without a clip",
        "policy_gradient": "the log-probability times the advantage",
        "truncated_policy_gradient": f"the log-probability times the advantage and the {objective.ratio}-level "
        f"importance ratio, which is detached and at most {objective.cap:g}",
    }[objective.loss]
    dual = f", dual clip {objective.dual_clip:g}" if objective.dual_clip is not None else ""
    return f"{words}{dual} (`{objective.loss}`)"


def _kl(config: RunConfig) -> str:
    kl = config.kl
    if not kl.coefficient:
        return "No KL penalty."
    coefficient = f"coefficient {kl.coefficient:g}, estimator `{kl.estimator}`"
    return f"KL penalty to the reference in the {kl.placement}, {coefficient}."


def _optimizer(optimizer: OptimizerConfig) -> str:
    clip = f", gradients clipped to norm {optimizer.max_grad_norm:g}" if optimizer.max_grad_norm is not None else ""
    return (
        f"Optimizer `{optimizer.name}`, learning rate {optimizer.learning_rate:g}, schedule `{optimizer.schedule}`, "
        f"{optimizer.warmup_steps} warm-up steps, weight decay {optimizer.weight_decay:g}{clip}."
    )
