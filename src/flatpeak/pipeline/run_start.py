"""The start of a run: the checkpoint it is resumed from; its directory with lock, logs and trackers; its recorder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.ranks import Ranks
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.evaluation.evaluate import Evaluator
from flatpeak.pipeline.prompt_record import PROMPT_RECORD, PromptRecord, read_prompt_record
from flatpeak.pipeline.request import RunRequest
from flatpeak.pipeline.run_data import data_digests
from flatpeak.policy.model import Policy
from flatpeak.protocols import Progress
from flatpeak.report.page import LiveReport
from flatpeak.runs.callbacks import Callbacks, RunControl
from flatpeak.runs.checkpoints import CheckpointState, newest_valid, read_checkpoint
from flatpeak.runs.directory import RunDirectory, RunPaths
from flatpeak.runs.disk_space import check_space
from flatpeak.runs.manifest import computed_by, flatten, fork_step, read_starts
from flatpeak.runs.metrics import missing_steps, read_metrics
from flatpeak.runs.notices import START, NoticeLog, RecordedProgress
from flatpeak.runs.signals import StopSignals
from flatpeak.runs.summary import RunSummary
from flatpeak.tracking.backend import RunFacts
from flatpeak.tracking.trackers import Trackers, open_trackers
from flatpeak.training.collect import Rollouts
from flatpeak.training.history import History, ZeroAdvantageMonitor
from flatpeak.training.master_weights import CheckpointSize
from flatpeak.training.recorder import HALVED, Recorder
from flatpeak.training.stage import StageTrainer
from flatpeak.utils.out_of_memory import Halvings
from flatpeak.utils.redaction import redact


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The newest checkpoint of each stage of a run that is resumed; a new run has none."""

    train: CheckpointState | None = None
    """Of RL, or of a reward model."""
    sft: CheckpointState | None = None

    @property
    def newest(self) -> CheckpointState | None:
        """The checkpoint to resume from."""
        return self.train or self.sft

    @property
    def model(self) -> Path | None:
        """The directory of its model."""
        return self.newest.path if self.newest else None

    @property
    def stage(self) -> str:
        """The stage that is resumed, as logs name it."""
        return "train" if self.train else "sft"

    @property
    def sft_finished(self) -> bool:
        """Whether SFT has taken its last step."""
        return self.sft is not None and bool(self.sft.state["stage"]["finished"])

    @property
    def evaluated(self) -> bool:
        """Whether the evaluation that was due after its step, if one was, has been made."""
        return self.newest is None or bool(self.newest.state["evaluated"])

    def announce_engine(self, policy: Policy, progress: Progress) -> None:
        """Give a notice where the start-up probe chose another engine than before: results may differ in their bits."""
        if self.newest is None:
            return
        before = self.newest.state["native"]
        if before != policy.native:
            first, now = ("native", "generate") if before else ("generate", "native")
            progress.notice(
                f"the run goes on with another engine than it had, {now} in place of {first} "
                f"({policy.notice or 'the native one agrees with the plain forward pass again'}): from here on its "
                "results differ from an uninterrupted run's"
            )
        if not (before and policy.native):
            return
        used, uses = self.newest.state["kernels"], policy.computed_with
        if used != uses:
            progress.notice(
                f"the run goes on with other kernels than it had, {uses} in place of {used}: from here on its results "
                "may differ in their last bits from an uninterrupted run's"
            )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run between its request and its result, whose start is checked; `lifecycle.open_run` makes it."""

    config: RunConfig
    request: RunRequest
    ranks: Ranks
    progress: RecordedProgress
    notices: NoticeLog
    resume_point: ResumePoint
    stop: StopSignals
    paths: RunPaths
    held: ExitStack
    """The lock on the directory and the trackers, which end before it is released; closed after the report."""


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The facts of a run that its files have from the start on, and its evaluator."""

    evaluator: Evaluator
    evaluation: EvaluationConfig
    record: PromptRecord
    """The record that goes into every checkpoint."""
    size: CheckpointSize
    steps: Sequence[int]
    """The steps of each stage."""
    zero_advantages: ZeroAdvantageMonitor | None = None
    prepare: Callable[[], None] = lambda: None
    """Called once the run's name is taken, before anything in the directory changes."""
    decoder: str | None = None
    """The name of what draws the rollouts."""
    code: Mapping[str, str] | None = None
    """Digests of the user's functions by setting."""
    data: Mapping[str, str] = field(default_factory=dict)
    """A digest of the rows that a Python caller gave, as `dataset`."""


def read_resume_point(config: RunConfig, progress: Progress) -> ResumePoint:
    """The newest whole checkpoints of the run that a recipe names; UserError where all of a stage's are damaged."""
    checkpoints = RunPaths(Path(config.run.directory) / config.run.name).checkpoints
    train, sft = (newest_valid(parent, notice=progress.notice) for parent in (checkpoints, checkpoints / "sft"))
    if train is not None:
        return ResumePoint(train=read_checkpoint(train))
    return ResumePoint(sft=read_checkpoint(sft) if sft else None)


def take_directory(run: Run, start: RunStart) -> RunDirectory | None:
    """Lock the run's directory and write its first files, on the first rank; None on the others, which write none."""
    with run.ranks.together():
        if not run.ranks.is_first:
            return None
        check_space(
            run.paths,
            checkpoint=start.size.total,
            most=run.config.run.most_checkpoints(*start.steps),
            resume=run.request.resume,
            overwrite=run.request.overwrite,
            notice=run.progress.notice,
        )
        directory = RunDirectory.create(
            run.config.run,
            run.config.model_dump(mode="json"),
            resume=run.request.resume,
            overwrite=run.request.overwrite,
            command=run.request.command,
            before=start.prepare,
            decoder=start.decoder,
            code=start.code,
            data={**data_digests(run.config), **start.data},
        )
        return run.held.enter_context(directory)


