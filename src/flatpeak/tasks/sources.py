"""Rows of a data set, from a file or the Hub, each with words that say where it stands."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatpeak.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row as it was read."""

    where: str
    """For error messages: `train.jsonl line 7`."""
    values: dict[str, Any]
    """By column name."""


def read_file(path: str, *, option: str) -> Iterator[Row]:
    """The rows of a JSONL, JSON or CSV file, told apart by its ending. UserError with file and line of a bad one."""
    file = Path(path).expanduser()
    if not file.is_file():
        problem = "is a directory" if file.is_dir() else "does not exist"
        raise UserError(f"{option}={path}: {problem}; name a .jsonl, .json or .csv file")
    match file.suffix.lower():
        case ".jsonl" | ".ndjson":
            return read_jsonl(file)
        case ".json":
            return _read_json(file)
        case ".csv":
            return _read_csv(file)
        case suffix:
            raise UserError(
                f"{option}={path}: cannot read {suffix or 'a file without an ending'}; use .jsonl, .json or .csv"
            )


def read_jsonl(file: Path) -> Iterator[Row]:
    """One JSON object per line; blank lines are passed over."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file} line {number}"
            text = _decode(line, where=where)
            if text.strip():
                yield Row(where=where, values=_object(_parse(text, where=where), where=where))


def _read_json(file: Path) -> Iterator[Row]:
    rows = _parse(_decode(file.read_bytes(), where=str(file)), where=str(file))
    if not isinstance(rows, list):
        raise UserError(f"{file}: a .json file holds one list of objects; name it .jsonl if it has one object per line")
    for number, row in enumerate(rows, start=1):
        where = f"{file} row {number}"
        yield Row(where=where, values=_object(row, where=where))


def _read_csv(file: Path) -> Iterator[Row]:
    text = _decode(file.read_bytes(), where=str(file))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header) or not all(header):
            raise UserError(f"{file} line 1: the header needs a distinct name for every column, not {header}")
        for cells in reader:
            where = f"{file} line {reader.line_num}"
            if cells and len(cells) != len(header):
                raise UserError(
                    f"{where}: {len(cells)} cells under {len(header)} columns; quote cells that hold commas"
                )
            if cells:
                yield Row(where=where, values=dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise UserError(f"{file} line {reader.line_num}: not valid CSV ({error}); repair or remove it") from error


def read_hub(name: str, *, config: str | None, split: str, path_option: str) -> Iterator[Row]:
    """The rows of a data set on the Hugging Face Hub; `path_option` is where a local copy could be given instead."""
    from datasets import load_dataset  # here, because it is slow to import and a run on files never needs it

    try:
        dataset = load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"{name} (config {config}, split {split}) cannot be loaded from the Hub: {reason}; check the name and the "
            f"network, or give a local copy as {path_option}"
        ) from error
    for number, values in enumerate(dataset, start=1):
        yield Row(where=f"{name} {split} row {number}", values=values)


def _decode(data: bytes, *, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text; save the file as UTF-8") from error


def _parse(text: str, *, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not valid JSON ({error.msg} at its line {error.lineno}, column {error.colno}); repair it"
        ) from error


def _object(value: Any, *, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object with named columns, found {type(value).__name__}")
    return value
