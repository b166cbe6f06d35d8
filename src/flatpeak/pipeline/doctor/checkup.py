"""All checks, side by side, each under a limit of time; one that fails or hangs is a line of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from flatpeak.errors import brief
from flatpeak.pipeline.doctor.accelerators import check_torch
from flatpeak.pipeline.doctor.findings import Finding, presentable, problem
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
        self._thread.start()

    def _run(self) -> None:
        try:
            for finding in self._check():
                self._findings.append(finding)
        except BaseException as error:  # whatever it is, it is a finding
            text = f"this check failed itself: {type(error).__name__}: {brief(error)}"
            self._findings.append(problem(self._name, text, REPORT_IT))

    def findings(self, seconds: float) -> list[Finding]:
        self._thread.join(max(0.0, seconds))
        unfinished = []
        if self._thread.is_alive():
            unfinished = [problem(self._name, "this check does not come to an end", REPORT_IT)]
        return [*self._findings, *unfinished]
