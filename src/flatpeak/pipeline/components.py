"""The rewards and samplers of a run, built from the recipe or the caller's own, and checks that components fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from flatpeak.config.run_config import RunConfig
from flatpeak.config.unused_settings import explicit_settings
from flatpeak.errors import UserError
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.gradreg.regularizer import GradientRegularizer
from flatpeak.kernels.decode_attention import kernel_notices
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.kernel_verdicts import remembered
from flatpeak.policy.model import Policy
from flatpeak.policy.precision import check_trainable, slow_dtype_notices
from flatpeak.protocols import Progress, Sampler
from flatpeak.rewards.config import RewardConfig
from flatpeak.rewards.reward_set import RewardSet, as_reward, build_reward
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.hf_generate import GenerateEngine
from flatpeak.rollout.vllm.sampler import VLLMSampler
from flatpeak.types import Group, Prompt, SamplingParams
from flatpeak.utils.host_memory import offload_notices

REWARD_CHECK_EXAMPLES = 16
"""The number of examples that rewards may check themselves on."""
GREEDY_METRICS = ("accuracy", "reward", "length", "truncated", "accuracy/not_near_train")
SAMPLED_METRICS = ("reward", "accuracy", "length", "truncated")
VERDICT_METRICS = ("accuracy", "pass@", "maj@")
"""Metrics that need a component that says right or wrong; no reward component may be called accuracy."""


def open_workers(config: RunConfig) -> WorkerPool | None:
    """The pool of grading processes, each started when there is something to grade; None where the recipe has none."""
    size, memory = config.run.grading_workers, config.run.grading_memory
    if size == 0:
        return None
    return WorkerPool(
        2 if size is None else size,
        timeout=config.run.grading_timeout,
        memory_bytes=None if memory is None else int(memory * 2**30),
    )


def main_reward(config: RunConfig, callers_own: Any, *, workers: WorkerPool | None, progress: Progress) -> RewardSet:
    """The recipe's rewards, or the caller's own; UserError where they do not fit the evaluation."""
    if callers_own is None:
        reward = _build(config, config.rewards, workers=workers, progress=progress)
    else:
        rules = config.run.grading_workers is not None
        reward = as_reward(
            callers_own,
            name=config.evaluation.accuracy_part,
            workers=workers,
            rules=rules,
            budget=config.run.grading_budget,
            notice=progress.notice,
        )
    if not reward.weights:  # a caller's own: the names of its components come with its scores
        return reward
    check_accuracy(config.evaluation, reward)
    check_metric(config.evaluation, reward)
    return reward


def first_reward(config: RunConfig, *, workers: WorkerPool | None, progress: Progress) -> RewardSet | None:
    """The rewards of the curriculum's first task, where it has its own."""
    if config.curriculum is None or config.curriculum.rewards is None:
        return None
    reward = _build(config, config.curriculum.rewards, workers=workers, progress=progress)
    check_accuracy(config.evaluation, reward)
    return reward


def _build(
    config: RunConfig, rewards: Mapping[str, RewardConfig], *, workers: WorkerPool | None, progress: Progress
) -> RewardSet:
    rules = config.run.grading_workers is not None
    return build_reward(rewards, workers=workers, rules=rules, budget=config.run.grading_budget, notice=progress.notice)


def prepare_reward(reward: RewardSet, prompts: Sequence[Prompt]) -> None:
    """Let rewards that can check themselves do so, on the first examples: UserError where one is unfit."""
    reward.prepare([prompt.example for prompt in prompts[:REWARD_CHECK_EXAMPLES]])


def build_sampler(policy: Policy, config: RunConfig, *, trains: bool = True) -> Sampler:
    """The recipe's servers, else the native engine or `generate`; `trains`: whether log-probabilities are needed."""
    configure_policy(policy, config)
    engine = config.rollout.engine
    if isinstance(engine, VLLMConfig):
        policy.kernels.idle = True
        return served_sampler(policy, config, trains=trains)
    if engine == "native" and not policy.native:
        raise UserError(f"rollout.engine=native: {policy.notice}; use rollout.engine=auto or generate")
    if engine == "generate" or not policy.native:
        return PlainSampler(policy, max_rows=config.rollout.max_rows)
    return NativeEngine(policy, max_rows=config.rollout.max_rows)


