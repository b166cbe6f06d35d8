"""What a killed trainer leaves behind: no workers, and nothing that they had started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.workers import all_end

SLEEPING = """
import subprocess, sys, time
from flatpeak.rewards.workers.pool import WorkerPool
from support.worker_functions import start_and_sleep

with WorkerPool(2, timeout=120) as pool:
    calls = [pool.submit(start_and_sleep, own_session) for own_session in (False, True)]
    calls[0].result()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the processes of Linux")
def test_busy_workers_and_what_they_started_end_with_a_killed_trainer() -> None:
    tests = Path(__file__).parents[1]
    trainer = subprocess.Popen(
        [sys.executable, "-c", SLEEPING], env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    )
    deadline = time.monotonic() + 60
    processes: list[psutil.Process] = []
    # The server, two workers, and a program of each.
    while len(processes) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
        processes = psutil.Process(trainer.pid).children(recursive=True)
    assert len(processes) == 5
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert all_end([process.pid for process in processes], within=10)
