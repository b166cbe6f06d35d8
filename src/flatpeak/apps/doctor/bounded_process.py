"""Other programs under a limit of time: one that crashes, hangs, or cannot even be killed costs a check alone."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

_BOOT: Final = (
    "import signal, sys; seconds, name, argument, *sys.path = sys.argv[1:]; "
    "signal.alarm(int(seconds)); "  # its own end, should the doctor be killed
    "from flatpeak.apps.doctor.probes import run; run(name, argument)"
)
_MOST_BYTES: Final = 1 << 20
"""Of each stream; what a program writes beyond that is dropped."""
_AFTER_KILL: Final = 1.0
"""Seconds for a killed process to go: one that waits in a driver never does, and is left behind."""
_ending = threading.Event()
"""Set as the doctor ends: what is started after that is killed at once."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a program that ran under a limit."""

    code: int | None
    """Its exit code, negative for a signal; None: it took too long, or could not be started."""
    output: str
    errors: str
    seconds: float
    unstarted: str | None = None
    """The reason why it could not be started."""

    @property
    def ended(self) -> str | None:
        """The way in which it failed, in words; None where it ended well."""
        if self.unstarted is not None:
            return f"cannot be started ({self.unstarted})"
        if self.code is None:
            return f"did not answer within {self.seconds:.0f} s"
        if self.code < 0:
            return f"was ended by {_signal_name(-self.code)}"
        return f"ended with exit code {self.code}" if self.code else None

    @property
    def late(self) -> bool:
        """Whether it took too long, which may be the disk's fault, or that of other programs."""
        return self.code is None and self.unstarted is None

    @property
    def last_words(self) -> str:
        """The last line that it wrote to standard error."""
        written = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return written[-1] if written else ""


def run_bounded(command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run a program for at most `seconds`, without input; `environment` is added to this process's own."""
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            cwd=_directory(),
            start_new_session=True,  # its children are killed with it
        )
    except (OSError, ValueError) as error:
        return Outcome(code=None, output="", errors="", seconds=0.0, unstarted=str(error))
    end = partial(_end, process.pid)
    atexit.register(end)  # for Ctrl-C, which ends the thread of this call
    if _ending.is_set():
        _kill_group(process.pid)
    streams = [_Stream(process.stdout), _Stream(process.stderr)]
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    code, took = process.returncode, time.monotonic() - start
    _kill_group(process.pid)  # also what it left behind
    atexit.unregister(end)
    if code is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_AFTER_KILL)
    output, errors = (stream.text() for stream in streams)
    return Outcome(code=code, output=output, errors=errors, seconds=took)


def _directory() -> str | None:
    """The working directory as it is (None), or the root in place of one that is gone, where torch does not load."""
    try:
        Path.cwd()
    except OSError:
        return "/"
    return None


def _kill_group(number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)


def _end(number: int) -> None:
    """Kill a group as the doctor ends; a check must not go on to its next attempt."""
    _ending.set()
    _kill_group(number)


class _Stream:
    """The output of a program, read by a thread that need not be waited for."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        self._pipe = pipe  # kept: it closes with its object
        self._content = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._pipe is not None
        with suppress(OSError, ValueError):
            while chunk := os.read(self._pipe.fileno(), 1 << 16):
                self._content += chunk[: max(0, _MOST_BYTES - len(self._content))]

    def text(self) -> str:
        self._thread.join(_AFTER_KILL)
        return bytes(self._content).decode("utf-8", "replace")


def run_probe(
    name: str, argument: Any = None, *, seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[list[dict[str, Any]], Outcome]:
    """Run a function of `probes` in a Python of its own: the messages that it sent before it ended, and its end."""
    command = [sys.executable, "-P", "-c", _BOOT, str(int(seconds) + 2), name, json.dumps(argument), *sys.path]
    with _scratch() as variables:
        outcome = run_bounded(command, seconds=seconds, environment={**variables, **(environment or {})})
    if outcome.unstarted is not None:  # no fault of what would be tried
        raise OSError(f"Python {outcome.ended}")
    return list(_messages(outcome.output)), outcome


def merged(messages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All that the messages of a probe say, the last of two of one name."""
    return {name: value for message in messages for name, value in message.items()}


@contextmanager
def _scratch() -> Iterator[dict[str, str]]:
    """Variables for libraries that write things as they are imported, so that nothing stays."""
    if _ending.is_set():  # nothing would remove the folder
        yield {}
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="flatpeak-doctor-", ignore_cleanup_errors=True)
    except OSError:  # no room for temporary files, which a check of its own reports
        yield {}
        return
    with folder as path:
        yield {"MPLCONFIGDIR": path, "TRACKIO_DIR": path, "TMPDIR": path}


def _messages(output: str) -> Iterator[dict[str, Any]]:
    for line in output.splitlines():
        with suppress(ValueError):  # the last line of a process that was killed may be cut short
            if isinstance(message := json.loads(line), dict):
                yield message


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