def served_sampler(policy: Policy, config: RunConfig, *, trains: bool = True) -> VLLMSampler:
    """The sampler over the recipe's servers; UserError where one is not there, or cannot sample for this policy."""
    assert isinstance(config.rollout.engine, VLLMConfig)
    if config.model.quantization is not None:
        raise UserError(
            f"model.quantization={config.model.quantization} with rollout.engine.type=vllm: servers would sample from "
            "the base as it was before; leave model.quantization out, or use rollout.engine=auto"
        )
    if policy.adapted:
        _check_served_adapter(policy.model.active_peft_config)
    sampling = config.rollout.sampling() if trains else SamplingParams()
    return VLLMSampler(policy, config.rollout.engine, sampling=sampling)


def _check_served_adapter(adapter: Any) -> None:
    """UserError for an adapter that vLLM does not load as it is."""
    for name in ("rank_pattern", "alpha_pattern"):
        if getattr(adapter, name, None):
            raise UserError(
                f"the adapter of model.lora.adapter has a {name}, which vLLM ignores, so that it would scale those "
                "layers otherwise: use another adapter, or rollout.engine=auto"
            )
    for name, value in (("dora", adapter.use_dora), ("modules_to_save", adapter.modules_to_save)):
        if value:
            raise UserError(
                f"model.lora.{name} with rollout.engine.type=vllm: vLLM loads low-rank matrices alone; leave "
                f"model.lora.{name} out, or use rollout.engine=auto"
            )


def configure_policy(policy: Policy, config: RunConfig) -> None:
    """Let a policy decode and train as the recipe says; UserError where it cannot."""
    policy.batch_invariant = config.rollout.batch_invariant
    policy.kernels.choose(config.rollout.kernels, unserved=policy.notice)


