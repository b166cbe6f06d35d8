"""A worker's side of a measurement: the pipe to its parent, and a meter for time and memory.

Workers and the parent exchange lines of JSON over the worker's original standard input and output; output of libraries
goes to standard error. This file uses only the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    """CPU time of all threads and child processes, wall time, and the peak of resident memory."""

    def __init__(self) -> None:
        self.loaded_kib = 0
        self._earlier_kib = 0.0
        self._cpu = self._wall = 0.0

    def loaded(self) -> None:
        """Exclude the current memory from the peak: imports, weights, data."""
        self.loaded_kib = _status("VmRSS")

    def start(self) -> None:
        """Start the clocks and reset the peak of memory."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak to the current memory
        self._earlier_kib = 0.0
        self._wall, self._cpu = time.perf_counter(), cpu_seconds()

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Keep the peaks of the phases of a flatpeak step, because each phase resets the process's peak.

        With `notice`, this makes a meter a `flatpeak.protocols.Progress`.
        """
        phases = [value for name, value in metrics.items() if name.startswith("memory/") and name.endswith("_peak_gib")]
        self._earlier_kib = max([self._earlier_kib, *(gib * 2**20 for gib in phases)])

    def notice(self, text: str) -> None:
        """Print a notice to standard error, like the output of libraries."""
        print(text, file=sys.stderr)

    def stop(self) -> dict[str, float]:
        """Return CPU and wall seconds and the peak since `start`."""
        cpu, wall = cpu_seconds() - self._cpu, time.perf_counter() - self._wall
        peak_kib = max(self._earlier_kib, _status("VmHWM"))
        return {"cpu": cpu, "wall": wall, "peak_mib": (peak_kib - self.loaded_kib) / 1024}


class ParentPipe:
    """Lines of JSON to and from the parent process."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, **facts: Any) -> None:
        """Send one line of JSON."""
        self._out.write(json.dumps(facts) + "\n")
        self._out.flush()

    def receive(self, *, at_end: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Wait for the next command; without another command, call `at_end` and end the process."""
        line = sys.stdin.readline()
        if not line:
            at_end()
            os._exit(0)  # inside a trainer's reward function, nothing else ends the process
        command: dict[str, Any] = json.loads(line)
        return command


def cpu_seconds() -> float:
    """CPU time of this process, all its threads, and all its living descendants."""
    return time.process_time() + sum(_ticks(pid) for pid in _descendants()) / TICKS


def _descendants() -> list[int]:
    """Identifiers of all living descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields:
                parents[int(entry.name)] = int(fields[1])
    descendants, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        descendants |= new
    return sorted(descendants)


def _ticks(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _stat(pid: int) -> list[str]:
    """The fields after the command's name, which may contain blanks; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _status(field: str) -> int:
    """A size of this process in KiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise LookupError(f"/proc/self/status has no {field}")
