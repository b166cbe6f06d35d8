"""`flatpeak.train` and `flatpeak.sft`: a recipe in, a run directory and a result out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatpeak.config.load import Settings, apply_settings, parse_config, read_recipe
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.pipeline.build import Given, Parts, assemble, own_reference
from flatpeak.pipeline.checks import without_source
from flatpeak.pipeline.components import SamplerFactory, announce_decoding
from flatpeak.pipeline.lifecycle import Saved, conduct, read_saved
from flatpeak.pipeline.progress import as_progress
from flatpeak.policy.layers import training_layers
from flatpeak.protocols import Progress, ResumableSampler, Sampler, Task
from flatpeak.report.page import write_report
from flatpeak.rollout.randomness import derive_seed
from flatpeak.runs.checkpoints import CheckpointState
from flatpeak.runs.directory import RunDirectory, RunPaths, check_start
from flatpeak.runs.notices import START, NoticeLog, RecordedProgress
from flatpeak.runs.signals import StopSignals
from flatpeak.runs.summary import RunSummary
from flatpeak.training.diagnostics import ZeroAdvantageMonitor
from flatpeak.training.objective import Objective
from flatpeak.training.recorder import Recorder
from flatpeak.training.regularized import build_learner
from flatpeak.training.sft import SFTTrainer
from flatpeak.training.state import SAMPLER_STATE, History
from flatpeak.training.trainer import Trainer, TrainerConfig
from flatpeak.utils.huggingface import no_progress_bar

Recipe = RunConfig | Mapping[str, Any] | str | Path
"""A checked recipe, the mapping of one, or the path or name of one."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run left behind."""

    path: Path
    """The run directory."""
    summary: RunSummary
    """What summary.json says."""
    report: Path
    """The report page."""
    exit_code: int
    """0 when done; 130 or 143 when a signal stopped it, with a valid checkpoint left."""

    @property
    def best(self) -> Path:
        """The best checkpoint, which `from_pretrained` loads; after SFT alone its last one."""
        best = self.path / "checkpoints" / "best"
        return best if best.exists() else self.path / "checkpoints" / "sft" / "last"


