"""A new run's directory made of another run up to a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flatpeak.errors import UserError
from flatpeak.runs.checkpoints import CheckpointState, broken_file, checkpoint_name, checkpoint_steps, read_checkpoint
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.manifest import changes, describe_start
from flatpeak.runs.metrics import truncate_metrics
from flatpeak.runs.notices import truncate_notices
from flatpeak.runs.rollout_log import logged_steps
from flatpeak.utils.redaction import redact


def read_origin(source: RunPaths, step: int) -> CheckpointState:
    """The checkpoint a fork begins from, verified. Raises UserError naming those at hand where there is none."""
    if not source.is_run():
        raise UserError(f"{source.path} is not a run's directory: give the directory, or the name of a run in runs/")
    steps = checkpoint_steps(source.checkpoints)
    if step not in steps:
        at_hand = f"choose one of {', '.join(map(str, steps))}" if steps else "RL has not begun in this run"
        raise UserError(f"{source.path} has no checkpoint of step {step}: {at_hand}")
    return read_checkpoint(source.checkpoints / checkpoint_name(step))


def copy_run(
    source: RunPaths,
    origin: CheckpointState,
    target: Path,
    *,
    before: Mapping[str, Any],
    resolved: Mapping[str, Any],
    command: Sequence[str] | None,
) -> None:
    """Make `target`, a run that stands where `source` stood after `origin`, with the recipe `resolved`.

    `before` is the source's recipe. It is made under another name and renamed: whole or absent. Raises UserError where
    `target` exists, or a file to be copied is missing or damaged.
    """
    if target.exists():
        raise UserError(
            f"{target} exists: choose another --name; a fork that was made is continued by "
            f"flatpeak train {target / 'config.yaml'} --resume"
        )
    temporary = target.with_name(f".fork-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _copy(source, origin, RunPaths(temporary))
        recipe = redact(json.loads(json.dumps(resolved)))
        forked = {"run": str(source.path.absolute()), "step": origin.step, "changed": changes(before, resolved)}
        manifest = redact(describe_start(command) | {"forked": forked})
        paths = RunPaths(temporary)
        paths.config.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
        paths.manifest.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.rename(target)
    except OSError as error:  # shutil.Error is one
        raise UserError(f"{target} cannot be made of {source.path} ({error}): free space or fix the cause") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy(source: RunPaths, origin: CheckpointState, target: RunPaths) -> None:
    history = origin.state["history"]
    wanted = {0, origin.step, history["best_step"]} & set(checkpoint_steps(source.checkpoints))
    for step in sorted(wanted):
        copy = target.checkpoints / checkpoint_name(step)
        shutil.copytree(source.checkpoints / checkpoint_name(step), copy)
        broken = broken_file(copy)
        if broken is not None:
            raise UserError(f"{source.checkpoints / copy.name / broken.name}: {broken.problem}; use another checkpoint")
    shutil.copy(source.metrics, target.metrics)
    evaluated = bool(origin.state.get("evaluated", True))
    truncate_metrics(target.metrics, step=origin.step, stage="train", evaluated=evaluated)
    if source.notices.exists():  # runs of earlier versions have none
        shutil.copy(source.notices, target.notices)
        truncate_notices(target.notices, step=origin.step, stage="train")
    target.rollouts.mkdir()
    for step, path in logged_steps(source.rollouts).items():
        if step <= origin.step:
            shutil.copy(path, target.rollouts)
    target.evaluations.mkdir()
    for row in history["evaluations"]:
        for path in source.evaluations.glob(f"{row['stage']}_{row['step']:06d}*.jsonl"):
            shutil.copy(path, target.evaluations)
