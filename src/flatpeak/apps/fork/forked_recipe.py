"""The recipe of a fork, derived from the run that it forks; does not import torch."""

from __future__ import annotations

from pathlib import Path

from flatpeak.config.load import Settings, apply_settings, load_recipe, merge, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.runs.directory import RunPaths


def source_run(run: str | Path) -> RunPaths:
    """The run with this directory, or with this name in `runs/`."""
    directory, named = RunPaths(Path(run)), RunPaths(Path("runs") / run)
    return named if not directory.is_run() and named.is_run() else directory


def forked_recipe(source: RunPaths, name: str, settings: Settings) -> tuple[RunConfig, RunConfig]:
    """The configurations of the run and of its fork. UserError if the directory is not a run's."""
    if not source.config.is_file():
        raise UserError(f"{source.path} is not a run's directory: give the directory, or the name of a run in runs/")
    recipe = load_recipe(source.config)
    before = parse_config(recipe)
    changed = apply_settings(recipe, settings)
    run = {"run": {"name": name, "directory": str(_runs_directory(source, before.run.name))}}
    return before, parse_config(merge(changed, run))


def _runs_directory(source: RunPaths, name: str) -> Path:
    """The directory of runs that contains the source, even after it was moved; a name may have several levels."""
    levels = Path(name).parts
    path = source.path.resolve() if source.path.name in ("", "..") else source.path
    return path.parents[len(levels) - 1] if path.parts[-len(levels) :] == levels else path.parent
