"""`flatpeak.train` and `flatpeak.sft`: a recipe in, a run directory and a result out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from flatpeak.config.algorithm_name import algorithm_name
from flatpeak.config.load import Settings, apply_settings
from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.ranks import open_ranks
from flatpeak.distributed.shared_rollouts import checked_sampler_state
from flatpeak.errors import UserError
from flatpeak.pipeline.build import Components, build_components
from flatpeak.pipeline.components import announce_decoding, without_model_source
from flatpeak.pipeline.lifecycle import (
    RecipeSource,
    RunRequest,
    RunResult,
    open_run,
    resolve_config,
)
from flatpeak.pipeline.progress import first_line, model_line
from flatpeak.pipeline.prompt_record import make_prompt_record
from flatpeak.pipeline.resume_point import ResumePoint, restore_trainer
from flatpeak.pipeline.samplers import SamplerFactory
from flatpeak.pipeline.shared_components import share_components
from flatpeak.pipeline.user_objects import CallerObjects, code_digests
from flatpeak.policy.loading import restore_weights
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import training_layers
from flatpeak.policy.native_decoding import TORCH
from flatpeak.policy.reference import snapshot
from flatpeak.protocols import Progress, SamplerLike, Task
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.randomness import derive_seed
from flatpeak.runs.checkpoints import CheckpointState, broken_file, checkpoint_name
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.notices import RecordedProgress
from flatpeak.training.diagnostics import ZeroAdvantageMonitor
from flatpeak.training.recorder import SAMPLER_STATE, Recorder
from flatpeak.training.regularized import build_learner
from flatpeak.training.sft import SFTTrainer
from flatpeak.training.trainer import Trainer, TrainerConfig
from flatpeak.utils.environment import without_collection
from flatpeak.utils.gguf import SUFFIX, cache_directory

StageName = Literal["sft", "train"]


def train(
    config: RecipeSource,
    *,
    model: Any = None,
    tokenizer: Any = None,
    task: Task | None = None,
    reward: Any = None,
    sampler: SamplerLike | SamplerFactory | None = None,
    loss: Any = None,
    advantage: Any = None,
    settings: Settings | None = None,
    progress: Progress | bool | None = None,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
) -> RunResult:
    """Run a recipe: SFT where it asks for it, then reinforcement learning.

    `config` is a RunConfig, the mapping of a recipe (which may have `extends`), or a recipe's path or name; `settings`
    change it: a mapping such as `{"training.steps": 50}`, or `key.path=value` strings. Any of model (with its
    tokenizer), task, reward and sampler may be the caller's own object; a sampler that uses the model that is trained
    is given as a factory, which is called with the policy. So may loss, a function (logprobs_T, ratio_T, advantages_T,
    config) -> loss_T or a functional.PolicyLoss, and advantage, (rewards_PG, valid_PG) -> advantages_PG. `progress`
    shows the run: None is an occasional line on stderr, False is silence, else an object like `protocols.Progress`.
    Raises UserError for bad input, before a run directory is made; a run name that exists needs `resume` or
    `overwrite`.
    """
    objects = CallerObjects(
        model=model, tokenizer=tokenizer, task=task, reward=reward, sampler=sampler, loss=loss, advantage=advantage
    )
    request = RunRequest(
        recipe=config, settings=settings, progress=progress, resume=resume, overwrite=overwrite, command=command
    )
    return run_stages(request, objects, stages=("sft", "train"))


def sft(
    config: RecipeSource,
    *,
    model: Any = None,
    tokenizer: Any = None,
    task: Task | None = None,
    reward: Any = None,
    sampler: SamplerLike | SamplerFactory | None = None,
    loss: Any = None,
    advantage: Any = None,
    settings: Settings | None = None,
    progress: Progress | bool | None = None,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
) -> RunResult:
    """Run only the SFT stage of a recipe, with the arguments of `train`; UserError where it has no SFT steps."""
    objects = CallerObjects(
        model=model, tokenizer=tokenizer, task=task, reward=reward, sampler=sampler, loss=loss, advantage=advantage
    )
    request = RunRequest(
        recipe=config, settings=settings, progress=progress, resume=resume, overwrite=overwrite, command=command
    )
    return run_stages(request, objects, stages=("sft",))


def run_stages(request: RunRequest, objects: CallerObjects, *, stages: Sequence[StageName]) -> RunResult:
    """Run these stages, SFT before RL, each from where it was left; SFT only where the recipe has steps for it."""
    config = resolve_config(request.recipe, objects.named_in(request.settings))
    if "train" not in stages and not config.sft.steps:
        raise UserError("sft.steps=0: there is nothing to train; set sft.steps to how many steps SFT should take")
    config, notices = _without_source(config, objects, request)
    with (
        open_ranks(config.distributed) as ranks,
        open_run(request, config, metric=config.evaluation.metric, notices=notices, ranks=ranks) as run,
    ):
        run.progress.say(first_line(config, model=objects.model, task=objects.task))
        point = run.resume_point
        with ranks.together(), without_collection():
            reference_checkpoint = _reference_checkpoint(config, point)
            _announce_conversion(config, run.progress)
            components = run.resources.enter_context(
                closing(build_components(config, objects, checkpoint=point.model, progress=run.progress, ranks=ranks))
            )
        run.progress.say(model_line(components.policy.model, data=_data_line(config, components, stages)))
        _check_kernels(config, components, run.progress)
        point.announce_engine(components.policy, run.progress)
        decoder = components.sampler.decoder or components.policy.decoded_with or TORCH
        components = share_components(components, config, objects, ranks)
        training = config.training
        run.resources.enter_context(
            training_layers(
                components.policy.causal, recompute=training.activation_checkpointing, compiled=training.compile
            )
        )
        recorder = run.start(
            components.stoppable_evaluator(lambda: run.stop.signal is not None),
            config.evaluation,
            record=make_prompt_record(config, task=components.task, objects=objects.names),
            zero_advantages=_zero_advantages(config, components, run.progress),
            # Rewards check themselves once the run's name is taken, since a judge is paid.
            prepare=components.prepare,
            decoder=decoder,
            code=code_digests(config, objects),
        )
        components.attach(run.directory.path, run.stop)
        with run.training():
            if point.newest is not None:
                state = point.newest.state["stage"][SAMPLER_STATE]
                components.sampler.load(checked_sampler_state(state, ranks))
            if "sft" in stages and config.sft.steps and point.train is None and not point.sft_finished:
                run_sft(config, components, recorder, point.sft)
            if "train" in stages and not recorder.stopped:
                run_rl(config, components, recorder, point.train, reference_checkpoint)
    return run.result


def _data_line(config: RunConfig, components: Components, stages: Sequence[StageName]) -> str:
    """The numbers of questions, and the names of the stages."""
    train = sum(len(phase.prompts.items) for phase in components.phases)
    names = {"sft": "SFT" if config.sft.steps else "", "train": algorithm_name(config)}
    trained_by = ", then ".join(names[stage] for stage in stages if names[stage])
    return f"{train:,} questions to train on, {len(components.test):,} held out · {trained_by}"


def _announce_conversion(config: RunConfig, progress: RecordedProgress) -> None:
    """Say that a GGUF file is converted, where the cache does not have it."""
    file = Path(config.model.path or "").expanduser()
    if file.is_file() and file.suffix == SUFFIX and not cache_directory(file).is_dir():
        progress.say(f"converting {file.name} to float32, once")


def _check_kernels(config: RunConfig, components: Components, progress: RecordedProgress) -> None:
    """Compare native kernels with torch and single rollouts with batches, with a notice where they differ."""
    policy = components.policy
    if policy.native:
        progress.say("checking kernels and rollouts on this model")
    if not isinstance(config.rollout.engine, VLLMConfig):
        announce_decoding(policy, components.test, progress, max_new_tokens=config.rollout.max_new_tokens)
    if policy.native:
        policy.kernels.trains(policy)
    for reason in policy.kernels.notices:
        progress.notice(reason)


def run_sft(config: RunConfig, components: Components, recorder: Recorder, checkpoint: CheckpointState | None) -> None:
    """Fine-tune the policy on demonstrations; the optimizer's memory is freed at the end."""
    trainer = SFTTrainer(
        components.policy,
        components.demonstrations,
        config=config.sft,
        micro_batch_tokens=config.training.micro_batch_tokens,
        max_skipped_updates=config.training.max_skipped_updates,
        check=components.sft_check,
        sampler=components.sampler,
        recorder=recorder,
    )
    trainer.train(first_step=restore_trainer(trainer, checkpoint))


