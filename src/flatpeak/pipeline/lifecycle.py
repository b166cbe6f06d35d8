"""The lifecycle of a run, one for SFT, RL and reward models: start or resume, record, and end with a report."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path

import torch

from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.ranks import ALONE, Ranks, lost_ranks_named
from flatpeak.errors import DivergedError, RunError, StoppedError, UserError, explain
from flatpeak.pipeline.progress import as_progress
from flatpeak.pipeline.request import RunRequest
from flatpeak.pipeline.run_result import RunResult
from flatpeak.pipeline.run_start import ResumePoint, Run, RunStart, open_recorder, read_resume_point, take_directory
from flatpeak.report.page import write_report
from flatpeak.runs.directory import RunDirectory, RunPaths, check_start
from flatpeak.runs.notices import NoticeLog, RecordedProgress
from flatpeak.training.recorder import Recorder
from flatpeak.utils.host_memory import keep_freed_memory
from flatpeak.utils.huggingface import no_progress_bar
from flatpeak.utils.out_of_memory import is_out_of_memory
from flatpeak.utils.redaction import hide_secrets_of


@contextmanager
def open_run(
    request: RunRequest, config: RunConfig, *, metric: str, notices: Iterable[str] = (), ranks: Ranks = ALONE
) -> Iterator[Run]:
    """A run whose start is checked, and that has read the checkpoints to resume from.

    `metric` is shown of evaluations without an accuracy, `notices` are given first. Raises UserError, before a
    directory is made, for a run that cannot be started or resumed.
    """
    resolved = config.model_dump(mode="json")
    wanted = request.progress if ranks.is_first else False
    display = as_progress(wanted, metric=metric)
    bars = no_progress_bar() if wanted is False else nullcontext()
    hide_secrets_of(resolved)
    with _worded_for(request), bars, closing(NoticeLog(failed=display.notice)) as log, ExitStack() as held:
        progress = RecordedProgress(display, log)
        for notice in notices:
            progress.notice(notice)
        ranks.first(lambda: check_start(config.run, resolved, resume=request.resume, overwrite=request.overwrite))
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        keep_freed_memory()
        yield Run(
            config=config,
            request=request,
            ranks=ranks,
            progress=progress,
            notices=log,
            resume_point=read_resume_point(config, progress) if request.resume else ResumePoint(),
            stop=ranks.stop_signals(),
            paths=RunPaths(Path(config.run.directory) / config.run.name),
            held=held,
        )


@contextmanager
def _worded_for(request: RunRequest) -> Iterator[None]:
    """A context whose UserErrors name arguments in place of options, unless a command made the request."""
    try:
        yield
    except UserError as error:
        if request.command is None:
            options = {"--resume": _again(request), "--overwrite": "overwrite=True"}
            for option, argument in options.items():
                error.args = tuple(str(text).replace(option, argument) for text in error.args)
        raise


def _again(request: RunRequest) -> str:
    """The option or the argument that continues a run."""
    return "resume=True" if request.command is None else "--resume"


@contextmanager
def training(run: Run, start: RunStart) -> Iterator[Recorder]:
    """Take the run's directory, catch signals, train in the `with`, and write the summary of how that ended.

    Whatever ends it, the last completed step is saved if weights and optimizer are still as it left them. An error
    before the first checkpoint that names its own fix leaves no run; every other is a failed run, and a UserError
    is raised as a RunError then. The traceback of an unexpected error is written to errors.log.
    """
    directory = take_directory(run, start)
    with run.stop, closing(open_recorder(run, start, directory)) as recorder:
        try:
            recorder.summarize("running")
            try:
                with lost_ranks_named():
                    yield recorder
            except StoppedError:
                recorder.stop.agree()
                recorder.save_completed()
            recorder.summarize("stopped" if recorder.stopped else "done")
        except KeyboardInterrupt as interrupt:
            if run.ranks.knows(interrupt):
                _save_completed(recorder, interrupted=True)
            recorder.summarize("stopped")
            recorder.trackers.close("stopped")
            raise
        except Exception as error:
            _end_failed(run, recorder, directory, error)
            raise


def finish(run: Run, recorder: Recorder) -> RunResult:
    """Write the report, unless a signal leaves no time for it, and return the result of a run that has ended."""
    if run.request.report and run.ranks.is_first and not run.stop.asked:
        try:
            write_report(run.paths.path)
        except Exception as error:  # a full disk, or a plot that fails: the run is done all the same
            run.progress.notice(
                f"{run.paths.report} not written ({error}): write it with flatpeak report {run.paths.path}"
            )
        recorder.trackers.log_report(run.paths.report)
    recorder.trackers.close(recorder.status)
    return RunResult(
        path=run.paths.path,
        summary=recorder.summary,
        report=run.paths.report,
        # A process that ends with another code than 0 has the launcher end the others.
        exit_code=run.stop.exit_code if run.ranks.is_first else 0,
        stopped_rank=run.stop.rank,
    )


def _end_failed(run: Run, recorder: Recorder, directory: RunDirectory | None, error: Exception) -> None:
    """Save what can be saved after an error, and summarize the failed run; raises an error that says more."""
    # Of what the other ranks do not know, nothing is saved: they would not take part.
    saves_nothing = isinstance(error, RunError) and error.saves_nothing
    lost = saves_nothing or not (run.ranks.knows(error) or run.ranks.raise_alike(error))
    unsaved = None if lost else _save_completed(recorder)
    if isinstance(error, UserError):
        recorder.trackers.close("failed")  # before their files go with the run
        discarded = not run.paths.saved_steps if directory is None else directory.discard_if_empty()
        if discarded:
            return
    summary = recorder.summarize("failed")
    if isinstance(error, DivergedError):
        raise DivergedError(f"{error} (checkpoints: {', '.join(summary.checkpoints) or 'none'})") from error
    if isinstance(error, UserError) and not isinstance(error, RunError):
        raise RunError(str(error)) from error
    if not isinstance(error, UserError):
        saved = f"step {summary.last_step} is saved"
        if unsaved is not None:
            saved = f"its last step could not be saved ({unsaved})"
        _log_error(run.paths, error, saved=f"{saved}: go on with {_again(run.request)}")


def _save_completed(recorder: Recorder, *, interrupted: bool = False) -> str | None:
    """Save the last completed step if that is possible; the reason where an error prevents it."""
    try:
        recorder.save_completed(interrupted=interrupted)
    except Exception as error:  # the cause of the run's end matters more, and may well prevent this too
        return str(error)
    return None


def _log_error(run: RunPaths, error: Exception, *, saved: str) -> None:
    """Keep the traceback in the run's directory, and explain the error in one line."""
    logged = run.log_error("".join(traceback.format_exception(error)))
    first_line = str(error).strip().split("\n")[0]
    reason = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    where = f"; traceback: {run.errors}" if logged else ""
    explain(error, f"the run failed: {reason}{_advice(error, run)}; {saved}{where}")


def _advice(error: Exception, run: RunPaths) -> str:
    """The remedy for an error for want of memory; empty for others."""
    if is_out_of_memory(error):
        return (
            f" (out of memory: flatpeak plan {run.config} says what would make it fit; try a lower "
            "training.micro_batch_tokens or rollout.max_rows, training.activation_checkpointing=true, "
            "optimizer.name=adamw_8bit, and on a GPU optimizer.offload=true and reference.offload=true)"
        )
    return ""
