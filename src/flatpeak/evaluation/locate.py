"""What a user means by a model: a run, a checkpoint, any model directory, or a Hub name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatpeak.errors import UserError
from flatpeak.runs.checkpoints import BEST, LAST
from flatpeak.runs.directory import RunPaths


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A model, and the run it came from if it came from one."""

    path: str
    """A directory that `from_pretrained` loads, or a Hub name."""
    recipe: Path | None
    """The run's config.yaml."""


def locate_model(name: str) -> Located:
    """A run stands for its best checkpoint (its SFT's last where RL has not begun). Raises UserError if it has none."""
    path = Path(name)
    run = RunPaths(path)
    if run.is_run():
        candidates = (run.checkpoints / BEST, run.checkpoints / LAST, run.checkpoints / "sft" / LAST)
        for candidate in candidates:
            if candidate.is_dir():
                return Located(path=str(candidate), recipe=run.config)
        raise UserError(f"{name} is a run without a checkpoint: give another, or go on with --resume")
    if path.is_dir():
        runs = (RunPaths(parent) for parent in path.absolute().parents)
        return Located(path=name, recipe=next((run.config for run in runs if run.is_run()), None))
    # A Hub name has at most one slash and no local folder before it: anything else was meant as a path.
    if (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())
    ):
        raise UserError(f"{name}: no such run or model directory")
    return Located(path=name, recipe=None)
