"""metrics.jsonl, with one line per step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from flatpeak.runs.files import LineWriter, Row, read_lines
from flatpeak.runs.notices import warn

STAGES = ("sft", "train")
"""The stages that have steps, in order; rows of evaluations are between their rows."""


class MetricsWriter:
    """A writer of rows `{"step": n, "stage": "train", "reward/mean": 0.5, ...}`; `write` returns once the row is
    written.

    A failed write must not end the run: if the disk is full, `notice` is called once and training continues. NaN and
    infinities are written as null, because JSON has no such numbers.
    """

    def __init__(self, path: Path, *, notice: Callable[[str], None] = warn) -> None:
        self.path = path
        self._notice = notice
        self._noticed = False
        self._lines = LineWriter(path)

    def write(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Append the row of a step."""
        row = {"step": step, "stage": stage} | {name: _json_number(value) for name, value in metrics.items()}
        try:
            self._lines.write(row)
        except OSError as error:
            if not self._noticed:
                self._noticed = True
                self._notice(f"{self.path}: {error.strerror}; metrics are not saved until the disk has space again")

    def sync(self) -> None:
        """Flush the rows to the disk."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file; all rows are already written."""
        self._lines.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def by_task(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The metrics `eval/<task>/<metric>` of a row by task, the main task first."""
    tasks: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if name.startswith("eval/"):
            task, metric = name.split("/", 2)[1:]  # the metric's own name may have slashes too
            tasks.setdefault(task, {})[metric] = value
    return tasks


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl, in order; lines that a crash or a full disk left incomplete are skipped."""
    return [row for _, row in read_lines(path)]


def missing_steps(path: Path, *, step: int, stage: str) -> list[int]:
    """The steps of a stage up to `step` that have no row."""
    present = {row["step"] for row in read_metrics(path) if row["stage"] == stage}
    return sorted(set(range(1, step + 1)) - present)


def truncate_metrics(path: Path, *, step: int | None, stage: str, evaluated: bool = True) -> None:
    """Truncate the file before the first row of a later step of `stage`, or of a later stage, and drop an incomplete
    last line.

    The remaining rows are those written by the time `step` of `stage` ended: rows of earlier stages, and evaluations up
    to and including this step's, or before this step's if `evaluated` is false. With `step` None, the file is emptied.
    """
    later = STAGES[STAGES.index(stage) + 1 :]
    if not path.exists():
        return
    end, reached = 0, False
    for line_end, row in read_lines(path):
        if step is None or row["stage"] in later or (row["stage"] == stage and row["step"] > step):
            break
        if not evaluated and reached and row["stage"] == "eval":
            break
        reached = reached or (row["stage"] == stage and row["step"] == step)
        end = line_end
    os.truncate(path, end)


def _json_number(value: float) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
