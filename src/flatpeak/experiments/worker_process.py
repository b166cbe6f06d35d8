"""A worker process as the sweep sees it: started with its own GPU, given jobs, watched, and stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# Not `multiprocessing`, which would import the user's main module again.
_BOOT = (
    "import sys; descriptor, *sys.path = sys.argv[1:]; "
    "from flatpeak.experiments.cell_worker import serve; serve(int(descriptor))"
)


class WorkerProcess:
    """A persistent process that takes one job at a time."""

    def __init__(self, index: int, *, log: Path, gpu: str | None = None) -> None:
        """Start it; `gpu` is the value of CUDA_VISIBLE_DEVICES, None leaves the environment's."""
        self.index = index
        self.gpu = gpu
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                # Ctrl-C in the terminal is for the sweep, which asks its workers to stop.
                start_new_session=True,
            )
        self.connection = ours
        self._received = b""

    @property
    def pid(self) -> int:
        """The process id of the worker."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the process can take a job."""
        return self._process.poll() is None

    def send(self, job: Mapping[str, Any] | None) -> None:
        """Hand over a job, or None to let the process end; one that is dead already is noticed by `receive`."""
        with suppress(OSError):
            self.connection.sendall((json.dumps(job) + "\n").encode())

    def receive(self) -> dict[str, Any] | None:
        """The outcome of the job, None while there is none. EOFError with the reason where the process has died."""
        try:
            data = self.connection.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if self._process.poll() is None:
                return None
            data = b""
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError(self._death())
        self._received += data
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def _death(self) -> str:
        """The way in which the process ended."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()
            return "the worker process closed its connection"
        self._kill_group()  # what it had started: it had no time to end that where it was killed
        if code >= 0:
            return f"the worker process ended with exit code {code} (see {self.log})"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"the worker process was killed by {name}{hint}"

    def interrupt(self) -> None:
        """Ask the run to stop with a checkpoint."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once, with the processes of its group."""
        if self._process.poll() is None:
            self._kill_group()
            self._process.wait()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS says the second of groups that have ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let an idle process end, or kill it; then wait for it."""
        self.send(None)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
        self.connection.close()
