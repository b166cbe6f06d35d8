"""A check's findings, and the process of its own that each check has, because what it tries may crash or hang."""

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
from flatpeak.utils.child_process import ChildProcess, Parent, in_words

TORCH_PAGE: Final = "https://pytorch.org/get-started/locally"
"""The page with the builds of torch."""
REPORT_IT: Final = "report it, with this output"
ENDING: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""The signals that end the doctor."""
SECONDS: Final = 180.0
"""The longest that a process may take: from a cold disk, or on a busy machine, imports take a minute or two."""
AFTER_KILL: Final = 1.0
"""Seconds for a killed process to go: one that waits in a driver never does, and is left behind."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    check: str
    """The name of what was checked, such as `torch`."""
    status: Literal["ok", "note", "problem", "attempt"]
    """problem: something that flatpeak needs does not work. note: something is slower, missing, or turned off.

    attempt: becomes a problem if what follows raises, crashes or hangs; not part of a report."""
    text: str
    fix: str | None = None
    """The package, page or variable that mends it; every problem has one."""


Check = Callable[..., Iterable[Finding]]


def ok(check: str, text: str) -> Finding:
    """The finding that all is well."""
    return Finding(check=check, status="ok", text=text)


def note(check: str, text: str, fix: str | None = None) -> Finding:
    """The finding of something that keeps nothing from working."""
    return Finding(check=check, status="note", text=text, fix=fix)


def problem(check: str, text: str, fix: str) -> Finding:
    """The finding of something that does not work."""
    return Finding(check=check, status="problem", text=text, fix=fix)


def attempt(check: str, text: str, fix: str) -> Finding:
    """The finding that becomes a problem if what follows raises, crashes or hangs."""
    return Finding(check=check, status="attempt", text=text, fix=fix)


def _whole(name: str) -> Finding:
    return attempt(name.removeprefix("check_"), "this check failed itself", REPORT_IT)


def failed(attempted: Finding, why: BaseException | str) -> Finding:
    """The problem that an attempt becomes."""
    if isinstance(why, BaseException):
        why = f"{type(why).__name__}: {brief(why)}"
    return replace(attempted, status="problem", text=f"{attempted.text}: {why}")


class Probe:
    """A check in a process of its own, at most SECONDS long; it ends itself where the doctor was killed."""

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
        """The findings of the check, after its end; one more where its process crashed or hung."""
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
            except (ValueError, TypeError):  # what was printed before the check began, or a line that a kill cut
                continue
            if finding.status == "attempt":
                attempted = finding
            else:
                yield finding
        if code is None:
            yield failed(attempted, f"it did not answer within {SECONDS:.0f} s")
        elif code != 0:
            ending = f"its process was {in_words(code)}" if code < 0 else in_words(code)
            yield failed(attempted, " ".join([ending, _last_line(errors)]))

    def kill(self) -> None:
        """Kill the process with all that it started, and wait until they are gone."""
        deadline = time.monotonic() + AFTER_KILL
        with suppress(ProcessLookupError, PermissionError):  # macOS: a group of ended processes
            while time.monotonic() < deadline:
                os.killpg(self._child.pid, signal.SIGKILL)
                self._child.process.poll()
                time.sleep(0.01)


def _directory(check: Check) -> str | None:
    """None, the working directory; if it is gone, where libraries still load, for all but the check that reports it."""
    try:
        Path.cwd()
    except OSError:
        return None if check.__name__ == "check_machine" else "/"
    return None


def ask(command: Sequence[str]) -> tuple[str, str | None]:
    """The output of a program, and how it failed, in words."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    failure = f"exit code {done.returncode}: {_last_line(done.stderr or done.stdout)}" if done.returncode else None
    return done.stdout.decode("utf-8", "replace"), failure


def _last_line(written: bytes) -> str:
    return written.decode("utf-8", "replace").strip().rpartition("\n")[2]


def run_check(_: Parent | None, module: str, name: str) -> None:
    """Run a check in this process, and write its findings as lines; libraries print to standard error."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # blocked while the doctor starts processes
    signal.alarm(int(SECONDS) + 2)
    gc.disable()  # of the seconds that imports take, a fifth
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
    os._exit(0)  # threads and exit handlers of libraries have had their chance to hang


def _send(finding: Finding, channel: int) -> None:
    os.write(channel, json.dumps(asdict(finding)).encode() + b"\n")
