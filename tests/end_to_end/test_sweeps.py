"""A sweep in processes of its own: interrupted, killed, with a worker that dies, and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatpeak.experiments.sweep import run_sweep
from flatpeak.experiments.table import read_table
from flatpeak.runs.metrics import read_metrics
from support.sweeps import FROM_PREFIX, PREFIX, reward, use_local_workers, write_sweep

ARMS = ("none", "kl")


def sweep_file(directory: Path, *, disturbed: bool) -> Path:
    """Two arms; in a disturbed sweep their runs take a second, and those of a third kill their own process."""
    deadly = {"deadly": {"settings": {"rewards.letters": reward(directory, "deadly")}}}
    return write_sweep(
        directory,
        settings={
            **FROM_PREFIX,
            "training.steps": 6,
            "rewards.letters": reward(directory, "slow" if disturbed else "first_letters"),
        },
        prefix=PREFIX,
        arms={"none": {}, "kl": {"settings": {"kl.coefficient": 0.3}}, **(deadly if disturbed else {})},
        seeds=[3],
    )


def start(path: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flatpeak", "sweep", str(path), "--processes", "2", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def train_steps(runs: Path) -> int:
    """The number of training steps that the runs have logged."""
    return sum(row["stage"] == "train" for path in runs.glob("*/*/metrics.jsonl") for row in read_metrics(path))


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(child) for child in children.split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_a_sweep_that_was_interrupted_and_killed_has_the_table_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sweep_file(tmp_path / "disturbed", disturbed=True)
    runs = tmp_path / "disturbed" / "sweeps" / "tiny" / "runs"

    process = start(path)
    wait_for(lambda: train_steps(runs) >= 3, process)
    workers = workers_of(process)
    os.kill(process.pid, signal.SIGINT)
    output = process.communicate()[0]
    assert process.returncode == 130, output
    assert f"go on with\nflatpeak sweep {path} --processes 2\n" in output
    assert not any(is_alive(pid) for pid in workers)
    table = read_table(runs.parent / "table.csv")
    assert set(table.column("status")) == {"stopped", "missing"}

    steps = train_steps(runs)
    process = start(path)
    wait_for(lambda: train_steps(runs) >= steps + 2, process)
    workers = workers_of(process)
    assert workers
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_alive(pid) for pid in workers)

    process = start(path, "--json")
    output = process.communicate()[0]
    assert process.returncode == 1, output
    assert '"done": 2, "failed": 1, "stopped": 0, "missing": 0' in output
    disturbed = read_table(runs.parent / "table.csv").without_times()
    reasons = {row["reason"] for row in disturbed.rows if row["arm"] == "deadly"}
    assert reasons == {"the worker process was killed by SIGKILL, as the system does when memory runs out"}
    assert (runs.parent / "prefix" / "seed-3" / "data.log").read_text() == "rows of seed 3\n"

    use_local_workers(monkeypatch)
    plain = sweep_file(tmp_path / "plain", disturbed=False)
    result = run_sweep(plain, processes=2, notice=lambda text: None)
    undisturbed = read_table(result.table).without_times()
    assert rows_of(disturbed) == rows_of(undisturbed)
    assert len(rows_of(disturbed)) == 2


def rows_of(table: Any) -> list[dict[str, Any]]:
    """The rows of the arms that can finish, without the columns in which the other arm makes them differ."""
    return [
        {key: value for key, value in row.items() if not key.startswith(("rewards.", "training."))}
        for row in table.rows
        if row["arm"] in ARMS
    ]
