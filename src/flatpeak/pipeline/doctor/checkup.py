"""All checks, side by side, each under a limit of time, and their report: one that fails or hangs is a line of its own.

`python -m flatpeak.pipeline.doctor.checkup [--json]` prints it where the `flatpeak` command itself does not start.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Final

from flatpeak.errors import brief
from flatpeak.pipeline.doctor.accelerators import check_torch
from flatpeak.pipeline.doctor.findings import Finding, lines, presentable, problem
from flatpeak.pipeline.doctor.installation import check_flatpeak, check_packages, check_python
from flatpeak.pipeline.doctor.processors import check_kernels, check_memory, check_threads
from flatpeak.pipeline.doctor.storage import (
    check_hub,
    check_limits,
    check_runs,
    check_shared_memory,
    check_temporary_files,
)
from flatpeak.pipeline.doctor.vllm_environment import check_vllm

Check = Callable[[], Iterable[Finding]]

CHECKS: Final[dict[str, Check]] = {
    "python": check_python,
    "flatpeak": check_flatpeak,
    "packages": check_packages,
    "torch": check_torch,
    "kernels": check_kernels,
    "threads": check_threads,
    "memory": check_memory,
    "shared memory": check_shared_memory,
    "runs": check_runs,
    "temporary": check_temporary_files,
    "limits": check_limits,
    "hub": check_hub,
    "vllm": check_vllm,
}
"""The checks in the order of the report, by the name that a failure of one has."""
LONGEST: Final = 100.0
"""Seconds for all checks together; the processes that they start have limits of their own, which are shorter."""
REPORT_IT: Final = "report it, with this output"


def examine(checks: dict[str, Check] = CHECKS, *, seconds: float = LONGEST) -> Iterator[Finding]:
    """The findings of all checks, in order, each as soon as those before it are there; nothing is changed."""
    attempts = [_Attempt(name, check) for name, check in checks.items()]
    deadline = time.monotonic() + seconds
    for attempt in attempts:
        yield from map(presentable, attempt.findings(deadline - time.monotonic()))


class _Attempt:
    """A check in a thread that need not be waited for: a file system that hangs holds no one else up."""

    def __init__(self, name: str, check: Check) -> None:
        self._name, self._check = name, check
        self._findings: list[Finding] = []
        self._thread = threading.Thread(target=self._run, name=f"doctor-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: a limit of the system's
            self._run()

    def _run(self) -> None:
        try:
            for finding in self._check():
                self._findings.append(finding)
        except BaseException as error:  # whatever it is, it is a finding
            text = f"this check failed itself: {type(error).__name__}: {brief(error)}"
            self._findings.append(problem(self._name, text, REPORT_IT))

    def findings(self, seconds: float) -> list[Finding]:
        if self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))
        unfinished = []
        if self._thread.is_alive():
            unfinished = [problem(self._name, "this check does not come to an end", REPORT_IT)]
        return [*self._findings, *unfinished]


def report(*, as_json: bool = False) -> int:
    """Print the findings as lines, each as soon as it is there, or as a JSON list; the exit code."""
    findings = []
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


def exit_code(arguments: Sequence[str]) -> int | None:
    """The exit code of the doctor where the arguments of a command line ask for it plainly, after it has run."""
    if list(arguments) in (["doctor"], ["doctor", "--json"]):
        return report(as_json="--json" in arguments)
    return None


def _count(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _write(text: str) -> None:
    sys.stdout.write(printable(text, sys.stdout.encoding) + "\n")
    sys.stdout.flush()


def printable(text: str, encoding: str | None) -> str:
    """The text in a terminal's encoding, which may lack characters of paths."""
    return text.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


if __name__ == "__main__":
    sys.exit(report(as_json="--json" in sys.argv[1:]))
