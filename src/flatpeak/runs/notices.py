"""notices.jsonl, a run's notices with their times and steps; and a notice that training and report share."""

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
    """Give a notice through Python's warnings, the default if the caller passes no other function."""
    warnings.warn(text, stacklevel=3)


class NoticeLog:
    """A log of rows `{"time": ..., "stage": "train", "step": 12, "text": ...}`, without secrets.

    Rows that are added before the run's directory exists stay in memory until `open`. A failed write must not end the
    run: if the disk is full, `failed` is called once and training continues.
    """

    def __init__(self, *, failed: Callable[[str], None] = warn) -> None:
        self._failed = failed
        self._path: Path | None = None
        self._lines: LineWriter | None = None
        self._waiting: list[Row] = []
        self._written_before: frozenset[str] = frozenset()
        self._position: Row = {"stage": START, "step": 0}
        self.forward: Callable[[str], None] = lambda text: None
        """A function that is called with the text of every notice written."""

    def open(self, path: Path, *, stage: str = START, step: int = 0) -> None:
        """Write the rows added so far, with `step` and `stage`; later notices are written immediately.

        A text that an earlier start of the run has written is not written again, because each start repeats the notices
        about the recipe and restarts its counts of failures.
        """
        self._path = path
        self.begin_step(stage, step)
        waiting, self._waiting = self._waiting, []
        try:
            self._written_before = frozenset(row["text"] for row in read_notices(path))
            self._lines = LineWriter(path)
        except OSError as error:
            self._failed(f"{path}: {error.strerror}; notices are not saved")
        for row in waiting:
            self._write(row | self._position)

    def begin_step(self, stage: str, step: int) -> None:
        """Assign the following notices to this step, including notices of its evaluation and checkpoint."""
        self._position = {"stage": stage, "step": step}

    def add(self, text: str) -> None:
        """Add a notice, which is written immediately or by `open`."""
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
            failed(f"{self._path}: {error.strerror}; notices are not saved until the disk has space again")

    def sync(self) -> None:
        """Flush the notices to the disk."""
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        """Close the file; later notices are not saved."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()


class RecordedProgress:
    """A Progress that also adds its notices to a log."""

    def __init__(self, progress: Progress, log: NoticeLog) -> None:
        self._progress = progress
        self._log = log
        self.after_evaluation: Callable[[], None] = lambda: None
        """Called after every evaluation that is passed on."""

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Pass an update on, as protocols.Progress defines it."""
        self._progress.update(stage, step=step, total=total, metrics=metrics)
        if stage == "eval":
            self.after_evaluation()

    def notice(self, text: str) -> None:
        """Log a notice and pass it on, as protocols.Progress defines it, without its secrets."""
        text = redact(text)
        self._log.add(text)
        self._progress.notice(text)

    def say(self, text: str) -> None:
        """Pass on a line about the run without logging it, if the display has a method for such lines."""
        getattr(self._progress, "say", lambda text: None)(redact(text))

    def sampled(self, completions: int, total: int) -> None:
        """Pass on how many completions of a request are sampled, if the display has a method for that."""
        getattr(self._progress, "sampled", lambda completions, total: None)(completions, total)


def read_notices(path: Path) -> list[Row]:
    """The rows of a notices.jsonl, in order; empty if the file does not exist."""
    return [row for _, row in read_lines(path) if "text" in row]


def truncate_notices(path: Path, *, step: int | None, stage: str) -> None:
    """Truncate the file before the first notice after `step` of `stage`, and drop an incomplete last line.

    With `step` None, the file is emptied.
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
    """The notice that no group in `scope` ("the last 3 steps") had rewards that differ, with figures that explain why.

    `reward` is the mean reward, or None if every score is missing. `truncated` and `unanswered` are shares of
    completions; `unanswered` is None if it is unknown. `limit` is rollout.max_new_tokens, if known.
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
