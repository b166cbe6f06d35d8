"""The examples for clusters: the SLURM script against stand-ins of its commands, the Modal app against one of Modal."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from flatpeak.config.load import load_recipe, parse_config
from support.workers import wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"
SRUN = """#!/bin/bash
trap 'echo stopped >> {log}; exit 143' TERM
echo "$@" > {log}.command
echo started >> {log}
if [ -n "$SRUN_CODE" ]; then exit "$SRUN_CODE"; fi
for _ in $(seq 200); do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo node-a; echo node-b; else echo "$@" >> {log}; fi
"""


@pytest.fixture
def job(tmp_path: Path):
    """Start the script with stand-ins of srun and scontrol; the log is what they were asked to do."""
    log = tmp_path / "log"
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script.format(log=log))
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "17"}

    def start(**environment: str) -> tuple[subprocess.Popen[str], Path]:
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", str(EXAMPLES / "slurm" / "train.sbatch"), "my-run.yaml", "training.steps=9"]
        return subprocess.Popen(command, env=os.environ | slurm | environment | {"PATH": path}, text=True), log

    return start


def test_a_preempted_job_saves_and_queues_itself_again(job):
    process, log = job()
    wait_for(lambda: log.exists() and "started" in log.read_text())
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) == 0
    assert log.read_text().split() == ["started", "stopped", "requeue", "17"]
    command = Path(f"{log}.command").read_text()
    assert "--nnodes 2 --nproc-per-node 4" in command
    assert "--rdzv-endpoint node-a:29500" in command
    assert command.rstrip().endswith("train my-run.yaml distributed.processes=8 training.steps=9 --resume")


@pytest.mark.parametrize("code", [0, 2])
def test_a_job_that_ends_by_itself_is_not_queued_again(job, code):
    process, log = job(SRUN_CODE=str(code))
    assert process.wait(timeout=20) == code
    assert log.read_text().split() == ["started"]


def unwrapped(**settings: Any) -> Any:
    """The stand-in of Modal's decorators: the function itself, with what it was asked for."""

    def keep(function: Any) -> Any:
        function.settings = settings
        function.remote, function.starmap = MagicMock(), MagicMock(return_value=[])
        return function

    return keep


@pytest.fixture
def modal_app(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the app, read with a stand-in of Modal."""
    modal = MagicMock()
    modal.App.return_value = SimpleNamespace(function=unwrapped, local_entrypoint=unwrapped)
    monkeypatch.setitem(sys.modules, "modal", modal)
    return runpy.run_path(str(EXAMPLES / "modal_app.py")) | {"modal": modal}


def test_the_modal_app_asks_for_gpus_a_volume_and_more_tries(modal_app):
    settings = modal_app["train"].settings
    assert settings["gpu"] == "H100:2"
    assert list(settings["volumes"]) == ["/runs"]
    assert settings["timeout"] == 24 * 3600
    assert modal_app["modal"].Retries.call_args.kwargs["max_retries"] == 3


def test_the_modal_app_runs_a_recipe_that_parses_and_resumes(modal_app):
    python, *command = modal_app["command"]("flatpeak:demo", "training.steps=9", 3)
    assert (python, command[:3], command[-1]) == (sys.executable, ["-m", "flatpeak", "train"], "--resume")
    config = parse_config(load_recipe(command[3], command[4:-1]))
    assert (config.distributed.processes, config.run.seed, config.training.steps) == (2, 3, 9)
    assert (config.run.directory, config.run.name) == ("/runs", "seed-3")


@pytest.mark.parametrize(("code", "raises"), [(0, False), (2, False), (1, True), (143, True)])
def test_the_modal_function_is_tried_again_after_failures_and_preemption(modal_app, monkeypatch, code, raises):
    monkeypatch.setattr(subprocess, "run", lambda command, check: SimpleNamespace(returncode=code))
    if raises:
        with pytest.raises(RuntimeError, match=f"exit code {code}"):
            modal_app["train"]("flatpeak:demo")
    else:
        assert modal_app["train"]("flatpeak:demo") == code


def test_seeds_are_started_side_by_side(modal_app):
    modal_app["main"](recipe="r.yaml", settings="a=1", seeds="0,5")
    modal_app["train"].starmap.assert_called_once_with([("r.yaml", "a=1", 0), ("r.yaml", "a=1", 5)])
