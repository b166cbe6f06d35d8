"""The table of a sweep: one row per run as CSV and JSON, typed, with a header; numbers survive a round trip exactly."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatpeak.errors import UserError, did_you_mean
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
