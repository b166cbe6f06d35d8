"""A pool of worker processes that can be killed: calls of functions in, results or the reasons for their lack out."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import LifoQueue
from threading import Event, Lock
from typing import Any, Final, TypeVar

from flatpeak.errors import UserError
from flatpeak.rewards.workers.worker import ForkServer, add_loaded, limit_waiting
from flatpeak.rewards.workers.worker import WorkerError as WorkerError
from flatpeak.utils.child_process import ending, kill_group
from flatpeak.utils.user_code import user_files

T = TypeVar("T")

START_SECONDS: Final = 60.0
NOT_CALLED: Final = WorkerError("budget", "not called: the step's time for calls without a result was spent")


class WorkerPool:
    """Up to `size` processes that call functions; each starts when it is first needed and is replaced when it ends.

    A worker is forked from a fresh interpreter with this process's `sys.path`. It has none of its modules, so functions
    and arguments must pickle, and a script's own functions cannot go there. It loads a function once, and calls it many
    times: what a function keeps between calls is that worker's own, and is lost with it. SIGINT and SIGTERM leave
    workers alone: they end with the pool, with this process, or on SIGKILL, together with the processes they started.
    """

    def __init__(
        self,
        size: int,
        *,
        timeout: float,
        memory_bytes: int | None = None,
        forked: Callable[..., Any] | None = None,
    ) -> None:
        """`timeout` is in seconds, for one call, from when a worker gets it; loading its function does not count.

        `memory_bytes` is what one worker may allocate (RLIMIT_DATA, which only Linux enforces), what it has loaded
        included. A call that wants more has the reason `memory` where Python noticed, `died` where a library did.
        `forked` is a function that is slow to load and starts no threads: the process that workers are forked from
        loads it, so that a worker that was lost is replaced in milliseconds.
        """
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="flatpeak-worker")
        self._server = ForkServer(forked, memory_bytes=memory_bytes, seconds=START_SECONDS)
        self._workers = [_Worker(self._server) for _ in range(size)]
        # Last in, first out: a pool with little to do starts few processes.
        self._idle: LifoQueue[_Worker] = LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._owner = os.getpid()

    def __del__(self) -> None:  # of a pool that was not closed
        if os.getpid() == self._owner:  # in a process forked from it, the workers are not this copy's to end
            for worker in self._workers:
                worker.kill()
                worker.discard()
            self._server.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ready(self) -> None:
        """Load the `forked` function if that has not happened; where it cannot be loaded, calls end with the reason."""
        with contextlib.suppress(WorkerError, EOFError, OSError):
            self._server.ready()

    def submit(self, function: Callable[..., T], *arguments: Any, timeout: float | None = None) -> Future[T]:
        """Call the function in a worker, for `timeout` seconds (None: the pool's).

        The future raises WorkerError where there is no result, and a UserError of the function's as it is.
        """
        return self._threads.submit(self._call, function, arguments, timeout or self._timeout)

    def submit_each(
        self,
        function: Callable[..., T],
        calls: Iterable[tuple[Any, ...]],
        *,
        timeout: float | None = None,
        stop: Event | None = None,
    ) -> Future[list[T | WorkerError | UserError]]:
        """Call the function with each tuple of arguments, one after the other in one worker.

        The results in the order of the calls, with the reason in place of one that is missing. Each call has the whole
        `timeout` (None: the pool's); when one costs its worker, a fresh one goes on behind it, unless `stop` is set.
        """
        return self._threads.submit(self._call_each, function, list(calls), timeout or self._timeout, stop)

    def close(self) -> None:
        """Kill every worker, in the middle of a call too. Calls that had not begun are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill(forever=True)
        if not self._server.loaded:
            self._server.kill()  # threads that wait for it would wait for seconds
        self._threads.shutdown()
        for worker in self._workers:
            worker.discard()
        self._server.close()

    def _call(self, function: Callable[..., T], arguments: tuple[Any, ...], timeout: float) -> T:
        result = self._call_each(function, [arguments], timeout, None)[0]
        if isinstance(result, WorkerError | UserError):
            raise result
        return result

    def _call_each(
        self, function: Callable[..., T], calls: Sequence[tuple[Any, ...]], timeout: float, stop: Event | None
    ) -> list[T | WorkerError | UserError]:
        code = _dumps(function)
        if isinstance(code, WorkerError):
            return [code] * len(calls)
        results: list[Any] = [_dumps(arguments) for arguments in calls]
        travel = [index for index, message in enumerate(results) if isinstance(message, bytes)]
        worker = self._idle.get()
        try:
            answers = worker.call_each(code, [results[index] for index in travel], timeout, stop)
        finally:
            self._idle.put(worker)
        for index, answer in zip(travel, answers, strict=True):
            results[index] = answer
        return results


class _Worker:
    """One process at a time. Only `kill` may be called from a thread that is not using it."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self.pid: int | None = None
        self._pipe: Connection | None = None
        self._loaded: dict[bytes, Any] = {}
        self._over = False
        self._lock = Lock()

    def call_each(self, code: bytes, messages: Sequence[bytes], timeout: float, stop: Event | None) -> list[Any]:
        """A result, a WorkerError or a UserError for each message."""
        answers: list[Any] = []
        while len(answers) < len(messages):
            if stop is not None and stop.is_set():
                return answers + [NOT_CALLED] * (len(messages) - len(answers))
            try:
                pipe = self._ready(code)
            except WorkerError as error:
                return answers + [error] * (len(messages) - len(answers))
            answers += self._exchange(pipe, ("call", code, timeout, messages[len(answers) :]), timeout)
        return answers

    def kill(self, *, forever: bool = False) -> None:
        """End the process; a call that waits for its answer ends with `died`."""
        with self._lock:
            self._over = self._over or forever
            if self.pid is not None:
                kill_group(self.pid)

    def discard(self) -> int | None:
        """Drop the process and return its exit code, or minus its signal, if there was a process."""
        with self._lock:
            pid, self.pid = self.pid, None
        self._loaded = {}
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        return None if pid is None else self._server.end(pid)

    def _ready(self, code: bytes) -> Connection:
        """The pipe to a process that has loaded the function; WorkerError where it cannot be started."""
        if self._pipe is not None and self._pipe.poll():
            self.discard()  # it ended between two calls: nothing is lost
        try:
            pipe = self._pipe or self._start()
        except (EOFError, OSError) as error:
            ended = self.discard()
            reason = error if ended is None else ending(ended)
            raise WorkerError("died", f"a worker process did not start: {reason}") from error
        if code not in self._loaded:
            sources = (sys.path, user_files())
            (answer,) = self._exchange(pipe, ("load", code, START_SECONDS, sources), START_SECONDS)
            if isinstance(answer, Exception):
                raise answer
            add_loaded(self._loaded, code, True)
        return pipe

    def _exchange(self, pipe: Connection, request: tuple[str, bytes, float, Any], seconds: float) -> list[Any]:
        """Send a request and read its answers: at least one, and not all where the last one cost the process."""
        answers, expected = list[Any](), len(request[3]) if request[0] == "call" else 1
        try:
            limit_waiting(pipe, seconds)
            pipe.send_bytes(pickle.dumps(request))
            while len(answers) < expected:
                answers.append(_result(pipe.recv_bytes()))
                if isinstance(answers[-1], WorkerError) and answers[-1].reason == "memory":
                    self.discard()  # it has left by itself
                    break
        except (EOFError, OSError) as error:
            late = isinstance(error, BlockingIOError)  # the socket's own time limit
            if late:
                self.kill()
            ended = self.discard()
            if late or ended == -signal.SIGALRM:  # its own timer: on a machine too busy to look in time, it comes first
                answers.append(WorkerError("timeout", f"no answer from a worker process within {seconds:g} s"))
            else:
                answers.append(WorkerError("died", f"a worker process died: {ending(ended or 0)}"))
        return answers

    def _start(self) -> Connection:
        self._server.ready()  # without the lock: it may take seconds, and `kill` must not wait for it
        ours, theirs = socket.socketpair()
        self._pipe = pipe = Connection(ours.detach())
        with theirs, self._lock:
            if self._over:
                raise EOFError("the pool is closed")
            self.pid = self._server.fork(theirs)
        if not pipe.poll(START_SECONDS):
            self.kill()
        pipe.recv_bytes()
        self._loaded = {self._server.code: True}
        return pipe


def _result(answer: bytes) -> Any:
    try:
        outcome, value = pickle.loads(answer)
    except Exception as error:  # a result of a type that is not to be had here
        return WorkerError("raised", f"{type(error).__name__}: {error}")
    if outcome == "done":
        return value
    return UserError(value) if outcome == "refused" else WorkerError(outcome, value)


def _dumps(content: object) -> bytes | WorkerError:
    try:
        return pickle.dumps(content)
    except Exception as error:  # objects raise what they like here
        return WorkerError("unloadable", f"{type(error).__name__}: {error}")
