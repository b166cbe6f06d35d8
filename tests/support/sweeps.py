"""Sweep files over tiny runs, and workers for them within the test's own process."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.models import RUN_SIZES

RECIPE: dict[str, Any] = {
    "run": {"checkpoint_every": 1, "log_rollouts_every": 0},
    "model": {
        "new": {"architecture": "qwen2", "config": {**RUN_SIZES, "num_hidden_layers": 1}},
        "device": "cpu",
    },
    "task": {"type": "arithmetic", "max_value": 9, "train_size": 30, "test_size": 6},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4},
    "optimizer": {"learning_rate": 1e-2},
    "training": {"steps": 3},
    "evaluation": {"every": 0},
}
FUNCTIONS = '''
"""Functions of a user: rows of a prefix, and rewards."""

import json
import time

calls = []


def write_rows(directory, seed, count=4):
    print("rows of seed", seed)
    (directory / "rows.json").write_text(json.dumps([seed] * count))


def fail(directory, seed):
    raise ValueError(f"no rows for seed {seed}")


def first_letters(completions, **columns):
    return [sum(ord(letter) for letter in text) % 7 / 7 for text in completions]


def slow(completions, **columns):
    time.sleep(0.1)
    return first_letters(completions)


def broken(completions, **columns):
    raise ValueError("no score today")


def counted(completions, **columns):
    """A reward that depends on how often its module was used before."""
    calls.append(len(completions))
    return [(len(calls) + index) % 5 / 5 for index, _ in enumerate(completions)]
'''
# Functions are called in the process that trains, so that no grading processes have to start.
SETTINGS = {"evaluation.accuracy": None, "evaluation.metric": "reward", "run.grading_workers": 0}
PREFIX = {
    "data": {"call": "functions.py:write_rows", "arguments": {"count": 3}},
    "sft": {"sft": "recipe.yaml", "settings": {"sft.steps": 2, "sft.batch_size": 4}},
}
FROM_PREFIX = {"model.new": None, "model.path": "${prefix}/sft/checkpoints/sft/last"}


def write_sweep(directory: Path, *, settings: Mapping[str, Any] | None = None, **sections: Any) -> Path:
    """Write sweep.yaml with recipe.yaml and functions.py beside it; its runs go to `directory / "sweeps"`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "functions.py").write_text(FUNCTIONS)
    (directory / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    content = {
        "name": "tiny",
        "directory": str(directory / "sweeps"),
        "recipe": "recipe.yaml",
        "seeds": "1-2",
        "settings": {**SETTINGS, "rewards": {"letters": reward(directory, "first_letters")}, **(settings or {})},
        **sections,
    }
    path = directory / "sweep.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def reward(directory: Path, name: str) -> dict[str, Any]:
    """The section of a reward by one of the functions."""
    return {"type": "function", "function": f"{directory / 'functions.py'}:{name}"}


class LocalWorker:
    """A worker whose jobs run within this process, at once, where torch is loaded already."""

    started: list[LocalWorker]

    def __init__(self, index: int, *, log: Path, gpu: str | None = None) -> None:
        from flatpeak.experiments.cell_worker import ProcessState

        self.index = index
        self.gpu = gpu
        self.connection, self._other = socket.socketpair()
        self._state = ProcessState()
        self.outcomes: list[dict[str, Any]] = []
        self.started.append(self)

    def send(self, job: Mapping[str, Any] | None) -> None:
        from flatpeak.experiments.cell_worker import run_job

        if job is not None:
            with self._state.restored():
                self.outcomes.append(run_job(json.loads(json.dumps(job))))
            self._other.send(b"\n")

    def receive(self) -> dict[str, Any] | None:
        if not self.outcomes:
            return None
        self.connection.recv(1)
        return self.outcomes.pop(0)

    def is_alive(self) -> bool:
        return True

    def interrupt(self) -> None:
        raise AssertionError("its jobs are over before anything can interrupt them")

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()
        self._other.close()


def use_local_workers(patch: pytest.MonkeyPatch) -> type[LocalWorker]:
    """Let sweeps work within this process; returns the class of this patch's workers, with those that it has begun."""
    import flatpeak.experiments.sweep
    from support.runs import speed_up_runs

    speed_up_runs(patch)
    kind: type[LocalWorker] = type("Worker", (LocalWorker,), {"started": []})
    patch.setattr(flatpeak.experiments.sweep, "WorkerProcess", kind)
    return kind
