"""A run of a benchmark: its command line, the facts of a measurement, and its file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flatpeak.runs.manifest import describe_start

Row = dict[str, Any]
"""One line of a table: `name`, `contenders` with their measurements, and other results of the benchmark."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of one run of a benchmark."""

    rows: list[str]
    repeats: int
    scratch: Path
    """A directory that is deleted at the end."""
    quick: bool = False
    """Whether to check only that everything works."""
    model: str = ""
    """The model in the command, for benchmarks that need one."""

    def log(self, *names: str) -> Path:
        """The path of a file for a worker's output."""
        return self.scratch / ("-".join(names).replace(" ", "_").replace(",", "") + ".log")


def main(
    name: str,
    doc: str,
    *,
    rows: Sequence[str],
    quick: Sequence[str],
    repeats: int,
    measure: Callable[[Run, str], Row],
    left_out: Sequence[str] = (),
    model: str | None = None,
) -> list[Row]:
    """Parse the command line, measure row by row, and write the file after each, so that a stop loses at most one row.

    Rows in `left_out` are measured only on request. `model` is the help text of the argument MODEL.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model:
        parser.add_argument("model", metavar="MODEL", help=model)
    else:
        parser.set_defaults(model="")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--rounds", type=int, dest="repeats", default=repeats, help="counted rounds (%(default)s)")
    parser.add_argument("--row", action="append", choices=rows, help="only this row; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few rows and two rounds, to check that everything works")
    given = parser.parse_args()
    chosen = given.row or list(quick if given.quick else [row for row in rows if row not in left_out])
    content: dict[str, Any] = {"part": name, "quick": given.quick, "facts": facts(name), "rows": []}
    with TemporaryDirectory(prefix="flatpeak-bench-") as scratch:
        run = Run(
            rows=chosen,
            repeats=2 if given.quick else given.repeats,
            scratch=Path(scratch),
            quick=given.quick,
            model=given.model,
        )
        for row_name in chosen:
            started = time.perf_counter()
            say(f"{name}: {row_name}")
            row = measure(run, row_name)
            content["rows"].append({"name": row_name, "seconds": time.perf_counter() - started, **row})
            write_json(given.json, content)
    rows_measured: list[Row] = content["rows"]
    return rows_measured


def facts(benchmark: str) -> dict[str, Any]:
    """Versions, commit, hardware, and the command."""
    start = describe_start([Path(sys.executable).name, "-m", f"benchmarks.cpu.{benchmark}", *sys.argv[1:]])
    start["versions"]["trl"] = version("trl")
    return start


def say(text: str) -> None:
    """Print to standard error, with the time."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


@contextmanager
def model_directory(run: Run, name: str) -> Iterator[Path]:
    """A temporary directory for one row's model."""
    with TemporaryDirectory(prefix="model-", dir=run.scratch) as directory:
        yield Path(directory)