def train(
    config: Recipe,
    *,
    model: Any = None,
    tokenizer: Any = None,
    task: Task | None = None,
    reward: Any = None,
    sampler: Sampler | SamplerFactory | None = None,
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
    is given as a factory, which is called with the policy. `progress` shows the run: None is an occasional line on
    stderr, False is silence, else an object like `protocols.Progress`. Raises UserError for bad input, before a run
    directory is made; a run name that exists needs `resume` or `overwrite`.
    """
    given = Given(model=model, tokenizer=tokenizer, task=task, reward=reward, sampler=sampler)
    start = _Start(config=config, settings=settings, resume=resume, overwrite=overwrite, command=command)
    return _run(start, given, progress=progress, with_training=True)


def sft(
    config: Recipe,
    *,
    model: Any = None,
    tokenizer: Any = None,
    task: Task | None = None,
    reward: Any = None,
    sampler: Sampler | SamplerFactory | None = None,
    settings: Settings | None = None,
    progress: Progress | bool | None = None,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
) -> RunResult:
    """Only the SFT stage of a recipe; the arguments of `train`. Raises UserError where the recipe has no SFT steps."""
    given = Given(model=model, tokenizer=tokenizer, task=task, reward=reward, sampler=sampler)
    start = _Start(config=config, settings=settings, resume=resume, overwrite=overwrite, command=command)
    return _run(start, given, progress=progress, with_training=False)


@dataclass(frozen=True, kw_only=True)
class _Start:
    """How the caller asks for a run."""

    config: Recipe
    settings: Settings | None
    resume: bool
    overwrite: bool
    command: Sequence[str] | None

    @property
    def own(self) -> dict[str, Any]:
        """The part of the recipe that was written for this call."""
        return apply_settings(self.config if isinstance(self.config, Mapping) else {}, self.settings or ())

    @property
    def named(self) -> str:
        """What the recipe is called in a notice."""
        return str(self.config) if isinstance(self.config, str | Path) else "the recipe"


def _run(start: _Start, given: Given, *, progress: Progress | bool | None, with_training: bool) -> RunResult:
    recipe = as_config(start.config, start.settings)
    if not with_training and not recipe.sft.steps:
        raise UserError("sft.steps=0: there is nothing to train; set sft.steps to how many steps SFT should take")
    with open_notices(progress, metric=recipe.evaluation.metric) as (shown, notices):
        if given.model is not None:
            recipe = without_source(recipe, own=start.own, named=start.named, progress=shown)
        resolved, chosen = recipe.model_dump(mode="json"), recipe.model_dump(mode="json", exclude_defaults=True)
        check_start(recipe.run, resolved, resume=start.resume, overwrite=start.overwrite, chosen=chosen)
        if recipe.run.threads:
            torch.set_num_threads(recipe.run.threads)
        saved = read_saved(recipe, shown) if start.resume else Saved()
        with closing(assemble(recipe, given, checkpoint=saved.checkpoint, progress=shown)) as parts:
            announce_decoding(parts.policy, parts.test, shown, max_new_tokens=recipe.rollout.max_new_tokens)
            saved.announce(parts.policy, shown)
            with (
                training_layers(
                    parts.policy.causal,
                    recompute=recipe.training.activation_checkpointing,
                    compiled=recipe.training.compile,
                ),
                # Rewards check themselves once the run's name is ours, since a judge is paid.
                RunDirectory.create(
                    recipe.run,
                    resolved,
                    resume=start.resume,
                    overwrite=start.overwrite,
                    command=start.command,
                    chosen=chosen,
                    before=parts.prepare,
                ) as run,
                StopSignals() as stop,
            ):
                recorder = _recorder(recipe, parts, run, stop, shown, notices, saved)
                parts.attach(run.path, stop)
                summary = conduct(
                    recorder, lambda: _stages(recipe, parts, recorder, saved, with_training=with_training)
                )
        return RunResult(path=run.path, summary=summary, report=report_on(run, shown), exit_code=stop.exit_code)


@contextmanager
def open_notices(progress: Progress | bool | None, *, metric: str) -> Iterator[tuple[Progress, NoticeLog]]:
    """What shows a run, and the log that keeps its notices once the run's directory is there."""
    watching = as_progress(progress, metric=metric)
    bars = no_progress_bar() if progress is False else nullcontext()
    with bars, closing(NoticeLog(failed=watching.notice)) as log:
        yield RecordedProgress(watching, log), log


def report_on(run: RunPaths, progress: Progress) -> Path:
    """Write the report page; where that fails, the run is done all the same."""
    try:
        return write_report(run.path)
    except Exception as error:  # a full disk, or a plot that fails
        progress.notice(f"{run.report} not written ({error}): write it with flatpeak report {run.path}")
        return run.report


def _stages(config: RunConfig, parts: Parts, recorder: Recorder, saved: Saved, *, with_training: bool) -> None:
    """SFT, then RL, each from where it was left. What a stage needed is freed at its end."""
    if saved.newest is not None and isinstance(parts.sampler, ResumableSampler):
        parts.sampler.load(saved.newest.state["stage"].get(SAMPLER_STATE, {}))
    if config.sft.steps and saved.train is None and not saved.sft_finished:
        _imitate(config, parts, recorder, saved.sft)
    if with_training and not recorder.stopped:
        _reinforce(config, parts, recorder, saved)


def _imitate(config: RunConfig, parts: Parts, recorder: Recorder, saved: CheckpointState | None) -> None:
    trainer = SFTTrainer(
        parts.policy,
        parts.demonstrations,
        config=config.sft,
        micro_batch_tokens=config.training.micro_batch_tokens,
        max_skipped_updates=config.training.max_skipped_updates,
        check=parts.sft_check,
        sampler=parts.sampler,
        recorder=recorder,
    )
    if saved is not None:
        trainer.load(saved.state, saved.tensors)
        saved.free_tensors()
    trainer.train(first_step=saved.step + 1 if saved else 1)


def _reinforce(config: RunConfig, parts: Parts, recorder: Recorder, saved: Saved) -> None:
    learner = build_learner(
        parts.policy,
        Objective(config=config.objective, kl=config.kl),
        config.optimizer,
        config.gradient_regularization,
        temperature=config.rollout.temperature,
        micro_batch_tokens=config.training.micro_batch_tokens,
        notice=recorder.progress.notice,
    )
    trainer = Trainer(
        learner,
        sampler=parts.sampler,
        phases=parts.phases,
        reference=parts.take_reference() or own_reference(config, parts.policy, start=saved.start),
        config=TrainerConfig(
            seed=derive_seed(config.run.seed, "train"),
            rollout=config.rollout,
            advantage=config.advantage,
            training=config.training,
            reference=config.reference,
        ),
        recorder=recorder,
    )
    if saved.train is not None:
        trainer.load(saved.train.state, saved.train.tensors)
        saved.train.free_tensors()
    trainer.train(first_step=saved.train.step + 1 if saved.train else 1)


def _recorder(
    config: RunConfig,
    parts: Parts,
    run: RunDirectory,
    stop: StopSignals,
    progress: Progress,
    notices: NoticeLog,
    saved: Saved,
) -> Recorder:
    newest = saved.newest
    stage = "train" if saved.train else "sft"
    if run.resumed:
        run.rewind(newest.step if newest else None, stage=stage, evaluated=saved.evaluated)
    notices.open(run.notices, stage=stage if newest else START, step=newest.step if newest else 0)
    recorder = Recorder(
        run,
        config=config.run,
        evaluation=config.evaluation,
        evaluator=parts.evaluator,
        stop=stop,
        progress=progress,
        notices=notices,
        history=History(**newest.state["history"]) if newest else History(),
        zero_advantages=ZeroAdvantageMonitor(
            progress.notice,
            limit=config.rollout.max_new_tokens,
            other_terms=Objective(config=config.objective, kl=config.kl).needs_all_tokens,
            unanswered=parts.unanswered(config.evaluation.accuracy),
        ),
        evaluated=saved.evaluated,
    )
    if newest is not None:
        recorder.point_at(newest.path)
    return recorder


def as_config(config: Recipe, settings: Settings | None = None) -> RunConfig:
    """What callers pass as `config`, changed by `settings` and checked."""
    if not isinstance(config, RunConfig):
        return parse_config(read_recipe(config, settings or ()))
    return parse_config(apply_settings(config.model_dump(mode="json"), settings)) if settings else config
