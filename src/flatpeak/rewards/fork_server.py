"""A process that has loaded a slow function once, and from which workers are forked in milliseconds."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, Final

from flatpeak.rewards import processes
from flatpeak.rewards.processes import FORK, WorkerError

_BOOT: Final = (
    "import sys; descriptor, memory, *sys.path = sys.argv[1:]; "
    "from flatpeak.rewards.serving import serve_forks; serve_forks(int(descriptor), int(memory) or None)"
)
_LOOK_SECONDS: Final = 0.005


class ForkServer:
    """Forks workers that have `function` loaded. It starts with the first of them, and anew where it was lost.

    The function must start no threads when it loads: a fork has none of them. A worker is a child of the server, with a
    process group of its own, and so are its limits; the server itself calls nothing, so no answer can harm it.
    """

    def __init__(self, function: Callable[..., Any], *, memory_bytes: int | None, seconds: float) -> None:
        """`seconds` are what it may take to load the function."""
        self.code = pickle.dumps(function)
        self._memory_bytes = memory_bytes
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._starts = 0
        self.loaded = False
        """Whether it can fork at once."""
        self._lock = Lock()

    def ready(self) -> None:
        """Start it if it does not run. WorkerError where the function does not load, OSError or EOFError else."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._discard()
            try:
                self._start()
            except BaseException:
                self._discard()
                raise

    def fork(self, channel: socket.socket) -> Forked:
        """A worker that serves the channel. OSError or EOFError where the server is lost."""
        with self._lock:
            pid = self._ask(FORK, channel)
            return Forked(self, pid, self._starts)

    def status(self, pid: int, starts: int) -> int | None:
        """The exit code of a worker, or minus its signal; None while it runs. It can be had once.

        OSError or EOFError where the server that forked it, its `starts`th process, is lost.
        """
        with self._lock:
            if starts != self._starts:
                raise EOFError("another process forked this worker")
            code: int | None = self._ask(pid)
            return code

    def kill(self) -> None:
        """End the server, in the middle of loading too; its workers live on."""
        if self._process is not None:
            processes.kill(self._process)

    def close(self) -> None:
        """End the server and forget it; a later worker starts it anew."""
        self.kill()
        with self._lock:
            self._discard()

    def _ask(self, question: int, channel: socket.socket | None = None) -> Any:
        if self._control is None:
            raise EOFError("the process that workers are forked from is gone")
        try:
            self._control.send_bytes(pickle.dumps(question))
            if channel is not None:
                reduction.send_handle(self._control, channel.fileno(), 0)
            return pickle.loads(self._control.recv_bytes())
        except (EOFError, OSError):
            self._discard()
            raise

    def _start(self) -> None:
        self._starts += 1
        ours, theirs = socket.socketpair()
        self._control = control = Connection(ours.detach())
        command = [sys.executable, "-P", "-u", "-c", _BOOT, str(theirs.fileno()), str(self._memory_bytes or 0)]
        with theirs:
            self._process = processes.start([*command, *sys.path], theirs)
        processes.limit_waiting(control, self._seconds)
        control.recv_bytes()
        control.send_bytes(pickle.dumps((self.code, (sys.path, processes.user_files()))))
        outcome, text = pickle.loads(control.recv_bytes())
        if outcome != "done":
            raise WorkerError(outcome, text)
        self.loaded = True

    def _discard(self) -> None:
        process, self._process = self._process, None
        self.loaded = False
        if self._control is not None:
            self._control.close()
            self._control = None
        if process is not None:
            processes.kill(process)
            process.wait()


class Forked:
    """A worker of a fork server, as `subprocess.Popen` shows a process."""

    def __init__(self, server: ForkServer, pid: int, starts: int) -> None:
        self.pid = pid
        self._server = server
        self._starts = starts
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the signal; None while it runs."""
        if self._code is None:
            try:
                self._code = self._server.status(self.pid, self._starts)
            except (EOFError, OSError):  # nobody is left who could tell
                processes.kill(self)
                self._code = 0
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The same once it has ended; subprocess.TimeoutExpired where that takes longer."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(_LOOK_SECONDS)
        return code
