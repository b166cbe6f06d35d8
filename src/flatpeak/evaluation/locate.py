"""What a user means by a model: a run, a checkpoint, any model directory, or a Hub name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatpeak.errors import UserError
from flatpeak.runs.checkpoints import BEST, LAST, checkpoint_name, verify_checkpoint
from flatpeak.runs.directory import RunPaths, run_hint


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A model, and the run it came from if it came from one."""

    path: str | None
    """A directory that `from_pretrained` loads, or a Hub name; None is the model that the recipe names."""
    recipe: Path | None
    """The run's config.yaml; None where the model comes from no run, or the file is missing."""
    run: Path | None = None
    """The run's directory."""


def locate_model(name: str) -> Located:
    """A run stands for its best checkpoint (its SFT's last where RL has not begun). Raises UserError if it has none."""
    path = Path(name)
    run = RunPaths(path)
    if run.is_run():
        candidates = (run.checkpoints / BEST, run.checkpoints / LAST, run.checkpoints / "sft" / LAST)
        for candidate in candidates:
            if candidate.is_dir():
                return _whole(_of_run(run, path=str(candidate)))
        raise UserError(f"{name} is a run without a checkpoint: give another, or go on with --resume")
    if path.is_dir():
        # Not resolved: a link beside a run is a model by itself.
        runs = (RunPaths(parent) for parent in path.absolute().parents)
        found = next((run for run in runs if run.is_run()), None)
        return _whole(Located(path=name, recipe=None) if found is None else _of_run(found, path=name))
    # A Hub name has at most one slash and no local folder before it: anything else was meant as a path.
    if (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())
    ):
        raise UserError(f"{name}: no such run or model directory{run_hint(name)}")
    hint = run_hint(name)
    if hint:
        raise UserError(f"{name} is no directory{hint}")
    return Located(path=name, recipe=None)


def _of_run(run: RunPaths, *, path: str | None) -> Located:
    """A model that belongs to a run."""
    return Located(path=path, recipe=run.config if run.config.is_file() else None, run=run.path)


def locate_stages(name: str) -> dict[str, Located]:
    """What a run's model was: `base` before training, `sft` after SFT, `best` and `last` of RL, those that there are.

    Stages that share a checkpoint stand together, as in `best = last`. Raises UserError for what is not a run.
    """
    run = RunPaths(Path(name))
    if not run.is_run():
        hint = run_hint(name) or "; give runs, or leave --stages out"
        raise UserError(f"--stages {name}: not a run's directory{hint}")
    start, after_sft = run.checkpoints / checkpoint_name(0), run.sft_checkpoints / LAST
    places = {
        # Without SFT, RL began with the model as it was.
        "base": start if start.is_dir() and not after_sft.is_dir() else None,
        "sft": after_sft,
        "best": run.checkpoints / BEST,
        "last": run.checkpoints / LAST,
    }
    by_place: dict[Path | None, list[str]] = {}
    for stage, place in places.items():
        if place is None or place.is_dir():
            by_place.setdefault(_stage_of(place, run), []).append(stage)
    return {
        " = ".join(stages): _whole(_of_run(run, path=None if place is None else str(place)))
        for place, stages in by_place.items()
    }


def _whole(located: Located) -> Located:
    """The same. UserError where it is a checkpoint that is not as it was written."""
    if located.path is not None:
        verify_checkpoint(Path(located.path))
    return located


def _stage_of(place: Path | None, run: RunPaths) -> Path | None:
    """The checkpoint behind a link; RL's step 0 is what SFT made."""
    if place is None:
        return None
    found = place.resolve()
    after_sft = run.sft_checkpoints / LAST
    begins = found == (run.checkpoints / checkpoint_name(0)).resolve()
    return after_sft.resolve() if begins and after_sft.is_dir() else found
