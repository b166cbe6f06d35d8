"""The checkpoints that a run is resumed from, and the trainers that are restored from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatpeak.config.run_config import RunConfig
from flatpeak.policy.model import Policy
from flatpeak.protocols import Progress
from flatpeak.runs.checkpoints import CheckpointState, newest_valid, read_checkpoint
from flatpeak.runs.directory import RunPaths
from flatpeak.training.stage import StageTrainer


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


def read_resume_point(config: RunConfig, progress: Progress) -> ResumePoint:
    """The newest whole checkpoints of the run that a recipe names; UserError where all of a stage's are damaged."""
    checkpoints = RunPaths(Path(config.run.directory) / config.run.name).checkpoints
    train, sft = (newest_valid(parent, notice=progress.notice) for parent in (checkpoints, checkpoints / "sft"))
    if train is not None:
        return ResumePoint(train=read_checkpoint(train))
    return ResumePoint(sft=read_checkpoint(sft) if sft else None)


def restore_trainer(trainer: StageTrainer, checkpoint: CheckpointState | None) -> int:
    """Load a stage's state from its checkpoint, if it has one; the number of its next step."""
    if checkpoint is None:
        return 1
    trainer.load(checkpoint.state, checkpoint.tensors)
    checkpoint.free_tensors()
    return checkpoint.step + 1
