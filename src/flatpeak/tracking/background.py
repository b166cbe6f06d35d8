"""The thread that imports, opens and calls all trackers of a run, so that none of them slows training."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from flatpeak.errors import brief
from flatpeak.tracking.backend import Backend, Content, MetricRow, NoticeRow, Report, Table
from flatpeak.utils.redaction import redact

Value = TypeVar("Value")
ROOM = 4000
"""Maximum number of queued rows, tables and notices."""
INTERVAL = 10.0
"""Seconds between two batches: a request to MLflow costs about as much as ten rows of metrics."""
PAUSES = (0.0, 1.0, 3.0)
"""Seconds to wait before each attempt of a call."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run in one tracker; a resumed run continues it by the id saved in `state`."""

    name: str
    """The tracker's name in the settings."""
    open_backend: Callable[[str | None], Backend]
    """Opens the run with this id, or a new run for None."""
    state: Path
    """A JSON file that stores the id."""
    destination: str = ""
    """A digest of where the tracker records; if it changes, the tracker starts a new run."""
    earlier: Sequence[MetricRow] = ()
    """Rows logged before this start, which are the first rows of a new run."""

    def identity(self) -> str | None:
        """The id saved by an earlier start, or None."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads(self.state.read_text(encoding="utf-8"))
            if saved["destination"] == self.destination:
                return str(saved["id"])
        return None

    def keep(self, identity: str) -> None:
        """Save the id for later starts."""
        self.state.parent.mkdir(parents=True, exist_ok=True)
        self.state.write_text(json.dumps({"id": identity, "destination": self.destination}) + "\n", encoding="utf-8")


class TrackerThread:
    """A daemon thread that sends queued content to the trackers and gives at most one notice of trouble for each."""

    def __init__(self, runs: Sequence[TrackedRun]) -> None:
        self._runs = tuple(runs)
        self._queue: deque[Content] = deque()
        self._messages: deque[str] = deque()
        self._in_trouble: set[str] = set()
        self._called = self._runs[0].name
        """The tracker being called, or the last one called."""
        self._busy = True
        self._closing = threading.Event()
        self._abandoned = False
        self._status = "failed"
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether some content is not recorded yet."""
        return self._busy or bool(self._queue)

    def offer(self, content: Content) -> None:
        """Queue content to record, or drop it if the queue is full."""
        if len(self._queue) < ROOM:
            self._queue.append(content)
        else:
            self._trouble(self._called, "takes what is recorded too slowly: some of it is dropped")

    def messages(self) -> list[str]:
        """Return the notices since the last call, for the main thread to print."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def close(self, status: str, *, longest: float) -> None:
        """Let the trackers record the queued content and finish; abandon trackers that hang after `longest` seconds."""
        self._status = status
        self._closing.set()
        self._thread.join(longest)
        if self._thread.is_alive():
            self._abandoned = True
            self._trouble(self._called, "did not end in time; it and the trackers after it lack the last rows")

    def _run(self) -> None:
        opened = [(run.name, self._opened(run)) for run in self._runs]
        backends = {name: backend for name, backend in opened if backend is not None}
        last = False
        while not last:
            self._busy = False
            last = self._closing.wait(INTERVAL)  # wait before emptying the queue: nothing is queued after closing
            self._busy = True
            contents = [self._queue.popleft() for _ in range(len(self._queue))]
            for name, backend in backends.items():
                for call in _calls(backend, contents):
                    self._attempt(name, call)
        for name, backend in backends.items():
            self._attempt(name, partial(backend.finish, self._status))

    def _opened(self, run: TrackedRun) -> Backend | None:
        """Open a tracker and record the rows of earlier starts; None if it cannot be opened."""
        identity = run.identity()
        backend = self._attempt(run.name, lambda: run.open_backend(identity))
        if backend is None:
            return None
        if backend.message:
            self._messages.append(backend.message)

        def record_earlier() -> bool:
            backend.log_rows(run.earlier)
            return True

        # If the id is not saved, the next start begins another run with all rows.
        if identity is not None or not run.earlier or self._attempt(run.name, record_earlier):
            self._attempt(run.name, lambda: run.keep(backend.identity))
        return backend

    def _attempt(self, name: str, call: Callable[[], Value]) -> Value | None:
        """Return the value of a call, retrying it; None if all attempts fail."""
        self._called = name
        for pause in PAUSES:
            self._closing.wait(pause)  # no pauses at the end of a run
            if self._abandoned:
                return None
            try:
                return call()
            except ImportError as error:
                self._trouble(name, f"cannot be loaded ({brief(error)}): pip install 'flatpeak[{name}]'")
                return None
            # Third-party code that uses files and networks: training continues whatever it raises.
            except (Exception, SystemExit) as error:
                self._trouble(name, f"failed ({type(error).__name__}: {brief(error)})")
        return None

    def _trouble(self, name: str, text: str) -> None:
        """Report the first trouble of a tracker; later ones usually have the same cause."""
        if name not in self._in_trouble:
            self._in_trouble.add(name)
            self._messages.append(
                f"tracking.{name} {redact(text)}; the run goes on, and everything is in its own files"
            )


def _calls(backend: Backend, contents: Sequence[Content]) -> Iterator[Callable[[], None]]:
    """The calls that record the contents in order, with consecutive rows of metrics combined in one call."""
    if backend.rows_first:
        contents = sorted(contents, key=lambda content: not isinstance(content, MetricRow))
    for kind, group in groupby(contents, type):
        if kind is MetricRow:
            yield partial(backend.log_rows, [content for content in group if isinstance(content, MetricRow)])
            continue
        for content in group:
            match content:
                case Table():
                    yield partial(backend.log_table, content)
                case NoticeRow():
                    yield partial(backend.log_notice, content)
                case Report(path=path):
                    yield partial(backend.log_report, path)
