"""The state of a sweep's runs on disk: records of outcomes, changed recipes, and the checkpoints to keep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import yaml

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import RunError, UserError
from flatpeak.experiments.config import SweepConfig, check_defined
from flatpeak.experiments.plan import Cell, PlannedRun, PrefixStep, SweepPlan
from flatpeak.runs.checkpoints import BEST, LAST, checkpoint_name, checkpoint_steps
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.files import write_atomic
from flatpeak.runs.manifest import changes, code_in_steps, flatten, read_starts
from flatpeak.runs.summary import RunSummary, read_summary
from flatpeak.utils.redaction import redact
from flatpeak.utils.user_code import REFERENCES, file_digest

CellStatus = Literal["done", "failed", "stopped", "missing"]
"""`stopped`: begun, and to be continued from its checkpoint; `missing`: not begun."""
_REMOVED = ".removed-"
# All of the section `run` except the seed: it cannot change a result, and a sweep sets the threads by its processes.
_HARMLESS = tuple(f"run.{name}" for name in type(RunConfig().run).model_fields if name != "seed")


@dataclass(frozen=True, kw_only=True)
class CellRecord:
    """The outcome of a run or prefix step, as last recorded by the sweep."""

    status: Literal["started", "done", "stopped", "failed"]
    reason: str | None = None
    prefix: str = ""
    """The fingerprint of the prefix that a run starts from; a prefix step's own fingerprint."""
    seconds: float = 0.0
    """Wall time of the last start."""
    code: str | None = None
    """For a call: the digest of its function's file when it began."""


@dataclass(frozen=True, kw_only=True)
class CellState:
    """The state of a run or prefix step, from all of its files."""

    status: CellStatus
    reason: str | None = None
    summary: RunSummary | None = None


