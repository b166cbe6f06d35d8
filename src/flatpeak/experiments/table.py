"""The table of a sweep: one row per run as CSV and JSON, typed, with a header; values chosen from it.

Numbers survive a round trip exactly.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatpeak.errors import UserError, did_you_mean
from flatpeak.experiments.config import TunedOnConfig
from flatpeak.runs.files import write_atomic

Cell = Any
"""A value of the table: None, bool, int, float, str, or a list or mapping of them."""

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|inf|nan)")
_INTEGER = re.compile(r"[-+]?\d+")
_TIMES = ("seconds", "time/", "throughput/")


@dataclass(frozen=True, kw_only=True)
class SweepTable:
    """Rows of equal columns, under a header of `key: text` lines."""

    header: Mapping[str, str]
    """Version, commit, command, hardware, torch and seeds: the `# key: text` lines."""
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Cell], ...]

    def column(self, name: str) -> list[Cell]:
        """The values of a column. UserError if the table lacks it."""
        if name not in self.columns:
            raise UserError(f"the table has no column {name!r}{did_you_mean(name, self.columns)}")
        return [row[name] for row in self.rows]

    def without_times(self) -> SweepTable:
        """The table without the columns that measure time, so that equal runs have equal tables."""
        columns = tuple(name for name in self.columns if not name.startswith(_TIMES))
        return replace(self, columns=columns, rows=tuple({key: row[key] for key in columns} for row in self.rows))


def write_table(table: SweepTable, path: Path) -> None:
    """Write a table atomically: CSV under comment lines, or JSON, depending on the path's suffix."""
    write_atomic(path, to_json(table) if path.suffix == ".json" else to_csv(table))


def to_csv(table: SweepTable) -> str:
    """CSV under `# key: text` lines; floats as Python's repr, None empty, lists and mappings as JSON."""
    out = io.StringIO()
    for key, text in table.header.items():
        line = f"# {key}: {' '.join(text.split())}\n"
        out.write(line.encode("utf-8", "backslashreplace").decode("utf-8"))
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.rows:
        writer.writerow([_to_text(row.get(name)) for name in table.columns])
    return out.getvalue()


def to_json(table: SweepTable) -> str:
    """A JSON object with header, columns and rows, one row per line."""
    rows = ",\n".join("  " + json.dumps({name: row.get(name) for name in table.columns}) for row in table.rows)
    head = {"header": dict(table.header), "columns": list(table.columns)}
    return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{rows}\n ]\n}}\n'


def read_table(path: str | Path) -> SweepTable:
    """Read table.csv or table.json. Raises UserError if the file is not a table."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets mark UTF-8 by a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give the table.csv of a sweep") from None
    try:
        return _from_json(text) if path.suffix == ".json" else _from_csv(text)
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"{path}: not a sweep's table ({error}); give the table.csv that a sweep wrote") from None


def _from_json(text: str) -> SweepTable:
    content = json.loads(text)
    columns = tuple(content["columns"])
    rows = tuple({name: row[name] for name in columns} for row in content["rows"])
    return SweepTable(header=dict(content["header"]), columns=columns, rows=rows)


def _from_csv(text: str) -> SweepTable:
    header: dict[str, str] = {}
    lines = text.splitlines(keepends=True)
    start = 0
    while start < len(lines) and lines[start].startswith("#"):
        key, _, value = lines[start][1:].strip().partition(": ")
        header[key] = value
        start += 1
    reader = csv.reader(io.StringIO("".join(lines[start:]), newline=""), strict=True)
    columns = tuple(next(reader, ()))
    if not columns or len(set(columns)) < len(columns):
        raise ValueError("it has no line of distinct column names")
    rows: list[dict[str, Cell]] = []
    for cells in reader:
        if not cells:
            continue  # an empty line
        if len(cells) != len(columns):
            raise ValueError(f"row {len(rows) + 1} has {len(cells)} cells for {len(columns)} columns")
        rows.append({name: _from_text(cell) for name, cell in zip(columns, cells, strict=True)})
    return SweepTable(header=header, columns=columns, rows=tuple(rows))


def _to_text(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | list | tuple | Mapping):
        return json.dumps(value)
    if isinstance(value, str):
        # Text that would be read back as something else is quoted.
        return value if _is_plain(value) else json.dumps(value)
    return repr(value)


def _is_plain(text: str) -> bool:
    # A carriage return would be read as the end of a line, and half of a surrogate pair cannot be UTF-8.
    if re.search("[\r\ud800-\udfff]", text):
        return False
    try:
        return bool(_from_text(text) == text)
    except ValueError:
        return False


def _from_text(text: str) -> Cell:
    if text == "":
        return None
    if text in ("true", "false") or text[0] in '"[{':
        return json.loads(text)
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


@dataclass(frozen=True, kw_only=True)
class TunedValues:
    """The values chosen for an arm's axes, and the evidence for them."""

    axes: Mapping[str, Any]
    mean: float
    """The mean of the metric over the tuning seeds."""
    seeds: tuple[int, ...]
    candidates: int
    """The number of combinations of values compared."""
    metric: str

    def __str__(self) -> str:
        axes = ", ".join(f"{key}={value}" for key, value in self.axes.items())
        seeds = f"{self.mean:.4g} over {len(self.seeds)} tuning seeds"
        return f"{axes}, best of {self.candidates} by {self.metric} ({seeds})"


