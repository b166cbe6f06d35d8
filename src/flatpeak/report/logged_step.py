"""The rollouts of one step of a run."""

from __future__ import annotations

from pathlib import Path

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.errors import UserError
from flatpeak.runs.directory import RunPaths, run_hint
from flatpeak.runs.rollout_log import logged_steps


def logged_step(run: Path, step: int | None) -> tuple[int, Path]:
    """A step of a run and the file of its rollouts; None: the last that is logged. UserError if there is none."""
    paths = RunPaths(run)
    if not paths.is_run():
        raise UserError(f"{run} is not a run's directory{run_hint(run)}")
    steps = logged_steps(paths.rollouts)
    if not steps:
        raise UserError(f"{run} has no rollouts: {_reason_for_none(paths)}")
    step = max(steps) if step is None else step
    if step not in steps:
        raise UserError(f"{run} has no rollouts of step {step}: choose one of {', '.join(map(str, steps))}")
    return step, steps[step]


def _reason_for_none(paths: RunPaths) -> str:
    """The reason why a run has logged no rollouts, and the fix."""
    if paths.config.is_file() and not parse_config(load_recipe(paths.config)).run.log_rollouts_every:
        return "run.log_rollouts_every=0 logs none; raise it"
    return "no step of RL has been logged yet"
