"""Runs that are stopped or die and go on, and all that they leave behind, for comparison."""

from __future__ import annotations

import functools
import hashlib
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

from flatpeak.runs.checkpoints import checkpoint_name, checkpoint_steps, newest_valid
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


def left_by(run: Path) -> dict[str, Any]:
    """All that a run leaves but for times, by the path in it."""
    left = dict[str, Any]()
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_symlink():
            left[name] = path.readlink().name
        elif path.is_file() and path.name not in UNLIKE and path.parent.name != "judge":
            read = completions_of if path.parent.name == "rollouts" else TOLD.get(path.name, fingerprint)
            left[name] = read(path)
    return left


def fingerprint(path: Path) -> str:
    """The hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rows_without_times(path: Path) -> str:
    """The rows of metrics, without what a judge has cost; as text, in which NaN equals itself."""
    unlike = (*TIMES, "judge/")
    return repr([{k: v for k, v in row.items() if not k.startswith(unlike)} for row in read_metrics(path)])


def without(*names: str) -> Callable[[Path], Any]:
    """A JSON file without some of its values, each by the keys that lead there."""

    def read(path: Path) -> Any:
        content = json.loads(path.read_text())
        for name in names:
            *parents, last = name.split(" ")
            inner = content
            for parent in parents:
                inner = inner.get(parent, {})
            inner.pop(last, None)
        return content

    return read


def notices(path: Path) -> list[tuple[Any, ...]]:
    """The notices, without their times and those that count steps, which they do anew after a resume."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["stage"], row["step"], row["text"]) for row in rows if " so far " not in row["text"]]


def completions_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a step's rollouts, without the number of the weights, which begins anew after a resume."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "weight_version"} for row in rows]


def newest_is_the_last_step(run: Path) -> bool:
    """Whether the newest checkpoint is that of the last step in metrics.jsonl."""
    steps = [(row["stage"], row["step"]) for row in read_metrics(run / "metrics.jsonl") if row["stage"] != "eval"]
    if not steps:
        return True
    stage, step = steps[-1]
    parent = run / "checkpoints" / ("sft" if stage == "sft" else "")
    newest = newest_valid(parent) or newest_valid(run / "checkpoints")
    rl_began = stage == "sft" and (run / "checkpoints" / checkpoint_name(0)).exists()
    return rl_began or (newest is not None and newest.name == checkpoint_name(step))


def differences(left: Mapping[str, Any], expected: Mapping[str, Any], *, stopped: bool) -> list[str]:
    """The files that differ or are only in one; a stopped run may have further checkpoints."""
    names = [name for name in left.keys() | expected.keys() if left.get(name) != expected.get(name)]
    extra = {name for name in names if name not in expected and stopped and name.startswith("checkpoints/")}
    return sorted(set(names) - extra)


UNLIKE = {"manifest.json", "report.html"}
"""Files that tell when a run was started or saved, and hashes of what is compared itself."""
TOLD: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl": rows_without_times,
    "notices.jsonl": notices,
    "state.json": without("history seconds"),
    "summary.json": without("wall_seconds", "checkpoints"),
}