def read_tuning(config: TunedOnConfig, seeds: Sequence[int]) -> SweepTable:
    """The table to tune on. Raises UserError if it lacks the metric, or shares a seed with this sweep."""
    table = read_table(config.table)
    for column in ("arm", "seed", config.metric):
        table.column(column)  # raises if it is missing, with the nearest name
    shared = sorted(set(seeds) & set(table.column("seed")))
    if shared:
        raise UserError(
            f"tuned_on: seed {shared[0]} is in {config.table} too, and values chosen on a seed cannot be reported on "
            "it: give the sweep other seeds"
        )
    return table


def best_values(
    config: TunedOnConfig, table: SweepTable, arm: str, candidates: Sequence[Mapping[str, Any]]
) -> TunedValues:
    """The candidate with the best mean over the table's seeds; the first of equal ones.

    Raises UserError if a candidate has no rows, if one of its runs is not done, or if candidates were run with
    different seeds.
    """
    scored = [_mean(config, table, arm, axes) for axes in candidates]
    if len({seeds for _, seeds in scored}) > 1:
        raise UserError(
            f"tuned_on: the values of arm {arm} were run with different seeds in {config.table}: finish that sweep"
        )
    sign = 1 if config.best == "max" else -1
    index = max(range(len(candidates)), key=lambda number: sign * scored[number][0])
    mean, seeds = scored[index]
    return TunedValues(axes=candidates[index], mean=mean, seeds=seeds, candidates=len(candidates), metric=config.metric)


def _mean(config: TunedOnConfig, table: SweepTable, arm: str, axes: Mapping[str, Any]) -> tuple[float, tuple[int, ...]]:
    """The mean of the metric over the runs of one combination, and their seeds."""
    values = ", ".join(f"{key}={value}" for key, value in axes.items())
    unknown = [key for key in axes if key not in table.columns]
    rows = [
        row
        for row in table.rows
        if row["arm"] == arm and not unknown and all(_equal(row[key], value) for key, value in axes.items())
    ]
    if not rows:
        raise UserError(
            f"tuned_on: {config.table} has no run of arm {arm} with {values}: add it to the tuning sweep and run that, "
            "or leave the value out here"
        )
    for row in rows:
        value = row[config.metric]
        usable = isinstance(value, int | float) and math.isfinite(value)
        # A table without the column contains only finished runs.
        status = row.get("status", "done")
        if status != "done" or not usable:
            problem = f"is {status}" if status != "done" else f"has no {config.metric}"
            raise UserError(
                f"tuned_on: the run of arm {arm} with {values}, seed {row['seed']}, {problem} in {config.table}: "
                f"run the tuning sweep again until {Path(config.table).name} is whole"
            )
    seeds = [row["seed"] for row in rows]
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise UserError(
            f"tuned_on: {config.table} has {seeds.count(twice)} runs of arm {arm} with {values}, seed {twice}, which "
            "differ in settings that are no axes here: give these as axes too, or tune on a table without them"
        )
    mean = math.fsum(row[config.metric] for row in rows) / len(rows)
    return mean, tuple(sorted(seeds))


def _equal(cell: Any, value: Any) -> bool:
    if isinstance(cell, bool) != isinstance(value, bool):
        return False
    return bool((list(value) if isinstance(value, tuple) else value) == cell)
