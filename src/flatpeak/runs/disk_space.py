"""Whether the checkpoints of a run fit on its disk, before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from flatpeak.errors import UserError
from flatpeak.runs.directory import RunPaths


def free_bytes(path: Path) -> int:
    """Bytes that are free on the file system of a path, which need not exist."""
    absolute = path.absolute()
    return shutil.disk_usage(next(one for one in (absolute, *absolute.parents) if one.exists())).free


def too_full(path: Path, *, checkpoint: int, free: int, count: int = 2) -> str:
    """The error of a disk without room for the checkpoints that a save needs, and its fix."""
    needed = "two checkpoints need" if count == 2 else "a checkpoint needs"
    return (
        f"{path}: {needed} {count * checkpoint:,} bytes, and {free:,} are free (a save keeps the old checkpoint until "
        "the new one is whole): free space, set run.directory to another disk, or train adapters with model.lora={}"
    )


def check_space(
    run: RunPaths, *, checkpoint: int, most: int, resume: bool, overwrite: bool, notice: Callable[[str], None]
) -> None:
    """UserError if a run's disk lacks room for a save; a notice if it lacks room for the `most` checkpoints at once.

    A resumed run has its old checkpoint already; a run that is overwritten gives its space back.
    """
    files = (path for path in run.checkpoints.rglob("*") if path.is_file())
    held = sum(file.stat().st_size for file in files)
    free = free_bytes(run.path) + (held if overwrite else 0)
    count = 1 if resume and run.saved_steps else min(2, most)
    if count * checkpoint > free:
        raise UserError(too_full(run.path, checkpoint=checkpoint, free=free, count=count))
    room = free + (held if resume else 0)
    if most * checkpoint > room:
        notice(
            f"{run.path}: up to {most} checkpoints need {most * checkpoint:,} bytes and {room:,} are there: lower "
            "run.keep_checkpoints, or set run.directory to another disk"
        )
