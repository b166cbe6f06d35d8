"""A run that was killed anywhere, without a word, resumes from its last checkpoint and ends the same, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatpeak.runs.metrics import read_metrics
from flatpeak.training import recorder
from support.resumes import Death, MakeRun, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

KILLED = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
import pytest
import flatpeak
from conftest import Watcher
from support.resumes import Judge
from support.runs import speed_up_runs
speed_up_runs(pytest.MonkeyPatch())  # as the run that it is compared with
judge = Judge()
kill = judge.at(3, lambda: os.kill(os.getpid(), signal.SIGKILL))
watcher = Watcher({("train", 1): judge.at(1), ("train", 2): judge.at(2), ("train", 3): kill})
flatpeak.train(json.loads(sys.argv[1]), reward=judge, progress=watcher)
"""


def test_a_killed_process_leaves_a_run_that_ends_the_same(make_run: MakeRun, uninterrupted: dict[str, Any]) -> None:
    run = make_run()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(run.config)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert [row["step"] for row in read_metrics(run.path / "metrics.jsonl") if row["stage"] == "train"] == [1, 2, 3]
    assert (run.path / "checkpoints" / "last").readlink() == Path("step_000002")
    assert_same(run.go_on(), uninterrupted)


@pytest.mark.parametrize(
    ("stage", "step"),
    [("eval", 0), ("sft", 1), ("sft", 3), ("eval", 3), ("train", 1), ("train", 3), ("eval", 4), ("train", 5)],
)
def test_a_run_that_died_between_checkpoints_ends_the_same(
    make_run: MakeRun, uninterrupted: dict[str, Any], stage: str, step: int
) -> None:
    run = make_run()
    run.die_at(stage, step)
    assert_same(run.go_on(), uninterrupted)


@pytest.mark.parametrize("link", ["last", "best"])
def test_a_run_that_died_before_it_pointed_at_its_new_checkpoint_ends_the_same(
    make_run: MakeRun, uninterrupted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    original = recorder.link_checkpoint

    def link_checkpoint(parent: Path, name: str, target: Path) -> None:
        if (name, target.name) == (link, "step_000002") and parent.name == "checkpoints":
            raise Death
        original(parent, name, target)

    run = make_run()
    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(recorder, "link_checkpoint", link_checkpoint)
        run.start()
    assert_same(run.go_on(), uninterrupted)


def test_a_damaged_checkpoint_is_passed_over(make_run: MakeRun, uninterrupted: dict[str, Any]) -> None:
    run = make_run(run={"keep_checkpoints": 3})
    run.stop_at("train", 5)
    model = run.path / "checkpoints" / "step_000005" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    result = run.go_on()
    stage, step, text = result["notices"].pop()
    assert (stage, step) == ("train", 4)
    assert text.endswith("an older checkpoint is used")
    assert_same(result, uninterrupted)
