"""The lifecycle of a run, one for SFT, RL and reward models: start or resume, record, and end with a report."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from flatpeak.config.load import Settings, apply_settings, parse_config, read_recipe
from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.ranks import ALONE, Ranks, SharedStopSignals, lost_ranks_named
from flatpeak.errors import DivergedError, ReportedElsewhereError, RunError, StoppedError, UserError, explain
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.evaluation.evaluate import Evaluator
from flatpeak.pipeline.data_digests import data_digests
from flatpeak.pipeline.progress import as_progress
from flatpeak.pipeline.prompt_record import PROMPT_RECORD, PromptRecord, read_prompt_record
from flatpeak.pipeline.resume_point import ResumePoint, read_resume_point
from flatpeak.protocols import Progress
from flatpeak.report.page import write_report
from flatpeak.runs.checkpoints import CheckpointError
from flatpeak.runs.directory import RunDirectory, RunPaths, check_start
from flatpeak.runs.manifest import flatten
from flatpeak.runs.metrics import missing_steps, read_metrics
from flatpeak.runs.notices import START, NoticeLog, RecordedProgress
from flatpeak.runs.signals import StopSignals
from flatpeak.runs.summary import RunSummary, Status
from flatpeak.tracking.backend import RunFacts
from flatpeak.tracking.trackers import Trackers, open_trackers
from flatpeak.training.diagnostics import ZeroAdvantageMonitor
from flatpeak.training.history import History
from flatpeak.training.recorder import Recorder
from flatpeak.utils.host_memory import keep_freed_memory
from flatpeak.utils.huggingface import no_progress_bar
from flatpeak.utils.redaction import hide_secrets_of, redact

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
    stopped_rank: int | None = None
    """Of several processes the one that alone got that signal."""

    @property
    def best(self) -> Path:
        """The best checkpoint, which `from_pretrained` loads; after SFT alone its last one."""
        best = self.path / "checkpoints" / "best"
        return best if best.exists() else self.path / "checkpoints" / "sft" / "last"


class Run:
    """A run between its request and its result; `open_run` makes it."""

    directory: RunDirectory
    stop: StopSignals
    recorder: Recorder
    summary: RunSummary
    result: RunResult
    """Set once the body of `open_run` has ended."""

    def __init__(
        self, config: RunConfig, request: RunRequest, progress: RecordedProgress, notices: NoticeLog, ranks: Ranks
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.progress = progress
        self.resume_point = ResumePoint()
        self.resources = ExitStack()
        """Closed, last entered first, before the report is written."""
        self.held = ExitStack()
        """The lock on the directory, and the trackers, which end before it is released; closed after the report."""
        self.trackers = Trackers(config.tracking)
        self._status: Status = "failed"
        self._request = request
        self._notices = notices
        self._resolved = config.model_dump(mode="json")

    def check_start(self) -> None:
        """UserError where the run's directory cannot be started in as requested."""
        resume, overwrite = self._request.resume, self._request.overwrite
        self.ranks.first(lambda: check_start(self.config.run, self._resolved, resume=resume, overwrite=overwrite))

    def start(
        self,
        evaluator: Evaluator,
        evaluation: EvaluationConfig,
        *,
        record: PromptRecord,
        zero_advantages: ZeroAdvantageMonitor | None = None,
        prepare: Callable[[], None] = lambda: None,
        decoder: str | None = None,
        code: Mapping[str, str] | None = None,
    ) -> Recorder:
        """Take the run's directory, catch signals, and open the recorder; the logs of a resumed run are cut back.

        `record` goes into every checkpoint. `prepare` is called once the run's name is taken, before anything in the
        directory changes. `decoder` draws the rollouts, by name. `code` has digests of the user's functions by setting.
        """
        point = self.resume_point
        with self.ranks.together():
            self.directory = (
                self._directory(prepare, decoder, code) if self.ranks.is_first else self._scratch_directory()
            )
        self.stop = self.resources.enter_context(
            StopSignals() if self.ranks.size == 1 else SharedStopSignals(self.ranks)
        )
        newest = point.newest
        earlier = read_prompt_record(newest.path) if newest else None
        self.directory.checkpoint_texts = {PROMPT_RECORD: record.with_base_of(earlier).as_text()}
        if self.directory.resumed:
            self.directory.rewind(newest.step if newest else None, stage=point.stage, evaluated=point.evaluated)
        self._open_trackers_and_notices()
        self._announce_changes()
        self._announce_missing_steps()
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
            tracker=self.trackers,
            ranks=self.ranks,
        )
        if newest is not None:
            self.recorder.point_at(newest.path)
        return self.recorder

    def _open_trackers_and_notices(self) -> None:
        """Start the trackers, on the first rank alone; open the log of notices.

        The notices that precede the directory go to the trackers too.
        """
        point, newest = self.resume_point, self.resume_point.newest
        if self.ranks.is_first:
            self.trackers = self._trackers()
        self.held.callback(lambda: self.trackers.close(self._status))
        self._notices.forward = self.trackers.log_notice
        self._notices.open(
            self.directory.notices, stage=point.stage if newest else START, step=newest.step if newest else 0
        )

    def _trackers(self) -> Trackers:
        """The trackers of the run, with its facts from the files that hold no secrets."""
        manifest = json.loads(self.directory.manifest.read_text(encoding="utf-8"))
        section = self.config.tracking
        facts = RunFacts(
            name=self.config.run.name,
            directory=self.directory.path,
            recipe=yaml.safe_load(self.directory.config.read_text(encoding="utf-8")),
            start=manifest["resumed"][-1] if manifest.get("resumed") else manifest,
            group=redact(section.group),
            tags=redact({name: str(value) for name, value in section.tags.items()}),
        )
        return open_trackers(
            section, facts, earlier=lambda: read_metrics(self.directory.metrics), notice=self.progress.notice
        )

    def _announce_changes(self) -> None:
        """Give a notice of each setting whose code or data has changed since an earlier start of the run."""
        for kind, keys in self.directory.changed.items():
            for key in keys:
                self.progress.notice(
                    f"the {kind} of {key}={flatten(self._resolved)[key]} has changed since the run was last started: "
                    f"what follows is another run than it was; put the {kind} back, or give the changed one a run of "
                    "its own"
                )

    def _announce_missing_steps(self) -> None:
        """Give a notice where metrics.jsonl lacks steps of the checkpoint that the run goes on from."""
        newest = self.resume_point.newest
        if newest is None or not self.directory.resumed:
            return
        missing = missing_steps(self.directory.metrics, step=newest.step, stage=self.resume_point.stage)
        if missing:
            self.progress.notice(
                f"{self.directory.metrics} has no row of {len(missing)} of the {newest.step} steps before this start, "
                f"the first is step {missing[0]}: a power cut or a full disk lost them; {newest.path.name} is whole, "
                "and the run goes on from it"
            )

    def _directory(
        self, prepare: Callable[[], None], decoder: str | None, code: Mapping[str, str] | None
    ) -> RunDirectory:
        request = self._request
        return self.held.enter_context(
            RunDirectory.create(
                self.config.run,
                self._resolved,
                resume=request.resume,
                overwrite=request.overwrite,
                command=request.command,
                before=prepare,
                decoder=decoder,
                code=code,
                data=data_digests(self.config),
            )
        )

    def _scratch_directory(self) -> RunDirectory:
        """The directory of a rank that is not the first: its metrics repeat the first's, and are deleted with the run.

        An error of its own is logged where the run's are, and names the run's recipe and checkpoints.
        """
        scratch = self.resources.enter_context(TemporaryDirectory(prefix="flatpeak-rank-"))
        config = self.config.run.model_copy(update={"directory": scratch})
        directory = self.resources.enter_context(RunDirectory.create(config, self._resolved))
        run = RunPaths(Path(self.config.run.directory) / self.config.run.name)
        directory.errors, directory.config = run.errors, run.config
        directory.checkpoints, directory.sft_checkpoints = run.checkpoints, run.sft_checkpoints
        return directory

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
                with lost_ranks_named():
                    yield
            except StoppedError:
                recorder.stop.agree()
                recorder.save_completed()
            self._status = "stopped" if recorder.stopped else "done"
            self.summary = recorder.summarize(self._status)
        except KeyboardInterrupt as interrupt:
            self._status = "stopped"
            if self.ranks.knows(interrupt):
                _save_completed(recorder, interrupted=True)
            recorder.summarize("stopped")
            raise
        except Exception as error:
            # Of what the other ranks do not know, nothing is saved: they would not take part.
            lost = _saves_nothing(error) or not (self.ranks.knows(error) or self.ranks.raise_alike(error))
            unsaved = None if lost else _save_completed(recorder)
            if isinstance(error, UserError):
                self.trackers.close("failed")  # before their files go with the run
                if recorder.run.discard_if_empty():
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
def open_run(
    request: RunRequest, config: RunConfig, *, metric: str, notices: Iterable[str] = (), ranks: Ranks = ALONE
) -> Iterator[Run]:
    """A run whose start is checked, and that has read the checkpoints to resume from; its report is written at the end.

    `metric` is shown of evaluations without an accuracy, `notices` are given first. Raises UserError, before a
    directory is made, for a run that cannot be started or resumed.
    """
    progress = request.progress if ranks.is_first else False
    display = as_progress(progress, metric=metric)
    bars = no_progress_bar() if progress is False else nullcontext()
    hide_secrets_of(config.model_dump(mode="json"))
    with bars, closing(NoticeLog(failed=display.notice)) as log:
        run = Run(config, request, RecordedProgress(display, log), log, ranks)
        for notice in notices:
            run.progress.notice(notice)
        run.check_start()
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        keep_freed_memory()
        if request.resume:
            run.resume_point = read_resume_point(config, run.progress)
        with run.held:
            with run.resources:
                yield run
            directory = RunPaths(Path(config.run.directory) / config.run.name)
            report = directory.report
            if request.report and ranks.is_first:
                report = write_report_of(directory, run.progress)
                run.trackers.log_report(report)
        # A process that ends with another code than 0 has the launcher end the others.
        code = run.stop.exit_code if ranks.is_first else 0
        run.result = RunResult(
            path=directory.path, summary=run.summary, report=report, exit_code=code, stopped_rank=run.stop.rank
        )


def resolve_config(recipe: RecipeSource, settings: Settings | None = None) -> RunConfig:
    """The checked configuration of a recipe, changed by `settings`."""
    if not isinstance(recipe, RunConfig):
        return parse_config(read_recipe(recipe, settings or ()))
    return parse_config(apply_settings(recipe.model_dump(mode="json"), settings)) if settings else recipe


def write_report_of(run: RunPaths, progress: Progress) -> Path:
    """Write the report page; where that fails, the run is done all the same."""
    try:
        return write_report(run.path)
    except Exception as error:  # a full disk, or a plot that fails
        progress.notice(f"{run.report} not written ({error}): write it with flatpeak report {run.path}")
        return run.report


def _saves_nothing(error: Exception) -> bool:
    """Whether no checkpoint can follow an error, of this rank or of the one that reports it."""
    if isinstance(error, ReportedElsewhereError):
        return error.saves_nothing
    return isinstance(error, DivergedError | CheckpointError)


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
