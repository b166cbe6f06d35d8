"""Peaks of memory: of a run so far, and of each phase of a training step."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

PROCESS = Path("/proc/self")
GIB = 2**30


class HighWaterMark(Protocol):
    """A peak that some allocator or system keeps."""

    def read(self) -> int:
        """The most bytes in use since the last reset, or since the start."""
        ...

    def reset(self) -> bool:
        """Begin anew with what is in use now; False where that is impossible."""
        ...


class DevicePeak:
    """Peak of the memory that torch has allocated on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> int:
        """Bytes since the last reset."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> bool:
        """Begin anew, as torch can at any time."""
        torch.cuda.reset_peak_memory_stats(self.device)
        return True


class ProcessPeak:
    """Peak of the process's resident set, which Linux alone can reset (proc(5): VmHWM, clear_refs)."""

    def __init__(self, process: Path = PROCESS) -> None:
        self.process = process

    def read(self) -> int:
        """Bytes since the last reset, or since the process began."""
        try:
            status = (self.process / "status").read_text(encoding="ascii", errors="replace")
            return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024
        except (OSError, StopIteration):
            unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, else kilobytes
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset(self) -> bool:
        """Begin anew; False on other systems, and where a sandbox forbids it."""
        try:
            (self.process / "clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True


class PeakMemory:
    """The peak of a run so far, and those of the phases of a step.

    Phases may be nested: what is used inside an inner one counts there alone.
    """

    def __init__(self, device: torch.device, *, mark: HighWaterMark | None = None) -> None:
        self.mark = mark or (DevicePeak(device) if device.type == "cuda" else ProcessPeak())
        self._highest = 0
        self._phases: dict[str, int] = {}
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context whose peak is that of phase `name`, together with others of the same name in the step."""
        self._observe()
        if not self.mark.reset():
            yield
            return
        self._open.append(name)
        try:
            yield
        finally:
            self._observe()
            self._open.pop()
            if self._open:
                self.mark.reset()

    def metrics(self) -> dict[str, float]:
        """The peak so far and, where the system can reset it, those of the phases since the last call, in GiB."""
        self._observe()
        phases, self._phases = self._phases, {}
        named = {f"memory/{name}_peak_gib": highest / GIB for name, highest in phases.items()}
        return {"memory/peak_gib": self._highest / GIB, **named}

    def _observe(self) -> None:
        highest = self.mark.read()
        self._highest = max(self._highest, highest)
        if self._open:
            self._phases[self._open[-1]] = max(self._phases.get(self._open[-1], 0), highest)
