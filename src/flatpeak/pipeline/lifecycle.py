"""The lifecycle of a run, one for SFT, RL and reward models: start or resume, record, and end with a report."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatpeak.config.load import Settings, apply_settings, parse_config, read_recipe
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import DivergedError, RunError, StoppedError, UserError, explain
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.evaluation.evaluate import Evaluator
from flatpeak.pipeline.progress import as_progress
from flatpeak.pipeline.prompt_record import PROMPT_RECORD, PromptRecord, read_prompt_record
from flatpeak.policy.model import Policy
from flatpeak.protocols import Progress
from flatpeak.report.page import write_report
from flatpeak.runs.checkpoints import CheckpointError, CheckpointState, newest_valid, read_checkpoint
from flatpeak.runs.directory import RunDirectory, RunPaths, check_start
from flatpeak.runs.notices import START, NoticeLog, RecordedProgress
from flatpeak.runs.signals import StopSignals
from flatpeak.runs.summary import RunSummary
from flatpeak.training.diagnostics import ZeroAdvantageMonitor
from flatpeak.training.recorder import History, Recorder
from flatpeak.training.reward_model_trainer import RewardModelTrainer
from flatpeak.training.sft import SFTTrainer
from flatpeak.training.trainer import Trainer
from flatpeak.utils.huggingface import no_progress_bar

RecipeSource = RunConfig | Mapping[str, Any] | str | Path
"""A checked recipe, the mapping of one, or the path or name of one."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The recipe of a run and the way to start it, as a Python caller gives them."""

    recipe: RecipeSource
    settings: Settings | None
    progress: Progress | bool | None
    resume: bool
    overwrite: bool
    command: Sequence[str] | None
    report: bool = True
    """Whether the report page is written at the end, which takes a second."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The directory, the summary and the exit code of a run that has ended."""

    path: Path
    """The run directory."""
    summary: RunSummary
    """The content of summary.json."""
    report: Path
    """The report page; `flatpeak report` writes that of a sweep's run."""
    exit_code: int
    """0 when done; 130 or 143 when a signal stopped it, with a valid checkpoint left."""

    @property
    def best(self) -> Path:
        """The best checkpoint, which `from_pretrained` loads; after SFT alone its last one."""
        best = self.path / "checkpoints" / "best"
        return best if best.exists() else self.path / "checkpoints" / "sft" / "last"


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
        return self.newest is None or bool(self.newest.state.get("evaluated", True))

    def announce_engine(self, policy: Policy, progress: Progress) -> None:
        """Give a notice where the start-up probe chose another engine than before: results may differ in their bits."""
        before = self.newest.state.get("native") if self.newest else None
        if before is not None and before != policy.native:
            first, now = ("native", "generate")[:: 1 if before else -1]
            progress.notice(
                f"the run goes on with another engine than it had, {now} in place of {first} "
                f"({policy.notice or 'the native one agrees with the plain forward pass again'}): from here on its "
                "results differ from an uninterrupted run's"
            )


