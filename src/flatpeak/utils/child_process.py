"""Child processes that run a function of this package: their start, their pipe, their output and their end.

A child is a fresh interpreter with this process's `sys.path`. `multiprocessing` would import the user's main module
again, torch and all.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import IO, Any, Final

_BOOT: Final = (
    "import json, sys; *start, sys.path = json.loads(sys.argv[1]); "
    "from flatpeak.utils.child_process import run_child; run_child(*start)"
)
_POLL_SECONDS: Final = 0.5


class _End:
    """One end of the pipe between a process and its child. EOFError or OSError where the other end is closed."""

    def __init__(self, descriptor: int) -> None:
        self.pipe = Connection(descriptor)

    def send(self, message: object) -> None:
        """Send a message that JSON can express."""
        self.pipe.send_bytes(json.dumps(message).encode())

    def receive(self) -> Any:
        """Wait for the next message."""
        return json.loads(self.pipe.recv_bytes())


class ChildProcess(_End):
    """A process that calls `function(parent, *arguments)`, where `parent` is a `Parent`, and then ends.

    It leads its own session: Ctrl-C in the terminal does not reach it, and its children can be killed with it.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: object,
        stdout: IO[bytes] | int,
        stderr: IO[bytes] | int = subprocess.STDOUT,
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
    ) -> None:
        """Start it; `arguments` are what JSON can express. `environment` and `directory` are this process's if None."""
        ours, theirs = socket.socketpair()
        super().__init__(ours.detach())
        place = [function.__module__, function.__name__, theirs.fileno(), os.getpid(), arguments]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", _BOOT, json.dumps([*place, [str(entry) for entry in sys.path]])],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                cwd=directory,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def receive(self) -> Any:
        """Wait for the next message; EOFError or OSError where the process has ended."""
        while not self.pipe.poll(_POLL_SECONDS):
            if self.process.poll() is not None:  # though a process forked from it may hold the pipe open
                raise EOFError
        return super().receive()

    def end(self, seconds: float) -> int:
        """The exit code, or minus the signal, of a process that has closed its pipe; killed if it takes longer."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        kill_group(self.pid)
        return self.process.wait()

    def close(self) -> None:
        """Kill the process with what it has started, if it still runs."""
        if self.process.poll() is None:
            kill_group(self.pid)
            self.process.wait()
        self.pipe.close()


class Parent(_End):
    """The process that started this one, as this one sees it."""

    def __init__(self, descriptor: int, pid: int) -> None:
        os.set_inheritable(descriptor, False)
        super().__init__(descriptor)
        self._pid = pid

    def end_with(self, clear: Callable[[], object] = lambda: None) -> None:
        """End this process and what it has started once the parent is gone, in the middle of anything.

        `clear` is called before that. The thread keeps this process from ending earlier.
        """
        threading.Thread(target=self._watch, args=(clear,)).start()

    def _watch(self, clear: Callable[[], object]) -> None:
        # Not the pipe: processes forked from the parent may hold it open.
        while os.getppid() == self._pid:
            time.sleep(_POLL_SECONDS)
        clear()
        kill_group(os.getpid())


def run_child(module: str, name: str, descriptor: int, parent: int, arguments: list[Any]) -> None:
    """Call the function of a `ChildProcess`, in its process."""
    getattr(import_module(module), name)(Parent(descriptor, parent), *arguments)


def kill_group(pid: int) -> None:
    """Kill a process that leads a group, and whatever it has started and left there."""
    with suppress(ProcessLookupError, PermissionError):  # macOS raises the second for groups that have ended
        os.killpg(pid, signal.SIGKILL)


def ending(code: int) -> str:
    """The exit code of a process, or the signal that minus the code stands for."""
    if code >= 0:
        return f"exit code {code}"
    known = -code in set(signal.Signals)  # real-time signals have no names
    return f"killed by {signal.Signals(-code).name}" if known else f"killed by signal {-code}"
