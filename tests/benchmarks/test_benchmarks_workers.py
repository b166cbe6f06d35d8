"""Workers that measure in turn, and the memory that their meter reports."""

from __future__ import annotations

import mmap
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.harness.worker_process import Meter
from benchmarks.harness.workers import ROOT, Worker, measure_in_turn

from flatpeak.utils.peak_memory import PeakMemory

WORKER = """
import json, sys
from pathlib import Path
from benchmarks.harness.worker_process import ParentPipe

parent, arguments = ParentPipe(), json.loads(sys.argv[1])
if arguments["ends"] == 0:
    raise SystemExit("no start")
print("noise of a library")
parent.send(name=arguments["name"])
for _ in range(arguments["ends"]):
    number = parent.receive()["round"]
    with Path("order").open("a") as file:
        file.write(f"{arguments['name']}{number} ")
    parent.send(tokens=10 * number, cpu=1.0)
parent.receive()
raise ValueError("had enough")
"""


def worker(directory: Path, name: str, *, ends: int = 100) -> partial[Worker]:
    (directory / "some_worker.py").write_text(WORKER, encoding="utf-8")
    return partial(
        Worker,
        "some_worker",
        {"name": name, "ends": ends},
        log=directory / f"{name}.log",
        environment={"PYTHONPATH": os.pathsep.join((str(directory), str(ROOT)))},
    )


def test_workers_measure_in_turn_and_the_uncounted_ones_come_first(tmp_path: Path) -> None:
    starts = {name: worker(tmp_path, name) for name in ("a", "b")}
    measured, failures, facts = measure_in_turn(starts, uncounted=1, repeats=2, say=lambda text: None)
    assert (tmp_path / "order").read_text(encoding="utf-8") == "a0 b0 a1 b1 a2 b2 "
    assert measured == {name: [{"tokens": 10, "cpu": 1.0}, {"tokens": 20, "cpu": 1.0}] for name in "ab"}
    assert failures == {}
    assert facts == {"a": {"name": "a"}, "b": {"name": "b"}}


def test_a_worker_that_fails_says_why_and_does_not_stop_the_others(tmp_path: Path) -> None:
    starts = {"a": worker(tmp_path, "a", ends=2), "b": worker(tmp_path, "b"), "c": worker(tmp_path, "c", ends=0)}
    measured, failures, _ = measure_in_turn(starts, uncounted=0, repeats=3, say=lambda text: None)
    assert [len(each) for each in measured.values()] == [2, 3]
    assert "exit status 1" in failures["a"]
    assert "ValueError: had enough" in failures["a"]
    assert failures["c"].endswith("no start\n")
    assert "noise of a library" in (tmp_path / "b.log").read_text(encoding="utf-8")


def touch_memory() -> None:
    """Use 64 MiB for a moment: pages of their own, since malloc may have some that earlier runs have freed."""
    with mmap.mmap(-1, 64 * 2**20) as pages:
        pages[:: mmap.PAGESIZE] = bytes(len(pages) // mmap.PAGESIZE)


def test_a_peak_is_counted_from_what_was_loaded() -> None:
    meter = Meter()
    meter.loaded()
    meter.start()
    touch_memory()
    assert meter.stop()["peak_mib"] == pytest.approx(64, abs=8)
    meter.start()
    assert meter.stop()["peak_mib"] == pytest.approx(0, abs=8)


def test_a_peak_that_flatpeaks_step_has_reset_still_counts() -> None:
    meter = Meter()
    meter.loaded()
    meter.start()
    memory = PeakMemory(torch.device("cpu"))
    with memory.phase("update"):
        touch_memory()
    with memory.phase("rollout"):
        pass
    if len(memory.metrics()) == 1:
        pytest.skip("the sandbox forbids /proc/self/clear_refs")
    assert meter.stop()["peak_mib"] == pytest.approx(0, abs=8)
    with memory.phase("update"):
        touch_memory()
    with memory.phase("rollout"):
        pass
    meter.update("train", step=1, total=1, metrics=memory.metrics())
    assert meter.stop()["peak_mib"] == pytest.approx(64, abs=8)
    meter.start()
    assert meter.stop()["peak_mib"] == pytest.approx(0, abs=8)