class Run:
    """A run between its request and its result; `open_run` makes it."""

    directory: RunDirectory
    stop: StopSignals
    recorder: Recorder
    summary: RunSummary
    result: RunResult
    """Set once the body of `open_run` has ended."""

    def __init__(self, config: RunConfig, request: RunRequest, progress: Progress, notices: NoticeLog) -> None:
        self.config = config
        self.progress = progress
        self.resume_point = ResumePoint()
        self.resources = ExitStack()
        """Closed, last entered first, before the report is written."""
        self._request = request
        self._notices = notices
        self._resolved = config.model_dump(mode="json")
        self._chosen = config.model_dump(mode="json", exclude_defaults=True)

    def check_start(self) -> None:
        """UserError where the run's directory cannot be started in as requested."""
        resume, overwrite = self._request.resume, self._request.overwrite
        check_start(self.config.run, self._resolved, resume=resume, overwrite=overwrite, chosen=self._chosen)

    def start(
        self,
        evaluator: Evaluator,
        evaluation: EvaluationConfig,
        *,
        record: PromptRecord,
        zero_advantages: ZeroAdvantageMonitor | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> Recorder:
        """Take the run's directory, catch signals, and open the recorder; the logs of a resumed run are cut back.

        `record` goes into every checkpoint. `prepare` is called once the run's name is taken, before anything in the
        directory changes.
        """
        request, point = self._request, self.resume_point
        self.directory = self.resources.enter_context(
            RunDirectory.create(
                self.config.run,
                self._resolved,
                resume=request.resume,
                overwrite=request.overwrite,
                command=request.command,
                chosen=self._chosen,
                before=prepare,
            )
        )
        self.stop = self.resources.enter_context(StopSignals())
        newest = point.newest
        earlier = read_prompt_record(newest.path) if newest else None
        self.directory.checkpoint_texts = {PROMPT_RECORD: record.with_base_of(earlier).as_text()}
        if self.directory.resumed:
            self.directory.rewind(newest.step if newest else None, stage=point.stage, evaluated=point.evaluated)
        self._notices.open(
            self.directory.notices, stage=point.stage if newest else START, step=newest.step if newest else 0
        )
        self.recorder = Recorder(
            self.directory,
            config=self.config.run,
            evaluation=evaluation,
            evaluator=evaluator,
            stop=self.stop,
            progress=self.progress,
            notices=self._notices,
            history=History(**newest.state["history"]) if newest else History(),
            zero_advantages=zero_advantages,
            evaluated=point.evaluated,
        )
        if newest is not None:
            self.recorder.point_at(newest.path)
        return self.recorder

    @contextmanager
    def training(self) -> Iterator[None]:
        """Train in the body of the `with`, and write the summary of how that ended.

        Whatever ends it, the last completed step is saved if weights and optimizer are still as it left them. An error
        before the first checkpoint that names its own fix leaves no run; every other is a failed run, and a UserError
        is raised as a RunError then. The traceback of an unexpected error is written to errors.log.
        """
        recorder = self.recorder
        try:
            recorder.summarize("running")
            try:
                yield
            except StoppedError:
                recorder.save_completed()
            self.summary = recorder.summarize("stopped" if recorder.stopped else "done")
        except KeyboardInterrupt:
            _save_completed(recorder, interrupted=True)
            recorder.summarize("stopped")
            raise
        except Exception as error:
            unsaved = None if isinstance(error, DivergedError | CheckpointError) else _save_completed(recorder)
            if isinstance(error, UserError) and recorder.run.discard_if_empty():
                raise
            summary = recorder.summarize("failed")
            checkpoints = ", ".join(summary.checkpoints) or "none"
            if isinstance(error, DivergedError):
                raise DivergedError(f"{error} (checkpoints: {checkpoints})") from error
            if isinstance(error, RunError):
                raise
            if isinstance(error, UserError):
                raise RunError(str(error)) from error
            _log_error(recorder, error, summary=summary, unsaved=unsaved)
            raise
        finally:
            recorder.close()


@contextmanager
def open_run(request: RunRequest, config: RunConfig, *, metric: str, notices: Iterable[str] = ()) -> Iterator[Run]:
    """A run whose start is checked, and that has read the checkpoints to resume from; its report is written at the end.

    `metric` is shown of evaluations without an accuracy, `notices` are given first. Raises UserError, before a
    directory is made, for a run that cannot be started or resumed.
    """
    display = as_progress(request.progress, metric=metric)
    bars = no_progress_bar() if request.progress is False else nullcontext()
    with bars, closing(NoticeLog(failed=display.notice)) as log:
        run = Run(config, request, RecordedProgress(display, log), log)
        for notice in notices:
            run.progress.notice(notice)
        run.check_start()
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        if request.resume:
            run.resume_point = read_resume_point(config, run.progress)
        with run.resources:
            yield run
        report = write_report_of(run.directory, run.progress) if request.report else run.directory.report
        run.result = RunResult(
            path=run.directory.path, summary=run.summary, report=report, exit_code=run.stop.exit_code
        )


def resolve_config(recipe: RecipeSource, settings: Settings | None = None) -> RunConfig:
    """The checked configuration of a recipe, changed by `settings`."""
    if not isinstance(recipe, RunConfig):
        return parse_config(read_recipe(recipe, settings or ()))
    return parse_config(apply_settings(recipe.model_dump(mode="json"), settings)) if settings else recipe


def read_resume_point(config: RunConfig, progress: Progress) -> ResumePoint:
    """The newest whole checkpoints of the run that a recipe names; UserError where all of a stage's are damaged."""
    checkpoints = RunPaths(Path(config.run.directory) / config.run.name).checkpoints
    train, sft = (newest_valid(parent, notice=progress.notice) for parent in (checkpoints, checkpoints / "sft"))
    if train is not None:
        return ResumePoint(train=read_checkpoint(train))
    return ResumePoint(sft=read_checkpoint(sft) if sft else None)


def restore_trainer(trainer: SFTTrainer | Trainer | RewardModelTrainer, checkpoint: CheckpointState | None) -> int:
    """Load a stage's state from its checkpoint, if it has one; the number of its next step."""
    if checkpoint is None:
        return 1
    trainer.load(checkpoint.state, checkpoint.tensors)
    checkpoint.free_tensors()
    return checkpoint.step + 1


def write_report_of(run: RunPaths, progress: Progress) -> Path:
    """Write the report page; where that fails, the run is done all the same."""
    try:
        return write_report(run.path)
    except Exception as error:  # a full disk, or a plot that fails
        progress.notice(f"{run.report} not written ({error}): write it with flatpeak report {run.path}")
        return run.report


def _save_completed(recorder: Recorder, *, interrupted: bool = False) -> str | None:
    """Save the last completed step if that is possible; the reason where an error prevents it."""
    try:
        recorder.save_completed(interrupted=interrupted)
    except Exception as error:  # the cause of the run's end matters more, and may well prevent this too
        return str(error)
    return None


def _log_error(recorder: Recorder, error: Exception, *, summary: RunSummary, unsaved: str | None) -> None:
    """Keep the traceback in the run's directory, and explain the error in one line."""
    logged = recorder.run.log_error("".join(traceback.format_exception(error)))
    first_line = str(error).strip().split("\n")[0]
    reason = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    saved = f"step {summary.last_step} is saved" if unsaved is None else f"its last step could not be saved ({unsaved})"
    where = f"; traceback: {recorder.run.errors}" if logged else ""
    explain(error, f"the run failed: {reason}{_advice(error, recorder.run)}; {saved}: go on with --resume{where}")


def _advice(error: Exception, run: RunPaths) -> str:
    """The remedy for an error for want of memory; empty for others."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in str(error):
        return (
            f" (out of memory: flatpeak plan {run.config} says what would make it fit; try a lower "
            "training.micro_batch_tokens or rollout.max_rows, training.activation_checkpointing=true, "
            "optimizer.name=adamw_8bit, and on a GPU optimizer.offload=true and reference.offload=true)"
        )
    return ""
