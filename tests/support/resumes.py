"""Runs that are stopped or die and go on, and all that they leave behind, for comparison."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatpeak.runs.checkpoints import checkpoint_name, checkpoint_steps
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.notices import read_notices
from flatpeak.runs.summary import read_summary
from flatpeak.training.learner import Learner

Stops = Mapping[tuple[str, int], Callable[[], None]]
TIMES = ("time/", "throughput/", "memory/", "gradreg/time_share")
SFT_STEPS, RL_STEPS = 3, 5
EVERYTHING: dict[str, Any] = {
    "run": {"checkpoint_every": 2, "keep_checkpoints": 1},
    "model": {"new": {"config": {"num_hidden_layers": 1}}},
    "rollout": {"prompts_per_step": 4, "group_size": 3},
    "advantage": {"scale": "none"},
    "kl": {"coefficient": 0.05},
    "optimizer": {"schedule": "cosine", "warmup_steps": 2},
    "training": {
        "steps": RL_STEPS,
        "epochs_per_rollout": 2,
        "minibatches": 2,
        "micro_batch_tokens": 40,
        "dynamic_sampling": {"max_resamples": 2},
    },
    "curriculum": {"task": {"type": "arithmetic", "max_value": 5, "train_size": 5, "test_size": 2}, "steps": 2},
    "sft": {"steps": SFT_STEPS, "batch_size": 8, "optimizer": {"learning_rate": 1e-2}},
    "evaluation": {"every": 2, "metric": "reward", "size": 3, "final_size": 6},
}


class Judge:
    """Rollouts by their first token, so that some groups are dead; greedy answers by a script, best at RL step 2."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, group: Any) -> list[float]:
        if len(group.completions) == 1:
            return [{2: 0.9}.get(self.step, self.step / 10)]
        return [float(completion.token_ids[0] % 2) for completion in group.completions]

    def at(self, step: int, action: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """Know that the step is done, then act."""

        def act() -> None:
            self.step = step
            action()

        return act


def diverge(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[list[torch.nn.Parameter]], None]) -> None:
    """Let `spoil` change the trained weights, in place, at the end of the third update."""
    plain, calls = Learner.update, itertools.count(1)

    def update(self: Learner, *args: Any, **kwargs: Any) -> Any:
        statistics = plain(self, *args, **kwargs)
        if next(calls) == 3:
            with torch.no_grad():
                spoil(self.policy.parameters())
        return statistics

    monkeypatch.setattr(Learner, "update", update)


class Death(BaseException):
    """Stands for a kill where a test cannot afford a process of its own."""


def die() -> None:
    raise Death


class CountedCalls:
    """Calls of some functions, with an action before one of them."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *functions: tuple[Any, str],
        at: int = 0,
        action: Callable[[], None] = lambda: None,
    ) -> None:
        """`functions`: their owners and names. `at`: the number of the call, from 1; 0: none."""
        self.count, self.at, self.action = 0, at, action
        for owner, name in functions:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                self.action()
            return plain(*args, **kwargs)

        return counted


def steps_of(run: Path) -> list[Path]:
    """Every checkpoint, those of SFT first."""
    parents = (run / "checkpoints" / "sft", run / "checkpoints")
    return [parent / checkpoint_name(step) for parent in parents for step in checkpoint_steps(parent)]


class Run:
    """One run of a recipe, which may be interrupted and go on."""

    def __init__(self, train: Callable[..., Any], watch: Callable[..., Any], config: dict[str, Any]) -> None:
        self.train, self.watch, self.config = train, watch, config
        self.path = Path(config["run"]["directory"]) / config["run"]["name"]

    def start(self, *, stop: Stops | None = None, judge: Judge | None = None, **options: Any) -> Any:
        """Start it; `stop[stage, step]` is called when that step is recorded."""
        judge = judge or Judge()
        last = self.path / "checkpoints" / "last"
        if options.get("resume") and last.exists():
            judge.step = int(last.readlink().name.removeprefix("step_"))
        actions = {("train", step): judge.at(step) for step in range(1, RL_STEPS + 1)}
        for (stage, step), action in (stop or {}).items():
            actions[stage, step] = judge.at(step, action) if stage == "train" else action
        return self.train(self.config, reward=judge, progress=self.watch(actions), **options)

    def stop_at(self, stage: str, step: int, number: int = signal.SIGTERM) -> Any:
        """Start it, and send it a signal when that step is recorded."""
        stopped = self.start(stop={(stage, step): lambda: os.kill(os.getpid(), number)})
        assert stopped.exit_code == 128 + number
        return stopped

    def die_at(self, stage: str, step: int) -> None:
        """Start it, and end it without a word when that step is recorded."""
        with pytest.raises(Death):
            self.start(stop={(stage, step): die})

    def finish(self, **options: Any) -> dict[str, Any]:
        """Start it, or resume it, to its end; its outcome."""
        assert self.start(**options).exit_code == 0
        return outcome(self.path)

    def go_on(self) -> dict[str, Any]:
        """Resume it to its end; its outcome."""
        return self.finish(resume=True)


MakeRun = Callable[..., Run]
"""The fixture `make_run`."""
Whole = Callable[..., dict[str, Any]]
"""The fixture `whole`."""


def outcome(path: Path) -> dict[str, Any]:
    """All that a run leaves behind, but for times."""
    last = path / "checkpoints" / "last"
    state = json.loads((last / "trainer" / "state.json").read_text())
    del state["history"]["seconds"]
    summary = read_summary(path / "summary.json")
    return {
        "weights": _weights(last),
        "optimizer": load_file(last / "trainer" / "state.safetensors"),
        "state": state,
        "files": {file.name: file.read_bytes() for file in last.glob("*config.json")}
        | {file.name: file.read_bytes() for file in last.glob("tokenizer*")},
        "metrics": [
            {name: value for name, value in row.items() if not name.startswith(TIMES)}
            for row in read_metrics(path / "metrics.jsonl")
        ],
        "notices": [(row["stage"], row["step"], row["text"]) for row in read_notices(path / "notices.jsonl")],
        "rollouts": {file.name: file.read_bytes() for file in (path / "rollouts").iterdir()},
        "evaluations": {file.name: file.read_bytes() for file in (path / "evaluations").iterdir()},
        "summary": (summary.status, summary.best_step, summary.last_step, summary.evaluations, summary.signal),
        "links": {name: (path / "checkpoints" / name).readlink() for name in ("best", "last")},
        "best": _weights(path / "checkpoints" / "best"),
    }


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of a model or of its adapters."""
    (file,) = checkpoint.glob("*model.safetensors")
    return load_file(file)


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for what in ("weights", "optimizer", "best"):
        assert actual[what].keys() == expected[what].keys()
        for name, tensor in expected[what].items():
            assert torch.equal(actual[what][name], tensor), (what, name)
    for what in ("metrics", "notices", "state", "files", "rollouts", "evaluations", "summary", "links"):
        assert actual[what] == expected[what], what
