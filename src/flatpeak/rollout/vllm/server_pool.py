"""The pool of servers: each request goes to the server with the fewest; unavailable servers are pinged."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from flatpeak.errors import RunError, StoppedError, UserError
from flatpeak.rollout.vllm.http_client import LostAnswerError, ServerError, StatusError, UnreachableError
from flatpeak.rollout.vllm.server import Server
from flatpeak.rollout.vllm.weight_versions import WeightVersion

T = TypeVar("T")
FIRST_DELAY: Final = 0.5
LONGEST_DELAY: Final = 30.0
"""Seconds before the first retry, and the most before later ones; the actual delay is random, at least half of it."""
ANNOUNCED_AFTER: Final = 5.0
"""Seconds without any server after which a notice says so."""
_POLL_SECONDS: Final = 0.2
"""Seconds between checks for a stop signal."""


@dataclass
class _Absence:
    """The unavailability of a server."""

    since: float
    tries: int
    until: float
    """Time of the next attempt."""
    reason: str
    unreachable: bool
    """Whether it gets no requests until it answers a ping, because a request might wait for the whole timeout."""
    pinging: bool = False


class ServerPool:
    """Chooses servers by load, and avoids failing servers for increasing times."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        max_concurrency: int,
        patience: float,
        first_delay: float = FIRST_DELAY,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`patience`: seconds without any server before a run fails. `stopping`: whether to give up at once."""
        self.servers = tuple(servers)
        self.stopping = stopping
        self.notice: Callable[[str], None] = lambda text: None
        self._max_concurrency = max_concurrency
        self._patience = patience
        self._first_delay = first_delay
        self._absences: dict[Server, _Absence] = {}
        self._changed = threading.Condition()
        self._is_announced = False
        self._jitter = random.Random()  # separate, so that retries do not change other random numbers
        self._next = 0

    def connect(self) -> None:
        """Connect to every server; UserError if any is unusable."""
        for server in self.servers:
            try:
                server.connect()
                server.open_transfer()
            except ServerError as error:
                if isinstance(error, StatusError) and error.status == 401:
                    raise UserError(
                        f"{server.url} refuses the key ({error}): set rollout.engine.api_key_env to the "
                        "variable with the right key"
                    ) from error
                if not isinstance(error, UnreachableError | LostAnswerError):
                    raise UserError(f"rollout.engine.urls: {server.url} cannot be used: {error}") from error
                raise UserError(
                    f"rollout.engine.urls: no vLLM server answers at {server.url} ({error}): start one with flatpeak "
                    "serve, or correct the address"
                ) from error

    def prepare(self, version: WeightVersion) -> None:
        """Give all servers these weights, in parallel; an unavailable server gets them when it returns.

        It does not wait for servers that are known to be unreachable.
        """
        with self._changed:
            self._ping_absent(time.monotonic())
            present = [server for server in self.servers if not self._is_unreachable(server)]
        if not present:
            return

        def one(server: Server) -> None:
            try:
                server.prepare(version)
            except ServerError as error:
                server.mark_dead()
                self.failed(server, error)
            else:
                self.succeeded(server)

        with ThreadPoolExecutor(len(present)) as threads:
            asked = [threads.submit(one, server) for server in present]
            with closing(self.completed(asked, abandoned=threading.Event())) as outcomes:
                for outcome in outcomes:
                    outcome.result()

    def completed(
        self, futures: Sequence[Future[T]], *, abandoned: threading.Event
    ) -> Generator[Future[T], None, None]:
        """Futures of requests as they finish; StoppedError once the run is to stop.

        Closing it sets `abandoned` and aborts the requests without an answer.
        """
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                yield from done
                self._announce_absence()
                if waiting and self.stopping():
                    raise StoppedError("the run was asked to stop while it waited for an answer")
        finally:
            abandoned.set()
            for future in futures:
                future.cancel()
            # More than once, because a thread may have been about to send its request.
            while unfinished := [future for future in futures if not future.done()]:
                for server in self.servers:
                    server.abort()
                wait(unfinished, timeout=_POLL_SECONDS)

    @contextmanager
    def acquire(self, *, given_up: Callable[[], bool]) -> Iterator[Server]:
        """The server with the fewest requests, once a server has capacity for another.

        RunError if no server was usable for `patience` seconds; StoppedError if the run is to stop first, or once
        `given_up()` is true.
        """
        server = self._choose(given_up)
        try:
            yield server
        finally:
            with self._changed:
                server.in_flight -= 1
                self._changed.notify_all()

    def failed(self, server: Server, error: ServerError, *, after: float | None = None) -> None:
        """Avoid a server for `after` seconds if it gave them, else for increasing times."""
        with self._changed:
            now = time.monotonic()
            absence = self._absences.get(server)
            tries = absence.tries + 1 if absence else 1
            longest = min(self._first_delay * 2 ** (tries - 1), LONGEST_DELAY)
            delay = min(after, LONGEST_DELAY) if after is not None else longest
            self._absences[server] = _Absence(
                since=absence.since if absence else now,
                tries=tries,
                until=now + delay * self._jitter.uniform(0.5, 1.0) if after is None else now + delay,
                reason=str(error),
                unreachable=isinstance(error, UnreachableError | LostAnswerError),
            )
            self._changed.notify_all()

    def succeeded(self, server: Server) -> None:
        """Note that a server works."""
        with self._changed:
            if self._absences.pop(server, None):
                self._is_announced = False
                self._changed.notify_all()

    def sleep(self) -> None:
        """Put servers that have sleep mode to sleep."""
        for server in self.servers:
            with suppress(ServerError):
                server.sleep()

    def close(self) -> None:
        """Close the connections for weights."""
        for server in self.servers:
            server.close()

    def _choose(self, given_up: Callable[[], bool]) -> Server:
        with self._changed:
            while True:
                if given_up() or self.stopping():
                    raise StoppedError("the run was asked to stop while it waited for a server")
                now = time.monotonic()
                self._ping_absent(now)
                ready = [server for server in self.servers if self._ready(server, now)]
                if ready:
                    # Servers with equal load take turns.
                    order = self.servers[self._next :] + self.servers[: self._next]
                    server = min(ready, key=lambda one: (one.in_flight, order.index(one)))
                    self._next = (self.servers.index(server) + 1) % len(self.servers)
                    server.in_flight += 1
                    return server
                self._check_patience(now)
                self._changed.wait(_POLL_SECONDS)

    def _ready(self, server: Server, now: float) -> bool:
        absence = self._absences.get(server)
        if absence is None:
            return server.in_flight < self._max_concurrency
        # A single request tests whether it works again.
        return not absence.unreachable and now >= absence.until and server.in_flight == 0

    def _is_unreachable(self, server: Server) -> bool:
        absence = self._absences.get(server)
        return absence is not None and absence.unreachable

    def _ping_absent(self, now: float) -> None:
        """Ping the unreachable servers that are due, each in a thread without waiting for it."""
        for server, absence in self._absences.items():
            if absence.unreachable and not absence.pinging and now >= absence.until:
                absence.pinging = True
                threading.Thread(target=self._ping, args=(server, absence), name="vllm-ping", daemon=True).start()

    def _ping(self, server: Server, absence: _Absence) -> None:
        try:
            server.ping()
        except ServerError as error:
            self.failed(server, error)
        else:
            with self._changed:
                absence.unreachable = absence.pinging = False
                self._changed.notify_all()

    def _announce_absence(self) -> None:
        """Give a notice once no server could be used for some seconds, which the run may wait for much longer."""
        with self._changed:
            due = not self._is_announced and self._are_absent(ANNOUNCED_AFTER, time.monotonic())
            self._is_announced = self._is_announced or due
            text = f"no server can be used ({self._reasons()}): waiting up to {self._patience:g} s for one"
        if due:
            self.notice(text)

    def _check_patience(self, now: float) -> None:
        if self._are_absent(self._patience, now):
            raise RunError(
                f"no server could be used for {self._patience:g} s ({self._reasons()}): restart them and continue with "
                "--resume, with other rollout.engine.urls if their addresses have changed"
            )

    def _are_absent(self, seconds: float, now: float) -> bool:
        """Whether no server could be used for so long."""
        absences = list(self._absences.values())
        return len(absences) == len(self.servers) and all(now - absence.since > seconds for absence in absences)

    def _reasons(self) -> str:
        return "; ".join(f"{server.url}: {absence.reason}" for server, absence in self._absences.items())