def read_record(cell: Cell) -> CellRecord | None:
    """The record of a cell; None if there is none that can be read."""
    try:
        return CellRecord(**json.loads(cell.record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_record(cell: Cell, record: CellRecord) -> None:
    """Write the record of a cell atomically. Raises RunError if the disk refuses it."""
    try:
        cell.record.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cell.record, json.dumps(asdict(record)) + "\n")
    except OSError as error:
        raise RunError(
            f"{cell.record}: {error.strerror or error}; what is finished stays: make room and give the same command "
            "again"
        ) from None


def cell_state(cell: Cell) -> CellState:
    """The state of a cell. A run is done if its own summary says so, even if the sweep died before recording it."""
    record = read_record(cell)
    summary = None
    if isinstance(cell, PlannedRun):
        path = RunPaths(cell.path).summary
        summary = read_summary(path) if path.exists() else None
        done = summary is not None and summary.status == "done"
    else:
        done = record is not None and record.status == "done" and cell.path.exists()
    if done:
        return CellState(status="done", summary=summary)
    if record is None:
        return CellState(status="stopped" if summary else "missing", summary=summary)
    if record.status == "failed":
        return CellState(status="failed", reason=record.reason, summary=summary)
    return CellState(status="stopped", summary=summary)


def changed_keys(cell: Cell) -> str | None:
    """The settings in which a cell differs from its files on disk, as `key: old -> new`; None if there are none."""
    written_config = RunPaths(cell.path).config
    if cell.recipe is not None and written_config.exists():
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        old = yaml.load(written_config.read_text(encoding="utf-8"), Loader=loader)
        new = redact(json.loads(json.dumps(cell.recipe.model_dump(mode="json"))))
        changed = changes(redact(old), new).items()
        texts = [f"{key}: {change}" for key, change in changed if key not in _HARMLESS]
        if texts:
            return "; ".join(texts)
    record = read_record(cell)
    if record is None or record.prefix == cell.fingerprint:
        return None
    return "its prefix" if isinstance(cell, PlannedRun) else "its call, arguments or earlier prefix steps"


def changed_code(cell: Cell) -> tuple[str, ...]:
    """The user's functions, as `key=file.py:name`, whose file has changed since steps of the cell were made.

    Files that are gone, and manifests that cannot be read, count as unchanged.
    """
    then: Mapping[str, set[str]] = {}
    if cell.recipe is not None:
        references = flatten(cell.recipe.model_dump(mode="json"))
        then = code_in_steps(read_starts(RunPaths(cell.path).manifest))
    else:
        references = {"call": cell.call}
        record = read_record(cell)
        if record is not None and record.status == "done" and record.code is not None:  # others are repeated
            then = {"call": {record.code}}
    now = {key: file_digest(str(references.get(key, ""))) for key in then}
    changed = [key for key, digests in then.items() if now[key] is not None and digests != {now[key]}]
    return tuple(f"{key}={references[key]}" for key in changed)


def has_steps(cell: Cell) -> bool:
    """Whether a cell is done, or has a checkpoint after its start that a next start would keep."""
    paths = RunPaths(cell.path)
    steps = (*checkpoint_steps(paths.checkpoints), *checkpoint_steps(paths.sft_checkpoints))
    return any(steps) or cell_state(cell).status == "done"


def check_functions(cell: Cell) -> None:
    """Raise UserError if a file of a function in the recipe is missing, is not Python, or lacks the name.

    Nothing in it is run: this check is for runs that are to be deleted and could then not be made again.
    """
    recipe = {} if cell.recipe is None else flatten(cell.recipe.model_dump(mode="json"))
    for key, reference in recipe.items():
        if key.rpartition(".")[2] in REFERENCES and isinstance(reference, str) and ".py:" in reference:
            try:
                check_defined(reference, where=f"{key}={reference}")
            except UserError as error:
                raise UserError(f"{cell.label}: {error}; nothing was deleted") from None


def remove_cell(cell: Cell) -> None:
    """Delete a run or prefix step with its record. Remains after a kill do not have a run's name."""
    cell.record.unlink(missing_ok=True)
    if isinstance(cell, PrefixStep):
        cell.log.unlink(missing_ok=True)
    doomed = cell.path.with_name(f"{_REMOVED}{cell.path.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    if cell.path.exists():
        cell.path.rename(doomed)
        shutil.rmtree(doomed)


def prune_checkpoints(run: Path, *, keep: Literal["all", "last", "none"]) -> None:
    """Delete the checkpoints of a finished run except its last, or all; its summary lists the remaining ones."""
    if keep == "all":
        return
    paths = RunPaths(run)
    summary = read_summary(paths.summary)
    steps = checkpoint_steps(paths.checkpoints)
    for step in steps[:-1] if keep == "last" else steps:
        shutil.rmtree(paths.checkpoints / checkpoint_name(step))
    for step in checkpoint_steps(paths.sft_checkpoints):
        shutil.rmtree(paths.sft_checkpoints / checkpoint_name(step))
    for parent in (paths.checkpoints, paths.sft_checkpoints):
        for name in (BEST, LAST):
            if not (parent / name).exists():
                (parent / name).unlink(missing_ok=True)
    kept = tuple(checkpoint_name(step) for step in checkpoint_steps(paths.checkpoints))
    if kept != summary.checkpoints:
        content = json.loads(paths.summary.read_text(encoding="utf-8")) | {"checkpoints": list(kept)}
        write_atomic(paths.summary, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def refuse_changed(name: str, cells: list[Cell]) -> None:
    """Raise UserError if cells were made with other settings, naming the first cell and its keys."""
    changed = [cell for cell in cells if changed_keys(cell) is not None]
    if changed:
        first = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(
            f"{name}: {first.label}{more} was made with other settings ({changed_keys(first)}): put the old values "
            "back, choose another name for the sweep, or rerun what changed with --overwrite"
        )


def lost_rows(config: SweepConfig) -> str:
    """The arms and seeds of the sweep's last start that it does not name any more; empty if there are none."""
    path = Path(config.directory) / config.name / "sweep.yaml"
    if not path.is_file():
        return ""
    last = yaml.safe_load(path.read_text(encoding="utf-8"))
    arms = [name for name in last["arms"] if name not in config.arms]
    seeds = sorted(set(last["seeds"]) - set(config.seeds))
    return "; ".join(
        f"{kind} {', '.join(map(str, names))}" for kind, names in (("arms", arms), ("seeds", seeds)) if names
    )


def refuse_lost_rows(config: SweepConfig) -> None:
    """Raise UserError if the sweep's table has rows that it would lose."""
    if lost := lost_rows(config):
        raise UserError(
            f"--arm: the table of {Path(config.directory) / config.name} would lose its rows of {lost}: give another "
            "name=, or leave --arm out, which continues every arm"
        )


def affected(plan: SweepPlan) -> list[Cell]:
    """The cells whose settings or code changed, and all cells of the same seed after a changed prefix step."""
    cells: list[Cell] = []
    changed_seeds: set[int] = set()
    for cell in plan.by_seed:
        if cell.seed in changed_seeds or changed_keys(cell) is not None or changed_code(cell):
            cells.append(cell)
            if isinstance(cell, PrefixStep):
                changed_seeds.add(cell.seed)
    return cells


def changed_code_lines(plan: SweepPlan) -> list[str]:
    """A line for each user's function whose file has changed since cells on disk were made with it."""
    made: dict[str, list[str]] = {}
    for cell in plan.by_seed:
        for function in changed_code(cell) if has_steps(cell) else ():
            made.setdefault(function, []).append(cell.label)
    return [
        f"{labels[0]}{f' and {len(labels) - 1} more' if len(labels) > 1 else ''} ran with another text of the file "
        f"of {function}, and the table will hold both: put that text back, or rerun with --overwrite"
        for function, labels in made.items()
    ]
