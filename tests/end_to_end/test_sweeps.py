"""A sweep in processes of its own, interrupted, killed, and gone on with."""

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
from support.workers import all_end, children

pytestmark = pytest.mark.slow


def sweep_file(directory: Path, function: str) -> Path:
    """Two arms after a prefix; `function` is their reward, slow or not."""
    settings = {"training.steps": 20, "run.threads": 1, "rewards.letters": reward(directory, function)}
    arms: dict[str, Any] = {"none": {}, "kl": {"settings": {"kl.coefficient": 0.3}}}
    return write_sweep(directory, settings={**FROM_PREFIX, **settings}, prefix=PREFIX, arms=arms, seeds=[3])


def start(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flatpeak", "sweep", str(path), "--processes", "1"],
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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_a_sweep_that_was_interrupted_and_killed_has_the_table_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sweep_file(tmp_path / "disturbed", "slow")
    runs = tmp_path / "disturbed" / "sweeps" / "tiny" / "runs"

    process = start(path)
    wait_for(lambda: train_steps(runs) >= 3, process)
    workers = list(children(process.pid))
    os.kill(process.pid, signal.SIGINT)
    output = process.communicate()[0]
    assert process.returncode == 130, output
    assert f"go on with\nflatpeak sweep {path} --processes 1\n" in output
    assert all_end(workers, within=0)
    table = read_table(runs.parent / "table.csv")
    assert table.column("status") == ["stopped", "missing"]
    assert (runs.parent / "prefix" / "seed-3" / "data.log").read_text() == "rows of seed 3\n"

    steps = train_steps(runs)
    process = start(path)
    wait_for(lambda: train_steps(runs) >= steps + 2, process)
    workers = list(children(process.pid))
    assert workers
    process.kill()
    process.communicate()
    assert all_end(workers, within=60)

    use_local_workers(monkeypatch)
    results = [
        run_sweep(file, processes=1, notice=lambda text: None)
        for file in (path, sweep_file(tmp_path / "plain", "first_letters"))
    ]
    assert [(result.done, result.exit_code) for result in results] == [(2, 0), (2, 0)]
    disturbed, plain = (read_table(result.table).without_times() for result in results)
    assert disturbed.rows == plain.rows
    assert disturbed.columns == plain.columns
    for arm in ("none", "kl"):
        weights = [result.path / "runs" / arm / "seed-3/checkpoints/last/model.safetensors" for result in results]
        assert weights[0].read_bytes() == weights[1].read_bytes()
