"""The models of a run: its policy, the caller's, the recipe's or a new one, and its reference; checks and notices."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.gradreg.regularizer import GradientRegularizer
from flatpeak.pipeline.request import CallerObjects
from flatpeak.pipeline.rollout_engines import configure_policy
from flatpeak.pipeline.run_start import ResumePoint
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import check_source, load_policy, restore_weights, resumed_source
from flatpeak.policy.model import Policy
from flatpeak.policy.precision import check_trainable, slow_dtype_notices
from flatpeak.policy.reference import check_reference, snapshot
from flatpeak.protocols import Progress, Task
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.randomness import derive_seed
from flatpeak.runs.checkpoints import broken_file, checkpoint_name
from flatpeak.runs.directory import RunPaths
from flatpeak.tasks.prompts import prompt_texts
from flatpeak.types import Example
from flatpeak.utils.adapter_base import check_base
from flatpeak.utils.adapters import check_own_adapters
from flatpeak.utils.host_memory import offload_notices


def check_model(config: RunConfig, objects: CallerObjects, *, checkpoint: Path | None) -> None:
    """UserError where a recipe names no model, or none that is there, and neither caller nor checkpoint has one."""
    if objects.model is None and checkpoint is None:
        check_source(config.model)


def open_policy(
    config: RunConfig, objects: CallerObjects, examples: Sequence[Example], *, checkpoint: Path | None
) -> Policy:
    """The caller's model, the one a recipe names, or a new one, whose tokenizer is made of `examples`."""
    if objects.model is not None:
        if objects.tokenizer is None or isinstance(objects.tokenizer, str):
            raise UserError(
                "a model that is an object needs tokenizer=... too, such as AutoTokenizer.from_pretrained(...)"
            )
        check_own_adapters(objects.model)
        if checkpoint is not None:
            check_base(objects.model, checkpoint, where=str(checkpoint))
            restore_weights(objects.model, checkpoint)
        return Policy(objects.model, objects.tokenizer, dropout=config.model.dropout)
    model = config.model
    if checkpoint is not None:
        model = resumed_source(model, checkpoint)
    texts: list[str] = []
    if model.new is not None:
        texts = [*prompt_texts(examples, config.prompt), *(e.rationale for e in examples if e.rationale)]
        texts += [string.printable] if config.acts else []  # answers are spelled too
    return load_policy(model, texts=texts, seed=derive_seed(config.run.seed, "weights"))


def named_reference(config: RunConfig, policy: Policy) -> Policy | None:
    """The model that `reference.model` names, if it names one."""
    path = config.reference.model
    if path is None:
        return None
    try:
        reference = load_policy(
            ModelConfig(
                path=path,
                device=config.model.device,
                dtype=config.model.dtype,
                trust_remote_code=config.model.trust_remote_code,
            )
        )
    except UserError as error:
        raise UserError(f"reference.model: {error}") from error
    reference.model.requires_grad_(False)
    configure_policy(reference, config)
    check_reference(policy, reference)
    if config.reference.offload:
        reference.offload()
    return reference


def keeps_own_reference(config: RunConfig) -> bool:
    """Whether the reference is the policy as RL began, and anything uses it."""
    used = config.kl.coefficient > 0 or config.reference.keep or config.reference.moves
    return bool(used) and config.reference.model is None


def own_reference(config: RunConfig, policy: Policy, *, start: Path | None) -> Policy | None:
    """The policy as RL began, if anything uses it.

    `start` is the checkpoint RL began from when a run is resumed; None takes the policy as it is now.
    """
    if not keeps_own_reference(config):
        return None
    reference = snapshot(policy)
    if start is not None:
        restore_weights(reference.model, start)
    if config.reference.offload:
        reference.offload()
    return reference


def reference_checkpoint(config: RunConfig, point: ResumePoint) -> Path | None:
    """The checkpoint that a resumed run measures KL against: step 0 of RL, unless the reference has moved since.

    UserError where it is missing or damaged.
    """
    if point.train is None or not keeps_own_reference(config) or point.train.state["stage"]["resets"]:
        return None
    start = RunPaths(Path(config.run.directory) / config.run.name).checkpoints / checkpoint_name(0)
    broken = broken_file(start)
    if broken is not None:
        problem = f"{start / broken.name}: {broken.problem}" if start.is_dir() else f"{start} is missing"
        raise UserError(
            f"{problem}; KL is measured against this checkpoint: put it back from a copy of the run, or start a new run"
        )
    return start


def announce_recipe(config: RunConfig, policy: Policy, task: Task, progress: Progress) -> None:
    """Check that the recipe can train this policy, and give the notices of task and recipe."""
    check_policy(config, policy)
    if not config.distributed.divides_model:  # else its copies of the weights are made of shards
        check_regularization(config, policy)
    for notice in (*getattr(task, "notices", ()), *recipe_notices(config, policy)):
        progress.notice(notice)


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


def check_regularization(config: RunConfig, policy: Policy) -> None:
    """UserError where there is nothing to perturb, or rounding would swallow the perturbation."""
    section = config.gradient_regularization
    if section.enabled:  # weights are their masters yet, rounded
        regularizer = GradientRegularizer(policy.model, section, compute_dtype=policy.compute_dtype)
        regularizer.guard.probe(regularizer.perturbation, section)


def recipe_notices(config: RunConfig, policy: Policy) -> list[str]:
    """Notices of choices in a recipe that are valid and easily misread."""
    notices = slow_dtype_notices(policy.model)
    if policy.notice:
        notices.append(f"native engine not used: {policy.notice}; rollouts use generate, training pads")
    if config.rollout.sampling().filtered and isinstance(config.rollout.engine, VLLMConfig):
        notices.append(
            "with rollout.top_p, top_k, min_p or min_new_tokens servers draw from fewer tokens than all and do not "
            "tell which: the ratio is that of all tokens, and approximate"
        )
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
