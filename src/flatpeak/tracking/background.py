"""A tracker behind a queue: a thread of its own imports the library and writes, and nothing of it reaches the run."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatpeak.errors import brief
from flatpeak.tracking.backend import Backend, Content, MetricRow, NoticeRow, Report, Table
from flatpeak.utils.redaction import redact

ROOM = 32 * 2**20
"""Bytes, as estimated, that may wait for one tracker; about ten thousand rows of metrics."""
BATCH_METRICS = 1000
"""Metrics in one batch: MLflow takes no more in a request."""
PAUSES = (0.0, 1.0, 3.0)
"""Seconds before each attempt to send a batch."""
REOPEN = 60.0
"""The longest pause between attempts to open a tracker, in seconds."""
LONGEST_IMPORT = 30.0
"""Seconds that the end of a run waits for a tracker that is not open yet."""
PATIENCE = 5.0
"""Seconds that the end of a run waits for a single call of an open tracker."""
LONGEST_END = 60.0
"""Seconds that the end of a run waits for one tracker in all."""

Position = tuple[int, int]
"""(step, rank within the step): completions are 0, metrics 1, an evaluation's 2."""
START: Position = (-1, 0)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Something to record, with its place in the run; None for what has none."""

    content: Content
    position: Position | None = None

    @property
    def size(self) -> int:
        """The bytes that it takes in memory, estimated."""
        match self.content:
            case MetricRow(metrics=metrics):
                return 200 + 120 * len(metrics)
            case Table(rows=rows):
                return 200 + sum(64 + len(str(cell)) for row in rows for cell in row)
            case _:
                return 400


class BackgroundTracker:
    """One tracker of one run, whose queue is bounded and whose errors become a single notice.

    `state` is a small JSON file with the tracker's id, the last position that was sent, the rows of metrics before it
    that were not, and how many other entries were dropped: a resumed run sends those rows of `earlier`, and all that
    follow that position. `destination` is a digest of where the tracker records: where that has changed, the run begins
    anew with all of `earlier`.
    """

    def __init__(
        self,
        name: str,
        open_backend: Callable[[str | None], Backend],
        *,
        state: Path,
        destination: str = "",
        earlier: Iterable[Entry] = (),
    ) -> None:
        self.name = name
        self._open_backend = open_backend
        self._path = state
        self._destination = destination
        saved = _read_state(state, destination=destination)
        self._identity: str | None = saved["id"]
        self._sent: Position = saved["sent"]
        self._dropped_before: int = saved["dropped"]
        self._unsent: set[Position] = saved["unsent"]
        """Rows of metrics that a later start sends, since metrics.jsonl has them."""
        self._lost: list[Position | None] = []
        self._already_sent = self._sent, frozenset(self._unsent)
        self._queue = deque(entry for entry in earlier if not self._is_sent(entry))
        self._bytes = 0  # of what is offered; the earlier rows are in memory anyway
        self._lock = threading.Lock()
        self._messages: deque[str] = deque()
        self._in_trouble = False
        self._open = False
        self._missing = False
        self._closing = threading.Event()
        self._abandoned = False
        self._status = "failed"
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracking-{name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Entries that are not recorded, over all starts of the run, but for those that a later start still sends."""
        return self._dropped_before + sum(lost is None or lost <= self._sent for lost in self._lost)

    def offer(self, entry: Entry) -> None:
        """Queue an entry, unless an earlier start has sent it or the queue is full."""
        if self._is_sent(entry) or self._missing:
            return
        size = entry.size
        with self._lock:
            if self._bytes + size <= ROOM:
                self._queue.append(entry)
                self._bytes += size
                return
            self._lose([entry])
        self._trouble("takes what is recorded too slowly: some of it is dropped")

    def messages(self) -> list[str]:
        """The notices since the last call: the run's own thread gives them."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    @property
    def pending(self) -> bool:
        """Whether something is not recorded yet."""
        with self._lock:
            return bool(self._queue) or self._busy_since is not None or not (self._open or self._missing)

    def begin_closing(self, status: str) -> None:
        """Ask the thread to write what is queued and to end."""
        self._status = status
        self._closing.set()

    def wait_closed(self, *, longest: float = LONGEST_END, opening: float | None = None) -> None:
        """Wait for the end of the thread, as long as it gets on; one that hangs is left behind.

        `opening`: seconds for a tracker that is not open yet, in place of `LONGEST_IMPORT`.
        """
        started = time.monotonic()
        while self._thread.is_alive():
            now, since = time.monotonic(), self._busy_since
            patience = min(longest, PATIENCE if self._open else opening or LONGEST_IMPORT)
            if now - started > longest or (since is not None and now - since > patience):
                with self._lock:
                    self._abandoned = True
                self._trouble("did not end in time; what it has not recorded yet comes with a later --resume")
                return
            self._thread.join(0.02)

    def _is_sent(self, entry: Entry) -> bool:
        sent, unsent = self._already_sent
        return entry.position is not None and entry.position <= sent and entry.position not in unsent

    def _lose(self, batch: Sequence[Entry]) -> None:
        for entry in batch:
            if isinstance(entry.content, MetricRow) and entry.position is not None:
                self._unsent.add(entry.position)
            else:
                self._lost.append(entry.position)

    def _run(self) -> None:
        backend = self._opened()
        if backend is None:
            return
        while not self._abandoned:
            while batch := self._next_batch(rows_first=backend.rows_first):
                self._deliver(backend, batch)
            if self._closing.is_set():
                break
            self._closing.wait(backend.interval)
        if not self._abandoned:
            self._attempt(lambda: backend.finish(self._status))

    def _opened(self) -> Backend | None:
        """The open tracker; None where its library is missing, or the run ends before it opens."""
        pause = 1.0
        while True:
            try:
                self._busy_since = time.monotonic()
                backend = self._open_backend(self._identity)
                self._busy_since = None
                self._identity, self._open = backend.identity, True
                if backend.message:
                    self._messages.append(backend.message)
                self._save()
                return backend
            except ImportError as error:
                self._trouble(f"cannot be loaded ({brief(error)}): pip install 'flatpeak[{self.name}]'")
                self._missing = True
                self._queue.clear()
                return None
            # Foreign code over files and networks: whatever it raises, training continues.
            except Exception as error:
                self._trouble(f"cannot be opened ({brief(error)})")
            self._busy_since = None
            if self._closing.wait(pause):
                return None
            pause = min(2 * pause, REOPEN)

    def _next_batch(self, *, rows_first: bool) -> list[Entry]:
        """The next entries: rows of metrics that fit into a batch, or one of another kind."""
        batch: list[Entry] = []
        others: list[Entry] = []
        metrics = 0
        with self._lock:
            while self._queue and not self._abandoned:
                content = self._queue[0].content
                if isinstance(content, MetricRow):
                    metrics += len(content.metrics)
                    if batch and metrics > BATCH_METRICS:
                        break
                    batch.append(self._queue.popleft())
                elif rows_first:
                    others.append(self._queue.popleft())
                else:
                    if not batch:
                        batch.append(self._queue.popleft())
                    break
            if not batch and others:
                batch.append(others.pop(0))
            self._queue.extendleft(reversed(others))
            self._bytes = max(0, self._bytes - sum(entry.size for entry in batch))
        return batch

    def _deliver(self, backend: Backend, batch: Sequence[Entry]) -> None:
        """Send a batch, in several attempts; what is still refused then is dropped."""
        for pause in PAUSES:
            self._closing.wait(pause)  # at the end of a run nothing waits
            if self._abandoned:
                return
            if self._attempt(lambda: _send(backend, batch)):
                positions = [entry.position for entry in batch if entry.position is not None]
                self._sent = max([self._sent, *positions])
                with self._lock:
                    self._unsent.difference_update(positions)
                self._save()
                return
        with self._lock:
            self._lose(batch)
        self._save()

    def _attempt(self, call: Callable[[], None]) -> bool:
        try:
            self._busy_since = time.monotonic()
            call()
        except Exception as error:
            self._trouble(f"failed ({type(error).__name__}: {brief(error)})")
            return False
        finally:
            self._busy_since = None
        return True

    def _trouble(self, text: str) -> None:
        """Give one notice; what follows it is the same trouble."""
        if not self._in_trouble:
            self._in_trouble = True
            self._messages.append(
                f"tracking.{self.name} {redact(text)}; the run goes on, everything is in its own files, and --resume "
                "sends the metrics that are missing then"
            )

    def _save(self) -> None:
        """Write the state; where the directory is gone the next start sends more than it needs to."""
        temporary = self._path.with_suffix(".tmp")
        with self._lock:
            if self._abandoned:
                return
            state = {
                "id": self._identity,
                "sent": list(self._sent),
                "unsent": sorted(map(list, self._unsent)),
                "dropped": self.dropped,
                "destination": self._destination,
            }
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_text(json.dumps(state) + "\n", encoding="utf-8")
                temporary.replace(self._path)
            except OSError as error:
                self._trouble(f"cannot keep its state ({error.strerror})")


def _send(backend: Backend, batch: Sequence[Entry]) -> None:
    match batch[0].content:
        case MetricRow():
            backend.log_rows([entry.content for entry in batch if isinstance(entry.content, MetricRow)])
        case Table() as table:
            backend.log_table(table)
        case NoticeRow() as notice:
            backend.log_notice(notice)
        case Report(path=path):
            backend.log_report(path)


def _read_state(path: Path, *, destination: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["destination"] != destination:
            raise ValueError(destination)
        step, rank = content["sent"]
        unsent = {(int(step), int(rank)) for step, rank in content.get("unsent", ())}
        sent = (int(step), int(rank))
        return {"id": content["id"], "sent": sent, "unsent": unsent, "dropped": int(content["dropped"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"id": None, "sent": START, "unsent": set(), "dropped": 0}
