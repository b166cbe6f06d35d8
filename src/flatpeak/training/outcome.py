"""The end of a run: its status, its last checkpoint, and the error in its summary."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from flatpeak.errors import DivergedError, RunError, StoppedError, UserError, explain
from flatpeak.runs.checkpoints import CheckpointError
from flatpeak.runs.summary import RunSummary
from flatpeak.training.recorder import Journal


def conduct(journal: Journal, stages: Callable[[], None]) -> RunSummary:
    """Run the stages, and write the summary of how they ended.

    Whatever ends them, the last completed step is saved if weights and optimizer are still as it left them. An error
    before the first checkpoint that names its own fix leaves no run; every other is a failed run, and a UserError is
    raised as a RunError then. The traceback of what nobody expected is written to errors.log.
    """
    try:
        journal.summarize("running")
        try:
            stages()
        except StoppedError:
            journal.save_completed()
        return journal.summarize("stopped" if journal.stopped else "done")
    except KeyboardInterrupt:
        _rescue(journal, interrupted=True)
        journal.summarize("stopped")
        raise
    except Exception as error:
        unsaved = None if isinstance(error, DivergedError | CheckpointError) else _rescue(journal)
        if isinstance(error, UserError) and journal.run.discard_if_empty():
            raise
        summary = journal.summarize("failed")
        left = ", ".join(summary.checkpoints) or "none"
        if isinstance(error, DivergedError):
            raise DivergedError(f"{error} (checkpoints: {left})") from error
        if isinstance(error, RunError):
            raise
        if isinstance(error, UserError):
            raise RunError(str(error)) from error
        _write_down(journal, error, summary=summary, unsaved=unsaved)
        raise
    finally:
        journal.close()


def _rescue(journal: Journal, *, interrupted: bool = False) -> str | None:
    """Save the last completed step if that is possible; why it is not, where an error prevents it."""
    try:
        journal.save_completed(interrupted=interrupted)
    except Exception as error:  # what ended the run is what matters, and it may well prevent this too
        return str(error)
    return None


def _write_down(journal: Journal, error: Exception, *, summary: RunSummary, unsaved: str | None) -> None:
    """Keep the traceback in the run's directory, and explain the error in one line."""
    kept = journal.run.log_error("".join(traceback.format_exception(error)))
    first_line = str(error).strip().split("\n")[0]
    reason = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    saved = f"step {summary.last_step} is saved" if unsaved is None else f"its last step could not be saved ({unsaved})"
    where = f"; traceback: {journal.run.errors}" if kept else ""
    explain(error, f"the run failed: {reason}{_advice(error)}; {saved}: go on with --resume{where}")


def _advice(error: Exception) -> str:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in str(error):
        return (
            " (out of memory: lower training.micro_batch_tokens or rollout.max_rows, or set "
            "training.activation_checkpointing=true)"
        )
    return ""
