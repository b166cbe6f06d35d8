"""All checks, side by side, each under a limit of time, and their report: one that fails or hangs is a line of its own.

`python -m flatpeak.apps.doctor.checkup [--json]` prints it where the `flatpeak` command itself does not start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Final

from flatpeak.apps.doctor.accelerators import check_torch
from flatpeak.apps.doctor.findings import Finding, lines, presentable, problem
from flatpeak.apps.doctor.install_commands import install
from flatpeak.apps.doctor.installation import check_flatpeak, check_imports, check_packages, check_python
from flatpeak.apps.doctor.processors import check_kernels, check_memory, check_threads
from flatpeak.apps.doctor.storage import (
    check_hub,
    check_limits,
    check_runs,
    check_shared_memory,
    check_temporary_files,
)
from flatpeak.apps.doctor.vllm_environment import check_vllm
from flatpeak.errors import brief

Check = Callable[[], Iterable[Finding]]

CHECKS: Final[dict[str, Check]] = {
    "python": check_python,
    "flatpeak": check_flatpeak,
    "packages": check_packages,
    "threads": check_threads,
    "memory": check_memory,
    "shared memory": check_shared_memory,
    "runs": check_runs,
    "temporary": check_temporary_files,
    "limits": check_limits,
    "torch": check_torch,
    "kernels": check_kernels,
    "hub": check_hub,
    "vllm": check_vllm,
    "imports": check_imports,
}
"""The checks by the name that a failure of one has, in the order of the report: those that take long come last."""
LONGEST: Final = 100.0
"""Seconds for all checks together; the processes that they start have limits of their own, which are shorter."""
REPORT_IT: Final = "report it, with this output"


def examine(checks: dict[str, Check] = CHECKS, *, seconds: float = LONGEST) -> Iterator[Finding]:
    """The findings of all checks, in order, each as soon as those before it are there; nothing is changed."""
    deadline = time.monotonic() + seconds
    started = {name: _start(name, check) for name, check in checks.items()}
    for name, findings in started.items():
        yield from map(presentable, _received(name, findings, deadline))


def _start(name: str, check: Check) -> SimpleQueue[Finding | None]:
    """The findings of a check as they come, None at last.

    It runs in a thread that need not be waited for: a file system that hangs holds no one else up.
    """
    findings: SimpleQueue[Finding | None] = SimpleQueue()

    def run() -> None:
        try:
            for finding in check():
                findings.put(finding)
        except BaseException as error:  # whatever it is, it is a finding
            text = f"this check failed itself: {type(error).__name__}: {brief(error)}"
            lacks_packaging = isinstance(error, ModuleNotFoundError) and error.name == "packaging"
            findings.put(problem(name, text, install(["packaging"]) if lacks_packaging else REPORT_IT))
        findings.put(None)

    try:
        threading.Thread(target=run, name=f"doctor-{name}", daemon=True).start()
    except RuntimeError:  # no more threads: a limit of the system's
        run()
    return findings


def _received(name: str, findings: SimpleQueue[Finding | None], deadline: float) -> Iterator[Finding]:
    while True:
        try:
            finding = findings.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            yield problem(name, "this check does not come to an end", REPORT_IT)
            return
        if finding is None:
            return
        yield finding


@contextmanager
def _exit_at_signals() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP are exits like others, at which processes and temporary files go."""
    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def report(*, as_json: bool = False) -> int:
    """Print the findings as lines, each as soon as it is there, or as a JSON list; the exit code."""
    findings = []
    with _exit_at_signals():
        for finding in examine():
            findings.append(finding)
            if not as_json:
                _write("\n".join(lines(finding)))
    problems, notes = (sum(one.status == status for one in findings) for status in ("problem", "note"))
    if as_json:
        _write(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _write(f"doctor: {_count(problems, 'problem')}, {_count(notes, 'note')}")
    return 1 if problems else 0


def _count(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _write(text: str) -> None:
    try:
        sys.stdout.write(printable(text, sys.stdout.encoding) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # as of `flatpeak doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in the buffer
        sys.exit(1)


def printable(text: str, encoding: str | None) -> str:
    """The text in a terminal's encoding, which may lack characters of paths."""
    return text.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


if __name__ == "__main__":
    sys.exit(report(as_json="--json" in sys.argv[1:]))