class PlainSampler(Sampler):
    """transformers' `generate` on a policy, under the model's own attention."""

    decoder = "generate"

    def __init__(self, policy: Policy, *, max_rows: int) -> None:
        self.policy = policy
        self.engine = GenerateEngine(
            policy.model, policy.tokenizer, eos_token_ids=policy.eos_token_ids, max_rows=max_rows
        )

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order."""
        with self.policy.plain_attention():
            return self.engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)


def announce_decoding(policy: Policy, prompts: Sequence[Prompt], progress: Progress, *, max_new_tokens: int) -> None:
    """Try the native engine on prompts, with notices where the batch decides bits or a kernel is not the fastest."""
    if not policy.native:
        return
    engine, tried = NativeEngine(policy), prompts[:3]
    trial = partial(batch_invariant, engine, tried, max_new_tokens=min(16, max_new_tokens))
    facts = policy.decoded_with, policy.batch_invariant, [len(each.token_ids) for each in tried], trial.keywords
    invariant = remembered(f"invariance {facts}", policy, trial)
    if policy.batch_invariant and not invariant:
        progress.notice(
            "on this machine a completion's log-probabilities depend on the batch in their last bits, so a token may "
            "rarely differ with other batch settings"
        )
    for reason in (*engine.notices, *kernel_notices()):
        progress.notice(reason)


def batch_invariant(
    engine: NativeEngine, prompts: Sequence[Prompt], *, group_size: int = 4, max_new_tokens: int = 16, seed: int = 0
) -> bool:
    """Whether prompts decoded alone and together give the same tokens and bitwise the same log-probs.

    True is evidence and not proof: a matrix product may round differently at a shape that was not tried. Each prompt is
    sampled alone (one row), as a group alone, and among all of them; give prompts of different lengths.
    """
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
        together = engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
        for prompt, group in zip(prompts, together, strict=True):
            for size in (1, group_size):
                (alone,) = engine.generate([prompt], group_size=size, sampling=sampling, seed=seed)
                if alone.completions != group.completions[:size]:
                    return False
    return True


def check_accuracy(config: EvaluationConfig, reward: RewardSet) -> None:
    """UserError where `evaluation.accuracy` is none of the rewards."""
    name = config.accuracy_part
    if name is not None and name not in reward.weights:
        raise UserError(
            f"evaluation.accuracy={name} names no reward: choose one of {', '.join(reward.weights)}, or null where "
            "none says right or wrong"
        )


def check_metric(config: EvaluationConfig, reward: RewardSet) -> None:
    """UserError where no evaluation has `evaluation.metric`."""
    known = [*GREEDY_METRICS, *reward.weights] if config.greedy else []
    if config.samples:
        known += [f"sampled/{name}" for name in (*SAMPLED_METRICS, *reward.weights)]
        known += [f"{name}@{k}" for k in config.k for name in ("pass", "maj")]
    if config.accuracy is None:
        known = [name for name in known if not name.removeprefix("sampled/").startswith(VERDICT_METRICS)]
    if config.metric not in known:
        hint = "" if config.samples else " (pass@k and maj@k need evaluation.samples)"
        raise UserError(f"evaluation.metric={config.metric}: choose one of {', '.join(known)}{hint}")


def check_policy(config: RunConfig, policy: Policy) -> None:
    """UserError where nothing can be trained, or held-out completions cannot fit into the context."""
    check_trainable(policy.parameters())
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


def check_sft_split(check_size: int, train: Sequence[Prompt]) -> None:
    """UserError where the SFT check would take every training row."""
    if check_size and check_size >= len(train):
        raise UserError(
            f"sft.check_size={check_size} sets all {len(train)} training rows aside for sft.stop_at: "
            "lower sft.check_size"
        )


def check_regularization(config: RunConfig, policy: Policy) -> None:
    """UserError where there is nothing to perturb, or rounding would swallow the perturbation."""
    section = config.gradient_regularization
    if section.enabled:  # weights are their masters yet, rounded
        regularizer = GradientRegularizer(policy.model, section, compute_dtype=policy.compute_dtype)
        regularizer.guard.probe(regularizer.perturbation, section)


def without_model_source(config: RunConfig, *, own: Mapping[str, Any], named: str) -> tuple[RunConfig, list[str]]:
    """The configuration for a caller's own model, which names no other, and the notices of what it leaves out.

    A model that `own`, the part of the recipe that was written for this call, names beside it is a UserError. One that
    comes from a shared recipe (called `named`), given by its name, resolved before or extended, is left out.
    """
    settings = list(explicit_settings(config.model, *(name for name in ModelConfig.model_fields if name != "dropout")))
    if not settings:
        return config, []
    section = own.get("model", {})
    contradicted = [name for name in settings if not isinstance(section, Mapping) or name in section]
    keys = ", ".join(f"model.{name}" for name in contradicted or settings)
    if contradicted:
        raise UserError(f"{keys} beside train(model=...), which brings the model: leave {keys} out of the recipe")
    without = config.model_copy(update={"model": ModelConfig(dropout=config.model.dropout)})
    return without, [f"{keys} of {named} not used: train(model=...) brings the model"]


def notice_of_overlong_demonstrations(dropped: int, *, left: int, context: int | None) -> str:
    """The notice of demonstrations that exceed the context; UserError where all do."""
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


def recipe_notices(config: RunConfig, policy: Policy) -> list[str]:
    """Notices of choices in a recipe that are valid and easily misread."""
    notices = slow_dtype_notices(policy.model)
    if policy.notice:
        notices.append(f"native engine not used: {policy.notice}; rollouts use generate, training pads")
    if config.rollout.sampling().filtered:
        notices.append(
            "rollout.top_p/top_k draw from a filtered distribution while the ratio is that of the full one: the "
            "importance ratio is approximate"
        )
    if config.rollout.min_new_tokens:
        notices.append("rollout.min_new_tokens forbids early ends that the policy would draw: the ratio is approximate")
    if config.rollout.staleness and policy.below_float32 and not config.objective.sampler_correction.enabled:
        notices.append(
            "rollout.staleness=1 below float32: the previous policy's completions count as the present one's without "
            "objective.sampler_correction"
        )
    notices += offload_notices(
        {
            "optimizer.offload": config.optimizer.offload,
            "sft.optimizer.offload": config.sft.optimizer.offload and bool(config.sft.steps),
            "reference.offload": config.reference.offload,
        },
        policy.device,
    )
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
