"""Memory and cores available to this process: those of the machine, or of its container if that has less."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

ROOT: Final = Path("/")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of memory available to programs."""

    total: int
    free: int


def host_memory(root: Path = ROOT) -> Memory:
    """The memory of the machine, or the limit of its control group if that is lower."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for group in _groups(root, "memory"):
        limit = _number(group, "memory.max", "memory.limit_in_bytes")
        used = _number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            total = min(total, limit)
            # Cached files count as used, but Linux drops them first.
            free = min(free, max(0, limit - used + _cached(group)))
    return Memory(total=total, free=free)


def resident_memory() -> int:
    """Bytes of memory that this process occupies."""
    return int(psutil.Process().memory_info().rss)


def affinity() -> int:
    """The number of cores on which the system allows this process to run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(root: Path = ROOT) -> int:
    """The number of cores by `affinity`, or the control group's CPU quota, rounded up, if that is lower."""
    cores = affinity()
    for group in _groups(root, "cpu"):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # "max" and -1 mean no limit
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's control group and its parents, for cgroup version 1 or 2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if controllers:
            base /= controller
        if not controllers or controller in controllers.split(","):
            # In a container the path is often the host's path; the group itself is then mounted at the base.
            group = base / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(base))


def _cached(group: Path) -> int:
    for line in _text(group / "memory.stat").splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _number(group: Path, *names: str) -> int | None:
    """The number in the first of these files that contains a number; None if there is no limit."""
    texts = (_text(group / name) for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
