"""The checkpoints that a resumed run starts from: its newest one, and the one that KL is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatpeak.assembly import keeps_own_reference
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.policy.model import Policy
from flatpeak.protocols import Progress
from flatpeak.runs.checkpoints import CheckpointState, broken_file, checkpoint_name, newest_valid, read_checkpoint
from flatpeak.runs.directory import RunPaths


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
