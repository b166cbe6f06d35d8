"""Worker processes as the operating system sees them: their limits, signals and output, and why a call failed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Literal

from flatpeak.utils.child_process import kill_group
from flatpeak.utils.redaction import redact
from flatpeak.utils.user_code import OneLineError

SPARE_SECONDS: Final = 1.0
FORK: Final = 0
"""The request to a fork server for a new worker; any other number is the process id of a worker, to be ended."""
PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

Reason = Literal["raised", "died", "timeout", "memory", "budget", "unloadable"]
LIMITS: Final[frozenset[Reason]] = frozenset({"timeout", "memory", "budget"})
"""Reasons that a call may bring about by its cost in time or memory."""
OUTPUT_PREFIX: Final = "reward: "
"""Text before every line that a worker prints."""
_CHUNK: Final = 65536


class WorkerError(OneLineError):
    """The failure of a call that has no result; the text gives the reason on one line."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        """raised: by the function; died: its process; timeout: killed; memory: it wanted more than it may have; budget:
        not called, because the step's time was spent; unloadable: cannot travel to a process."""

    def __str__(self) -> str:
        return str(self.args[1])


def limit_waiting(pipe: Connection, seconds: float) -> None:
    """Let reading from the pipe, or writing to it, raise BlockingIOError after so many seconds from now on."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    channel = socket.socket(fileno=pipe.fileno())
    try:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            channel.setsockopt(socket.SOL_SOCKET, option, limit)
    finally:
        channel.detach()


def close_in_children(pipe: Connection) -> None:
    """Keep the pipe from all children of this process: they must not answer for it."""
    os.set_inheritable(pipe.fileno(), False)
    os.register_at_fork(after_in_child=pipe.close)


def set_limits(pipe: Connection, memory_bytes: int | None) -> None:
    """Prepare a worker process: its limits, its signals, and a pipe that its children do not have."""
    close_in_children(pipe)
    with contextlib.suppress(OSError):  # where memory runs out all the same, it is not the trainer that is chosen
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        # Data, not address space: libraries reserve far more of that than they use, CUDA's by hundreds of times.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    for number in PASSED_ON:
        signal.signal(number, lambda *_: None)  # not SIG_IGN: programs that a function runs would inherit it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def set_alarm(seconds: float) -> None:
    """Let the kernel end this process after so many seconds, also where the trainer is gone; 0 cancels that."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def exit_worker(pid: int) -> None:
    """End this process and its children; `pid` is the worker's, which a forked child does not have."""
    if os.getpid() == pid == os.getpgrp():
        kill_group(pid)
    os._exit(0)


def extend_path(path: Sequence[str]) -> None:
    """Search for modules in these directories too."""
    sys.path += [directory for directory in path if directory not in sys.path]


def capture_output() -> int:
    """A descriptor for a process's standard output and error; the caller closes its own copy once that has started.

    A thread passes on the output until every process that holds it has ended, to standard error, because standard
    output may be a result that a program reads. Processes that wrote to the terminal
    themselves would write into each other's lines, and into a live display.
    """
    source, sink = os.pipe()
    threading.Thread(target=_pass_on, args=(source,), name="flatpeak-reward-output", daemon=True).start()
    return sink


def _pass_on(source: int) -> None:
    rest = b""
    with os.fdopen(source, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            if lines:
                _print(lines)
    if rest:
        _print([rest])


def _print(lines: list[bytes]) -> None:
    """Write lines without their secrets, at once, because a live display redraws itself after every write."""
    printed = redact("\n".join(line.decode(errors="replace") for line in lines))
    text = "".join(f"{OUTPUT_PREFIX}{line}\n" for line in printed.split("\n"))
    # Looked up each time: a live display replaces it while it lasts. Nothing can be done where it is closed.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()
