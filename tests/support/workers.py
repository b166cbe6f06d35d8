"""Processes with workers: starting a script in one, and waiting for the ends of all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

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


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state != "" and not state.startswith("Z")


def all_end(pids: list[int], *, within: float) -> bool:
    deadline = time.monotonic() + within
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
