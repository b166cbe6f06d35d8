"""What a reader needs to trust or repeat a run: the command, the versions, the commit and the hardware."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import flatpeak

_GIB = 2**30


def describe_start(command: Sequence[str] | None) -> dict[str, Any]:
    """The facts of one start of a run, as JSON; `command` is the command line, None for a start from Python."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv if command is None else command),
        "versions": {"flatpeak": flatpeak.__version__, "python": platform.python_version()}
        | {name: _version(name) for name in ("torch", "transformers", "safetensors")},
        "commit": {"flatpeak": git_commit(Path(flatpeak.__file__)), "working_directory": git_commit(Path.cwd())},
        "hardware": hardware(),
    }


def hardware() -> dict[str, Any]:
    """Host, CPU model, cores this process may use, memory in GiB, and the CUDA devices."""
    import torch

    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB, 1),
        "cuda": cuda,
    }


def git_commit(path: Path) -> str | None:
    """The commit that holds `path`, with `-dirty` where tracked files differ from it; None if git does not track it.

    A package installed inside somebody's repository (`.venv/`) is not part of that repository's commits.
    """
    directory = path if path.is_dir() else path.parent
    tracked = path.is_dir() or _git(directory, "ls-files", "--error-unmatch", path.name) is not None
    commit = _git(directory, "rev-parse", "HEAD") if tracked else None
    if commit is None:
        return None
    return f"{commit}-dirty" if _git(directory, "status", "--porcelain", "--untracked-files=no") else commit


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
