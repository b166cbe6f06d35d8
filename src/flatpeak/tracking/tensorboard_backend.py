"""TensorBoard: event files, with all scalars of a step in one event."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from flatpeak.tracking.backend import MetricRow, NoticeRow, RunFacts, Table, check_writable
from flatpeak.tracking.config import TensorBoardConfig


class TensorBoardBackend:
    """The event files of a run; every start adds a file."""

    message: str | None = None
    rows_first = False

    def __init__(self, config: TensorBoardConfig, facts: RunFacts, identity: str | None) -> None:
        own = Path(config.directory) / facts.name if config.directory else facts.folder / "tensorboard"
        if identity is not None:
            own = own.with_name(identity)
            own.mkdir(parents=True, exist_ok=True)
        else:
            own = _make_new(own)
        self.identity = own.name
        # The library's writer uses a thread, which dies with a traceback on the terminal after an error.
        self._path = own / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = self._path.open("wb")
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if identity is None:
            tags = {**facts.tags, **({"group": facts.group} if facts.group else {})}
            self._add_text("recipe", _as_code(facts.recipe), step=0)
            self._add_text("start", _as_code(facts.start), step=0)
            if tags:
                self._add_text("tags", _as_code(tags), step=0)

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Add one event for each row."""
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
            self._add(Summary(value=values), step=row.step)
        self._flush()

    def log_table(self, table: Table) -> None:
        """Add a table in Markdown."""
        self._add_text(table.name, table.as_markdown(), step=table.step)

    def log_notice(self, notice: NoticeRow) -> None:
        """Add a notice as text."""
        self._add_text("notices", notice.text, step=notice.step)

    def log_report(self, path: Path) -> None:
        """Add the path of the report, because event files cannot contain pages."""
        self._add_text("report", f"`{path}`", step=0)

    def finish(self, status: str) -> None:
        """Record how the run ended, and close the file."""
        self._add_text("status", status, step=0)
        self._file.close()

    def _add_text(self, tag: str, text: str, *, step: int) -> None:
        self._add(text_pb(tag, text), step=step)
        self._flush()

    def _add(self, summary: Summary, *, step: int) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())

    def _flush(self) -> None:
        """Flush the file. Raises OSError if the file was deleted, which a writer would not notice."""
        self._file.flush()
        check_writable(self._path)


def _make_new(path: Path) -> Path:
    """Create a folder that no other run writes to: `path`, or `path` with the suffix -2, -3, ..."""
    for number in itertools.count(1):
        own = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            own.mkdir(parents=True)
            return own
    raise AssertionError


def _as_code(content: object) -> str:
    """JSON as a block of code in Markdown: indented by a tab."""
    return "\n".join(f"\t{line}" for line in json.dumps(content, indent=1, ensure_ascii=False).splitlines())