def run_rl(
    config: RunConfig,
    components: Components,
    recorder: Recorder,
    checkpoint: CheckpointState | None,
    reference_checkpoint: Path | None,
) -> None:
    """Train the policy by reinforcement learning."""
    learner = build_learner(
        components.policy,
        components.algorithm.objective,
        config.optimizer,
        config.gradient_regularization,
        temperature=config.rollout.temperature,
        micro_batch_tokens=config.training.micro_batch_tokens,
        notice=recorder.progress.notice,
        seed=derive_seed(config.run.seed, "gradient_regularization"),
        ranks=recorder.ranks,
    )
    trainer = Trainer(
        learner,
        advantages=components.algorithm.advantages,
        sampler=components.sampler,
        phases=components.phases,
        reference=components.take_reference() or own_reference(config, components.policy, start=reference_checkpoint),
        config=TrainerConfig(
            seed=derive_seed(config.run.seed, "train"),
            rollout=config.rollout,
            training=config.training,
            reference=config.reference,
        ),
        recorder=recorder,
    )
    trainer.train(first_step=restore_trainer(trainer, checkpoint))


def keeps_own_reference(config: RunConfig) -> bool:
    """Whether the reference is the policy as RL began, and anything uses it."""
    used = config.kl.coefficient > 0 or config.reference.keep or config.reference.resets
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


def _reference_checkpoint(config: RunConfig, point: ResumePoint) -> Path | None:
    """The checkpoint that a resumed run measures KL against: step 0 of RL, unless the reference was reset since.

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


def _zero_advantages(config: RunConfig, components: Components, progress: Progress) -> ZeroAdvantageMonitor:
    return ZeroAdvantageMonitor(
        progress.notice,
        limit=config.rollout.max_new_tokens,
        other_terms=components.algorithm.objective.needs_all_tokens,
        unanswered=components.unanswered(config.evaluation.accuracy_part),
    )


def _without_source(config: RunConfig, objects: CallerObjects, request: RunRequest) -> tuple[RunConfig, list[str]]:
    """The configuration for a caller's own model, if there is one, and the notices of settings that it replaces."""
    if objects.model is None:
        return config, []
    written_here = apply_settings(request.recipe if isinstance(request.recipe, Mapping) else {}, request.settings or ())
    name = str(request.recipe) if isinstance(request.recipe, str | Path) else "the recipe"
    return without_model_source(config, own=written_here, named=name)
