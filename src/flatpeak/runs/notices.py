"""notices.jsonl, the notices of a run with the time and step of each; and a notice that training and report share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from flatpeak.runs.files import LineWriter, Row, read_lines
from flatpeak.utils.redaction import redact

if TYPE_CHECKING:
    from flatpeak.protocols import Progress

START = "start"
"""The stage of notices that precede the first step."""
_ORDER = (START, "sft", "train")


def warn(text: str) -> None:
    """Give a notice through Python's warnings: the default where a caller passes no other way."""
    warnings.warn(text, stacklevel=3)


class NoticeLog:
    """A log of rows `{"time": ..., "stage": "train", "step": 12, "text": ...}`, without secrets.

    Rows from before the run's directory exists wait in memory for `open`. A notice is worth less than the run: where
    the disk is full, `failed` is called once and training continues.
    """

    def __init__(self, *, failed: Callable[[str], None] = warn) -> None:
        self._failed = failed
        self._path: Path | None = None
        self._lines: LineWriter | None = None
        self._waiting: list[Row] = []
        self._written_before: frozenset[str] = frozenset()
        self._position: Row = {"stage": START, "step": 0}
        self.forward: Callable[[str], None] = lambda text: None
        """A function that gets the text of every notice which is written."""

    def open(self, path: Path, *, stage: str = START, step: int = 0) -> None:
        """Write the waiting rows, dated by `step` of `stage`; from here on every notice is written at once.

        A text that an earlier start of the run has written is not written again: each start repeats the notices of the
        recipe, and counts failures anew.
        """
        self._path = path
        self.begin_step(stage, step)
        waiting, self._waiting = self._waiting, []
        try:
            self._written_before = frozenset(row["text"] for row in read_notices(path))
            self._lines = LineWriter(path)
        except OSError as error:
            self._failed(f"{path}: {error.strerror}; notices are not kept")
        for row in waiting:
            self._write(row | self._position)

    def begin_step(self, stage: str, step: int) -> None:
        """Date the following notices by this step, those of its evaluation and checkpoint included."""
        self._position = {"stage": stage, "step": step}

    def add(self, text: str) -> None:
        """Add one notice, to be written at once or by `open`."""
        row = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **self._position, "text": redact(text)}
        if self._lines is None:
            self._waiting.append(row)
        else:
            self._write(row)

    def _write(self, row: Row) -> None:
        if self._lines is None or row["text"] in self._written_before:
            return
        self.forward(row["text"])
        try:
            self._lines.write(row)
        except OSError as error:
            failed, self._failed = self._failed, lambda text: None
            failed(f"{self._path}: {error.strerror}; notices are not kept until there is room again")

    def sync(self) -> None:
        """Force the notices to the disk."""
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        """Close the file; later notices are not kept."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()


class RecordedProgress:
    """A Progress that also adds its notices to a log."""

    def __init__(self, progress: Progress, log: NoticeLog) -> None:
        self._progress = progress
        self._log = log

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Pass an update on, as protocols.Progress defines it."""
        self._progress.update(stage, step=step, total=total, metrics=metrics)

    def notice(self, text: str) -> None:
        """Log a notice and pass it on, as protocols.Progress defines it, without its secrets."""
        text = redact(text)
        self._log.add(text)
        self._progress.notice(text)

    def say(self, text: str) -> None:
        """Pass on a line about the run, which is not logged, where the display has a method for it."""
        getattr(self._progress, "say", lambda text: None)(redact(text))


def read_notices(path: Path) -> list[Row]:
    """The rows of a notices.jsonl, in order; none where there is no such file."""
    return [row for _, row in read_lines(path) if "text" in row]


def truncate_notices(path: Path, *, step: int | None, stage: str) -> None:
    """Cut the file before the first notice of a later step than `step` of `stage`, and drop a torn last line.

    `step` None empties the file.
    """
    if not path.is_file():
        return
    end = 0
    for line_end, row in read_lines(path):
        if row["stage"] not in _ORDER:
            continue
        if step is None or (_ORDER.index(row["stage"]), row["step"]) > (_ORDER.index(stage), step):
            break
        end = line_end
    os.truncate(path, end)


def no_signal_message(
    scope: str,
    *,
    reward: float | None,
    truncated: float,
    unanswered: float | None,
    limit: int | None,
    effect: str = "no weight changed",
) -> str:
    """The notice that `scope` ("the last 3 steps") had no group whose rewards differ, with the figures that explain it.

    `reward` is the mean, None where every score is missing; `truncated` and `unanswered` are shares of completions, the
    latter None where it is not known; `limit` is rollout.max_new_tokens, where that is known.
    """
    causes = ["no completion has a score" if reward is None else f"the mean reward is {reward:.3g}"]
    if unanswered:
        causes.append(f"no answer is found in {unanswered:.0%} of completions")
    causes.append(f"{truncated:.0%} are cut at rollout.max_new_tokens" + (f"={limit}" if limit else ""))
    listed = ", ".join(causes[:-1]) + f" and {causes[-1]}"
    return (
        f"no group of {scope} had rewards that differ, so {effect}: {listed}; see groups/informative_fraction in "
        "docs/metrics.md"
    )
