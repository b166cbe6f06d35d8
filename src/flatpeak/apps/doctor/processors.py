"""Checks of the CPU's side: native kernels, threads, memory; what a container allows counts as what there is."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flatpeak.apps.doctor.bounded_process import merged, run_probe
from flatpeak.apps.doctor.findings import GIB, Finding, gib, note, ok, problem

KERNEL_SECONDS: Final = 60.0
KERNELS_VARIABLE: Final = "FLATPEAK_KERNELS"
"""The variable of `policy.native_decoding`, which loads torch."""
WIDTHS: Final = {
    "x86-64-v4": "AVX-512, 16 numbers at a time",
    "x86-64-v3": "AVX2, 8 numbers at a time",
    "armv8-a": "NEON, 4 numbers at a time",
}
LITTLE_MEMORY: Final = 2 * GIB
"""Less than this is little: what a run loads before its model takes 0.4 GiB in each process."""
ROOT: Final = Path("/")


def check_kernels() -> Iterator[Finding]:
    """The native kernels for CPUs: shipped, compiled, to be compiled, or why there are none."""
    setting = os.environ.get(KERNELS_VARIABLE) or "auto"
    if setting not in ("auto", "torch", "native"):
        text = f"{KERNELS_VARIABLE}={setting}: a run takes auto, torch or native"
        yield problem("kernels", text, f"unset {KERNELS_VARIABLE}")
        return
    messages, outcome = run_probe("kernels", seconds=KERNEL_SECONDS)
    facts = merged(messages)
    if described := facts.get("kernels"):
        level = described.split(",")[0]
        if setting == "torch":
            yield note(
                "kernels", f"turned off by {KERNELS_VARIABLE}=torch; they are {described}", f"unset {KERNELS_VARIABLE}"
            )
        else:
            yield ok("kernels", f"{described} ({WIDTHS.get(level, level)})")
        return
    reason = facts.get("unavailable") or f"their process {outcome.ended or 'said nothing'}: {outcome.last_words}"
    if setting == "native":
        fix = _kernels_fix(reason) or f"unset {KERNELS_VARIABLE}"
        yield problem("kernels", f"{KERNELS_VARIABLE}=native, and there are none: {reason}", fix)
    else:
        yield note("kernels", f"none, so that runs on a CPU are slower: {reason}", _kernels_fix(reason))


def _kernels_fix(reason: str) -> str | None:
    if "no C++ compiler" in reason:
        return "install a C++ compiler: apt install g++, or conda install gxx"
    if "did not compile" in reason:
        return "CXX=NAME chooses another compiler"
    if "folder" in reason or "write" in reason or "noexec" in reason or "no home" in reason:
        return "export XDG_CACHE_HOME=DIRECTORY, one that is yours alone"
    return None


def check_threads() -> Iterator[Finding]:
    """The cores that this process may use, against the threads that torch will start."""
    cores = _affinity()
    quota = cgroup_cores()
    usable = cores if quota is None else min(cores, max(1, math.ceil(quota)))
    limit = f"{cores} cores" if quota is None or quota >= cores else f"{cores} cores, limited to {quota:g}"
    asked = os.environ.get("OMP_NUM_THREADS")
    threads = _first_number(asked) if asked else cores
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    fix = f"export OMP_NUM_THREADS={usable}"
    if threads is None:
        yield problem("threads", f"OMP_NUM_THREADS={asked} is no number of threads", fix)
    elif threads > usable:
        source = f"OMP_NUM_THREADS={asked}" if asked else "torch's choice of a thread for each core"
        yield note("threads", f"{limit}; {source} makes threads wait for each other", fix)
    elif policy.upper() == "ACTIVE":
        text = f"{limit}; OMP_WAIT_POLICY={policy} lets threads that wait spin: slow on a busy machine"
        yield note("threads", text, "unset OMP_WAIT_POLICY")
    else:
        yield ok("threads", f"{limit}; OMP_NUM_THREADS {asked or 'unset'}, OMP_WAIT_POLICY {policy}")


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first_number(text: str) -> int | None:
    """The threads that OMP_NUM_THREADS asks for: `4`, or `4,2` for nested ones; None where it is no such thing."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def check_memory() -> Iterator[Finding]:
    """The memory that is free, of all there is or that a container may use."""
    total, free = memory()
    if total is None or free is None:
        yield ok("memory", "this system does not say how much is free")
    elif free < LITTLE_MEMORY:
        text = f"{gib(free)} of {gib(total)} free: little more than loading torch takes"
        yield note(
            "memory", text, "end other programs, or give the container more; flatpeak plan says what a run takes"
        )
    else:
        yield ok("memory", f"{gib(free)} of {gib(total)} free")


def memory(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Bytes in all and bytes free, of the machine or of the control group, whichever has less."""
    fields = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024 if value.split() else 0
    total, free = fields.get("MemTotal"), fields.get("MemAvailable")
    for folder in _groups(root, "memory"):
        limit = _number(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
        used = _number(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes"))
        if limit is None or used is None or total is None or free is None or limit >= total:
            continue
        # Cached files count as used, and are given up first.
        statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if line.count(" ") == 1)
        cached = _number(statistics.get("inactive_file", "0")) or 0
        total, free = limit, min(free, max(0, limit - used + cached))
    return total, free


def cgroup_cores(root: Path = ROOT) -> float | None:
    """The cores' worth of time that the control group allows; None: no limit."""
    limits = []
    for folder in _groups(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
        allowed, per = _number(quota), _number(period)
        if allowed is not None and allowed > 0 and per:
            limits.append(allowed / per)
    return min(limits, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above it, of either version."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        base = root / "sys/fs/cgroup"
        if number != "0":
            if controller not in controllers.split(","):
                continue
            base = next((base / name for name in (controllers, controller) if (base / name).is_dir()), base)
        # In a container the path is often the host's, and the group itself lies at the base.
        folder = base / path.lstrip("/")
        yield folder
        for parent in folder.parents:
            if parent == base or base in parent.parents:
                yield parent


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """A whole number; None for `max`, and for what is no number."""
    text = text.strip()
    return int(text) if text.lstrip("-").isdecimal() else None
