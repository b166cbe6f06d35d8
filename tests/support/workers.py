"""Processes: starting a script with workers in one, and waiting for what they do and for their ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def start_script(script: str, *, workers: int) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a script in a session of its own, and read the process ids of its workers, its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(set(pids)) == workers
    return process, pids


def wait_for(reached: Callable[[], Any], *, within: float = 20.0) -> None:
    """Wait until this is true, and fail where it does not come."""
    deadline = time.monotonic() + within
    while not reached():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process has a thread that is no zombie: the first one may end before those that hold its files."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            if task.read_text().rpartition(")")[2].split()[0] not in ("Z", "X"):
                return True
        except OSError:
            continue
    return False


def variable(pid: int, name: str) -> str | None:
    """An environment variable that a process was started with."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    values = [word for word in words if word.startswith(f"{name}=".encode())]
    return values[0].decode().partition("=")[2] if values else None


def started_with(name: str, value: str) -> list[int]:
    """The living processes that have this value of an environment variable."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if variable(pid, name) == value and alive(pid)]


def children(pid: int) -> Iterator[int]:
    """The processes that a process has started."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, task.read_text().split())
        except OSError:
            continue


def all_end(pids: Sequence[int], *, within: float) -> bool:
    """Whether all of these processes end within so many seconds."""
    deadline = time.monotonic() + within
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