class NullRecorder(Recorder):
    """The recorder of a rank that is not the first: it decides and saves as the first one's, and writes no log."""

    def _open_metrics(self) -> None:
        """Open no file of metrics."""

    def _log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write no row of metrics."""

    def _log_rollouts(self, step: int, rollouts: Rollouts, advantages_PG: Tensor) -> None:
        """Write no completions of a step."""

    def _log_answers(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write no answers of an evaluation."""

    def _write_summary(self, summary: RunSummary) -> None:
        """Write no summary of the run."""

    def close(self) -> None:
        """Close nothing, since nothing is open."""


def open_recorder(run: Run, start: RunStart, directory: RunDirectory | None) -> Recorder:
    """The recorder of a run; the logs of a resumed one are cut back to its checkpoint before."""
    newest = run.resume_point.newest
    trackers = Trackers(run.config.tracking) if directory is None else _open_logs(run, directory)
    if directory is not None and run.request.report:
        run.progress.after_evaluation = LiveReport(run.paths.path).refresh
    earlier = read_prompt_record(newest.path) if newest else None
    kind = NullRecorder if directory is None else Recorder
    control = RunControl(run.paths.path, run.stop, run.progress.notice)
    recorder = kind(
        run.paths,
        config=run.config.run,
        evaluation=start.evaluation,
        evaluator=start.evaluator,
        stop=run.stop,
        progress=run.progress,
        notices=run.notices,
        trackers=trackers,
        history=History(**newest.state["history"]) if newest else History(),
        texts={PROMPT_RECORD: start.record.with_base_of(earlier).as_text()},
        model_bytes=start.size.model,
        zero_advantages=start.zero_advantages,
        evaluated=run.resume_point.evaluated,
        ranks=run.ranks,
        # Several processes halve nothing: those with memory left would not answer.
        halvings=Halvings(
            run.progress.notice if run.ranks.size == 1 else None, newest.state.get(HALVED) if newest else None
        ),
        callbacks=Callbacks(() if directory is None else run.request.callbacks, control),
    )
    if newest is not None:
        recorder.point_at(newest.path)
        recorder.call_log.begin_step(run.resume_point.stage, newest.step)
    return recorder


def _open_logs(run: Run, directory: RunDirectory) -> Trackers:
    """Start the trackers and open the log of notices; those that precede the directory go to the trackers too."""
    point, newest = run.resume_point, run.resume_point.newest
    if directory.resumed:
        directory.rewind(newest.step if newest else None, stage=point.stage, evaluated=point.evaluated)
    trackers = _trackers(run, directory)
    run.held.callback(trackers.close, "failed")  # unless the run has ended, and closed them, before
    run.notices.forward = trackers.log_notice
    run.notices.open(directory.notices, stage=point.stage if newest else START, step=newest.step if newest else 0)
    for text in (*_changes(run, directory), *_other_machine(directory), *_missing_steps(run, directory)):
        run.progress.notice(text)
    return trackers


def _trackers(run: Run, directory: RunDirectory) -> Trackers:
    """The trackers of the run, with its facts from the files that hold no secrets."""
    manifest = json.loads(directory.manifest.read_text(encoding="utf-8"))
    section = run.config.tracking
    facts = RunFacts(
        name=run.config.run.name,
        directory=directory.path,
        recipe=yaml.safe_load(directory.config.read_text(encoding="utf-8")),
        start=manifest["resumed"][-1] if manifest.get("resumed") else manifest,
        group=redact(section.group),
        tags=redact({name: str(value) for name, value in section.tags.items()}),
    )
    return open_trackers(section, facts, earlier=lambda: read_metrics(directory.metrics), notice=run.progress.notice)


def _changes(run: Run, directory: RunDirectory) -> list[str]:
    """A notice of each setting whose code or data has changed since an earlier start of the run."""
    settings: dict[str, Any] = flatten(run.config.model_dump(mode="json"))
    return [
        f"the {kind} of {key}={settings.get(key, '... from Python')} has changed since the run was last started: what "
        f"follows is another run than it was; put the {kind} back, or give the changed one a run of its own"
        for kind, keys in directory.changed.items()
        for key in keys
    ]


def _other_machine(directory: RunDirectory) -> list[str]:
    """A notice where a resumed run has another processor, GPU or torch than at its last start."""
    if not directory.resumed:
        return []
    before, now = (computed_by(start) for start in read_starts(directory.manifest)[-2:])
    if before == now:
        return []
    return [
        f"the run goes on with {now} in place of {before}: from here on its results may differ in their last bits from "
        "an uninterrupted run's"
    ]


def _missing_steps(run: Run, directory: RunDirectory) -> list[str]:
    """A notice where metrics.jsonl lacks steps of the checkpoint that the run goes on from."""
    newest = run.resume_point.newest
    if newest is None or not directory.resumed:
        return []
    missing = missing_steps(directory.metrics, step=newest.step, stage=run.resume_point.stage)
    if not missing:
        return []
    return [
        f"{directory.metrics} has no row of {len(missing)} of the {newest.step} steps before this start, the first is "
        f"step {missing[0]}: a power cut or a full disk lost them; {newest.path.name} is whole, and the run goes on "
        "from it"
    ]


def restore_trainer(trainer: StageTrainer, checkpoint: CheckpointState | None) -> int:
    """Load a stage's state from its checkpoint, if it has one; the number of its next step."""
    if checkpoint is None:
        return 1
    trainer.load(checkpoint.state, checkpoint.tensors)
    if checkpoint.step <= fork_step(read_starts(trainer.recorder.run.manifest)):
        trainer.condition.restart()
    checkpoint.free_tensors()
    return checkpoint.step + 1
