"""Findings of checks, and the separate process of each check, because a check may crash or hang."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Final, Literal

from flatpeak.errors import brief
from flatpeak.utils.child_process import ChildProcess, Parent, ending

TORCH_PAGE: Final = "https://pytorch.org/get-started/locally"
"""The page with the builds of torch."""
REPORT_IT: Final = "report it, with this output"
ENDING: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""The signals that end the doctor."""
SECONDS: Final = 180.0
"""Time limit of a process: imports from a cold disk or on a busy machine take a minute or two."""
AFTER_KILL: Final = 1.0
"""Seconds to wait for a killed process; a process that hangs in a driver never ends."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    check: str
    """The subject of the check, such as `torch`."""
    status: Literal["ok", "note", "problem", "attempt"]
    """problem: something that flatpeak needs does not work. note: something is slower, missing, or turned off.

    attempt: becomes a problem if the following code raises, crashes or hangs; it is not in the report."""
    text: str
    fix: str | None = None
    """The package, page or variable that fixes the problem; every problem has a fix."""


Check = Callable[..., Iterable[Finding]]


def ok(check: str, text: str) -> Finding:
    """A finding without a problem."""
    return Finding(check=check, status="ok", text=text)


def note(check: str, text: str, fix: str | None = None) -> Finding:
    """A finding that prevents nothing from working."""
    return Finding(check=check, status="note", text=text, fix=fix)


def problem(check: str, text: str, fix: str) -> Finding:
    """A finding that something does not work."""
    return Finding(check=check, status="problem", text=text, fix=fix)


def attempt(check: str, text: str, fix: str) -> Finding:
    """A finding that becomes a problem if the following code raises, crashes or hangs."""
    return Finding(check=check, status="attempt", text=text, fix=fix)


def _whole(name: str) -> Finding:
    return attempt(name.removeprefix("check_"), "this check failed", REPORT_IT)


def failed(attempted: Finding, why: BaseException | str) -> Finding:
    """The problem for a failed attempt."""
    if isinstance(why, BaseException):
        why = f"{type(why).__name__}: {brief(why)}"
    return replace(attempted, status="problem", text=f"{attempted.text}: {why}")


class Probe:
    """A check in a separate process, for at most SECONDS; the process ends if the doctor is killed."""

    def __init__(self, check: Check, environment: Mapping[str, str]) -> None:
        """Start the process of the check."""
        self._check = check
        self._deadline = time.monotonic() + SECONDS
        self._child = ChildProcess(
            run_check,
            check.__module__,
            check.__name__,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            environment=environment,
            directory=_directory(check),
        )

    def findings(self) -> Iterator[Finding]:
        """The findings of the check after its end, and another if its process crashed or hung."""
        try:
            output, errors = self._child.process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            output, errors = late.output or b"", late.stderr or b""
        code = self._child.process.poll()
        self.kill()
        attempted = _whole(self._check.__name__)
        for line in output.splitlines():
            try:
                finding = Finding(**json.loads(line))
            except (ValueError, TypeError):  # a line from before the check, or truncated by a kill
                continue
            if finding.status == "attempt":
                attempted = finding
            else:
                yield finding
        if code is None:
            yield failed(attempted, f"it did not answer within {SECONDS:.0f} s")
        elif code != 0:
            yield failed(attempted, f"{ending(code)} {_last_line(errors)}".strip())

    def kill(self) -> None:
        """Kill the process and its children, and wait for their end."""
        deadline = time.monotonic() + AFTER_KILL
        with suppress(ProcessLookupError, PermissionError):  # macOS: all processes of the group have ended
            while time.monotonic() < deadline:
                os.killpg(self._child.pid, signal.SIGKILL)
                self._child.process.poll()
                time.sleep(0.01)


def _directory(check: Check) -> str | None:
    """None for the working directory. If it does not exist: a directory for imports, except for the check of it."""
    try:
        Path.cwd()
    except OSError:
        return None if check.__name__ == "check_machine" else "/"
    return None


def ask(command: Sequence[str]) -> tuple[str, str | None]:
    """The output of a program, and the reason if it failed."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    failure = f"exit code {done.returncode}: {_last_line(done.stderr or done.stdout)}" if done.returncode else None
    return done.stdout.decode("utf-8", "replace"), failure


def _last_line(written: bytes) -> str:
    return written.decode("utf-8", "replace").strip().rpartition("\n")[2]


def run_check(_: Parent | None, module: str, name: str) -> None:
    """Run a check in this process and write its findings as lines; output of libraries goes to standard error."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # blocked while the doctor starts processes
    signal.alarm(int(SECONDS) + 2)
    gc.disable()  # saves a fifth of the import time
    channel = os.dup(1)
    os.dup2(2, 1)
    attempted = _whole(name)
    try:
        for finding in getattr(import_module(module), name)():
            if finding.status == "attempt":
                attempted = finding
            _send(finding, channel)
    except Exception as error:
        _send(failed(attempted, error), channel)
    os._exit(0)  # threads and exit handlers of libraries could hang


def _send(finding: Finding, channel: int) -> None:
    os.write(channel, json.dumps(asdict(finding)).encode() + b"\n")
