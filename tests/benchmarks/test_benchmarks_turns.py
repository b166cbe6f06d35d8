from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from benchmarks.harness import worker_process as turns
from benchmarks.harness.workers import ROOT, Worker, WorkerError, take_turns

WORKER = """
import json, sys
from pathlib import Path
from benchmarks.harness.worker_process import Link

link, arguments = Link(), json.loads(sys.argv[1])
if arguments["ends"] == 0:
    raise SystemExit("no start")
print("noise of a library")
link.tell(name=arguments["name"])
for number in range(arguments["ends"]):
    told = link.wait()["round"]
    with Path("order").open("a") as file:
        file.write(f"{arguments['name']}{told} ")
    link.tell(tokens=10 * told, cpu=1.0)
link.wait()
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


def test_workers_take_turns_and_the_first_rounds_do_not_count(tmp_path: Path) -> None:
    starts = {name: worker(tmp_path, name) for name in ("a", "b")}
    figures, failures, facts = take_turns(starts, uncounted=1, rounds=2, say=lambda text: None)
    assert (tmp_path / "order").read_text(encoding="utf-8") == "a0 b0 a1 b1 a2 b2 "
    assert figures == {name: [{"tokens": 10, "cpu": 1.0}, {"tokens": 20, "cpu": 1.0}] for name in "ab"}
    assert failures == {}
    assert facts == {"a": {"name": "a"}, "b": {"name": "b"}}


def test_a_worker_that_fails_says_why_and_does_not_stop_the_others(tmp_path: Path) -> None:
    starts = {"a": worker(tmp_path, "a", ends=2), "b": worker(tmp_path, "b"), "c": worker(tmp_path, "c", ends=0)}
    figures, failures, _ = take_turns(starts, uncounted=0, rounds=3, say=lambda text: None)
    assert [len(found) for found in figures.values()] == [2, 3]
    assert "exit status 1" in failures["a"]
    assert "ValueError: had enough" in failures["a"]
    assert failures["c"].endswith("no start\n")
    assert "noise of a library" in (tmp_path / "b.log").read_text(encoding="utf-8")


def test_a_worker_ends_when_nobody_asks_any_more(tmp_path: Path) -> None:
    with worker(tmp_path, "a")() as started:
        started.ready()
    with pytest.raises((WorkerError, ValueError)):
        started.receive()


def test_processes_below_this_one_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in turns._descendants()
        child.communicate(b"\n")
    assert child.pid not in turns._descendants()


def test_a_peak_is_counted_from_what_was_loaded() -> None:
    meter = turns.Meter()
    meter.loaded()
    meter.start()
    block = bytearray(64 * 2**20)
    del block
    assert meter.stop()["peak_mib"] == pytest.approx(64, abs=8)
    meter.start()
    assert meter.stop()["peak_mib"] == pytest.approx(0, abs=8)
