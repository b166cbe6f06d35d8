"""Worker processes that can be killed: a function with its arguments in, its result or why there is none out."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import LifoQueue
from threading import Lock
from typing import Any, Final, Literal, TypeVar

from flatpeak.errors import UserError

T = TypeVar("T")
Reason = Literal["raised", "died", "timeout", "unloadable"]

START_SECONDS: Final = 60.0
_SPARE_SECONDS: Final = 1.0
_OWN_TIMER: Final = "killed by SIGALRM"
# A process of its own, not one of `multiprocessing`: that would import the user's main module again, torch and all.
_BOOT: Final = (
    "import sys; descriptor, timeout, *sys.path = sys.argv[1:]; "
    "from flatpeak.rewards.workers import serve; serve(int(descriptor), float(timeout))"
)


class WorkerError(Exception):
    """A call that has no result; as text, one line that says why."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        """raised: by the function; died: its process; timeout: killed; unloadable: cannot travel to a process."""

    def __str__(self) -> str:
        return str(self.args[1])


class WorkerPool:
    """Up to `size` processes that call functions; each starts when it is first needed and is replaced when it ends.

    A worker is a fresh interpreter with this process's `sys.path`. It has none of its modules, so functions and
    arguments must pickle, and a script's own functions cannot go there. SIGINT and SIGTERM leave workers alone: they
    end with the pool, with this process, or on SIGKILL.
    """

    def __init__(self, size: int, *, timeout: float) -> None:
        """`timeout` is in seconds, for one call, from when a worker gets it."""
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="flatpeak-worker")
        self._workers = [_Worker(timeout) for _ in range(size)]
        # Last in, first out: a pool with little to do starts few processes.
        self._idle: LifoQueue[_Worker] = LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call the function in a worker. The future raises WorkerError where there is no result.

        A UserError of the function's is raised as it is.
        """
        return self._threads.submit(self._call, function, arguments)

    def close(self) -> None:
        """Kill every worker, in the middle of a call too. Calls that had not begun are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill(forever=True)
        self._threads.shutdown()
        for worker in self._workers:
            worker.discard()

    def _call(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        try:
            message = pickle.dumps((function, arguments))
        except Exception as error:  # objects raise what they like here
            raise WorkerError("unloadable", f"{type(error).__name__}: {error}") from error
        worker = self._idle.get()
        try:
            answer = worker.call(message)
        finally:
            self._idle.put(worker)
        outcome, value = pickle.loads(answer)
        if outcome == "done":
            return value  # type: ignore[no-any-return]
        raise UserError(value) if outcome == "refused" else WorkerError(outcome, value)


class _Worker:
    """One process at a time. Only `kill` may be called from a thread that is not using it."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._over = False
        self._lock = Lock()

    def call(self, message: bytes) -> bytes:
        """The answer to one call; WorkerError if there is none."""
        if self._process is not None and self._process.poll() is not None:
            self.discard()  # between two calls: nothing is lost
        try:
            pipe = self._pipe or self._start()
        except (EOFError, OSError) as error:
            raise WorkerError("died", f"a worker process did not start: {self.discard() or error}") from error
        try:
            pipe.send_bytes(message)
            return pipe.recv_bytes()
        except (EOFError, OSError) as error:
            late = isinstance(error, BlockingIOError)  # the socket's own time limit
            if late:
                self.kill()
            ended = self.discard()
            if late or ended == _OWN_TIMER:  # on a machine too busy to look in time, the worker's comes first
                text = f"no answer from a worker process within {self._timeout:g} s"
                raise WorkerError("timeout", text) from error
            raise WorkerError("died", f"a worker process died: {ended}") from error

    def kill(self, *, forever: bool = False) -> None:
        """End the process; whoever waits for its answer is told that it died."""
        with self._lock:
            self._over = self._over or forever
            if self._process is not None:
                self._process.kill()

    def discard(self) -> str | None:
        """Take the process's exit status and forget it; how it ended, if one was there."""
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is None:
            return None
        try:
            # It closes its end of the pipe a moment before it is gone.
            code = process.wait(_SPARE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(self._timeout), int(self._timeout % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        self._pipe = pipe = Connection(ours.detach())
        command = [sys.executable, "-P", "-u", "-c", _BOOT, str(theirs.fileno()), str(self._timeout), *sys.path]
        with theirs, self._lock:
            if self._over:
                raise EOFError("the pool is closed")
            # A worker inherits the mask. Ctrl-C and batch systems signal all processes of a job, and it is this one
            # that decides what happens then.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not pipe.poll(START_SECONDS):
            self.kill()
        pipe.recv_bytes()
        return pipe


def serve(descriptor: int, timeout: float) -> None:
    """What a worker runs: answer one call after another until the other end of the pipe is closed."""
    pipe = Connection(descriptor)
    try:
        pipe.send_bytes(b"ready")
        while True:
            message = pipe.recv_bytes()
            # The kernel ends a worker that hangs although nobody is left to kill it.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout + _SPARE_SECONDS)
            answer = _answer(message)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send_bytes(answer)
    except (EOFError, OSError):
        os._exit(0)  # whatever threads a function has left behind


def _answer(message: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(message)
    except Exception as error:  # imports run anything
        return pickle.dumps(("unloadable", f"{type(error).__name__}: {error}"))
    try:
        return pickle.dumps(("done", function(*arguments)))
    except UserError as error:
        return pickle.dumps(("refused", str(error)))
    except Exception as error:
        from flatpeak.rewards.calls import one_line  # loads asyncio, which few workers need

        return pickle.dumps(("raised", one_line(error)))
