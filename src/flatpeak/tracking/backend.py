"""The run facts and entries that trackers record, and the protocol that wraps each tracker's library."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

LEAST_ROOM = 2**20
"""Bytes of disk space that must be free, because some libraries do not report failed writes."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of a run that do not change while it runs; without secrets."""

    name: str
    directory: Path
    """The run's directory."""
    recipe: Mapping[str, Any]
    """The resolved recipe, as in config.yaml."""
    start: Mapping[str, Any]
    """Versions, commit, hardware and command of this start, as in the manifest."""
    group: str | None
    tags: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """The folder of the run for its trackers' ids and, unless a recipe sets another directory, their files."""
        return self.directory / "tracking"


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """The finite metrics of a row of metrics.jsonl."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Completions of a step, or the results of an evaluation."""

    name: str
    step: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def as_markdown(self) -> str:
        """The table in Markdown; a cell is one line."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


@dataclass(frozen=True, kw_only=True)
class NoticeRow:
    """A notice of the run."""

    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report page of the run, on disk."""

    path: Path


Content = MetricRow | Table | NoticeRow | Report


class Backend(Protocol):
    """A tracker's library, opened for one run. Every method may raise; all are called from one thread."""

    identity: str
    """The id by which a later start continues the run."""
    message: str | None
    """A message to show the user once."""
    rows_first: bool
    """Whether metric rows may be logged before tables of earlier steps, in fewer calls; false if steps must
    increase."""

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Record rows of metrics."""
        ...

    def log_table(self, table: Table) -> None:
        """Record a table under its name."""
        ...

    def log_notice(self, notice: NoticeRow) -> None:
        """Record a notice at its step."""
        ...

    def log_report(self, path: Path) -> None:
        """Record the report page."""
        ...

    def finish(self, status: str) -> None:
        """Write everything pending and close; `status` is done, stopped or failed."""
        ...


def check_writable(path: Path) -> None:
    """Raise OSError if `path` is gone or its disk is full, for libraries that write in the background."""
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    system = os.statvfs(path)
    if system.f_bavail * system.f_frsize < LEAST_ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
