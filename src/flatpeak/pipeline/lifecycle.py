"""The checkpoints that a resumed run starts from: its newest one, and the one that KL is measured against."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import DivergedError, RunError, StoppedError, UserError, explain
from flatpeak.pipeline.build import keeps_own_reference
from flatpeak.policy.model import Policy
from flatpeak.protocols import Progress
from flatpeak.runs.checkpoints import (
    CheckpointError,
    CheckpointState,
    broken_file,
    checkpoint_name,
    newest_valid,
    read_checkpoint,
)
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.summary import RunSummary
from flatpeak.training.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The checkpoints a resumed run goes on from; empty for a new one."""

    train: CheckpointState | None = None
    sft: CheckpointState | None = None
    start: Path | None = None
    """The model that RL began with, where KL is still measured against it."""

    @property
    def newest(self) -> CheckpointState | None:
        """The one to go on from."""
        return self.train or self.sft

    @property
    def checkpoint(self) -> Path | None:
        """Where its model is."""
        return self.newest.path if self.newest else None

    @property
    def sft_finished(self) -> bool:
        """Whether SFT is behind it."""
        return self.sft is not None and bool(self.sft.state["stage"]["finished"])

    @property
    def evaluated(self) -> bool:
        """Whether the evaluation that was due after its step, if one was, has been made."""
        return self.newest is None or bool(self.newest.state.get("evaluated", True))

    def announce(self, policy: Policy, progress: Progress) -> None:
        """Say where the probe has decided otherwise than when the run began: results may then differ in their bits."""
        before = self.newest.state.get("native") if self.newest else None
        if before is not None and before != policy.native:
            first, now = ("native", "generate")[:: 1 if before else -1]
            progress.notice(
                f"the run goes on with another engine than it had, {now} in place of {first} "
                f"({policy.notice or 'the native one agrees with the plain forward pass again'}): from here on its "
                "results differ from an uninterrupted run's"
            )


def read_saved(config: RunConfig, progress: Progress) -> Saved:
    """The newest whole checkpoints of the run that a recipe names.

    Raises UserError where every checkpoint is damaged, or the one that KL is measured against.
    """
    checkpoints = RunPaths(Path(config.run.directory) / config.run.name).checkpoints
    train, sft = (newest_valid(parent, notice=progress.notice) for parent in (checkpoints, checkpoints / "sft"))
    if train is None:
        return Saved(sft=read_checkpoint(sft) if sft else None)
    state, start = read_checkpoint(train), None
    if keeps_own_reference(config) and not state.state["stage"].get("resets", 0):
        start = checkpoints / checkpoint_name(0)
        check_start(start)
    return Saved(train=state, start=start)


def check_start(start: Path) -> None:
    """UserError where the checkpoint that KL is measured against is missing or not as it was written."""
    broken = broken_file(start)
    if broken is not None:
        problem = f"{start / broken.name}: {broken.problem}" if start.is_dir() else f"{start} is missing"
        raise UserError(
            f"{problem}; KL is measured against this checkpoint: put it back from a copy of the run, or start a new run"
        )


def conduct(recorder: Recorder, stages: Callable[[], None]) -> RunSummary:
    """Run the stages, and write the summary of how they ended.

    Whatever ends them, the last completed step is saved if weights and optimizer are still as it left them. An error
    before the first checkpoint that names its own fix leaves no run; every other is a failed run, and a UserError is
    raised as a RunError then. The traceback of what nobody expected is written to errors.log.
    """
    try:
        recorder.summarize("running")
        try:
            stages()
        except StoppedError:
            recorder.save_completed()
        return recorder.summarize("stopped" if recorder.stopped else "done")
    except KeyboardInterrupt:
        _rescue(recorder, interrupted=True)
        recorder.summarize("stopped")
        raise
    except Exception as error:
        unsaved = None if isinstance(error, DivergedError | CheckpointError) else _rescue(recorder)
        if isinstance(error, UserError) and recorder.run.discard_if_empty():
            raise
        summary = recorder.summarize("failed")
        left = ", ".join(summary.checkpoints) or "none"
        if isinstance(error, DivergedError):
            raise DivergedError(f"{error} (checkpoints: {left})") from error
        if isinstance(error, RunError):
            raise
        if isinstance(error, UserError):
            raise RunError(str(error)) from error
        _write_down(recorder, error, summary=summary, unsaved=unsaved)
        raise
    finally:
        recorder.close()


def _rescue(recorder: Recorder, *, interrupted: bool = False) -> str | None:
    """Save the last completed step if that is possible; why it is not, where an error prevents it."""
    try:
        recorder.save_completed(interrupted=interrupted)
    except Exception as error:  # what ended the run is what matters, and it may well prevent this too
        return str(error)
    return None


def _write_down(recorder: Recorder, error: Exception, *, summary: RunSummary, unsaved: str | None) -> None:
    """Keep the traceback in the run's directory, and explain the error in one line."""
    kept = recorder.run.log_error("".join(traceback.format_exception(error)))
    first_line = str(error).strip().split("\n")[0]
    reason = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    saved = f"step {summary.last_step} is saved" if unsaved is None else f"its last step could not be saved ({unsaved})"
    where = f"; traceback: {recorder.run.errors}" if kept else ""
    explain(error, f"the run failed: {reason}{_advice(error)}; {saved}: go on with --resume{where}")


def _advice(error: Exception) -> str:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in str(error):
        return (
            " (out of memory: lower training.micro_batch_tokens or rollout.max_rows, or set "
            "training.activation_checkpointing=true)"
        )
    return ""
