"""Stopped anywhere and resumed, a run ends as if it had never been interrupted, bit for bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.summary import read_summary

TIMES = ("time/", "throughput/", "memory/")
SFT_STEPS, RL_STEPS = 3, 6
EVERYTHING: dict[str, Any] = {
    "run": {"checkpoint_every": 2, "keep_checkpoints": 1},
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
    "curriculum": {"task": {"type": "arithmetic", "max_value": 5, "train_size": 7, "test_size": 2}, "steps": 3},
    "sft": {"steps": SFT_STEPS, "batch_size": 8, "optimizer": {"learning_rate": 1e-2}},
    "evaluation": {"every": 2, "metric": "reward", "size": 3, "final_size": 6, "samples": 2, "k": [1, 2]},
}


class Judge:
    """Rollouts by their first token, so that some groups are dead; greedy answers by a script, best at RL step 2."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, group: Any) -> list[float]:
        if len(group.completions) == 1:
            return [{2: 0.9}.get(self.step, self.step / 10)]
        return [float(completion.token_ids[0] % 2) for completion in group.completions]


class Run:
    """One run of a recipe, which may be interrupted and go on."""

    def __init__(self, train: Callable[..., Any], watch: Any, config: dict[str, Any], **given: Callable[[], Any]) -> None:
        self.train, self.watch, self.config, self.given = train, watch, config, given
        self.path = Path(config["run"]["directory"]) / config["run"]["name"]

    def start(
        self, *, stop: Mapping[tuple[str, int], Callable[[], None]] | None = None, resume: bool = False, reward: Any = None
    ) -> Any:
        judge = Judge()
        actions = {("train", step): self._then(judge, step, None) for step in range(1, 50)}
        for (stage, step), action in (stop or {}).items():
            actions[stage, step] = self._then(judge, step, action) if stage == "train" else action
        given = {name: make() for name, make in self.given.items()}
        return self.train(
            self.config, reward=reward or judge, progress=self.watch(actions), resume=resume, **given
        )

    @staticmethod
    def _then(judge: Judge, step: int, action: Callable[[], None] | None) -> Callable[[], None]:
        def act() -> None:
            judge.step = step
            if action is not None:
                action()

        return act


def outcome(path: Path) -> dict[str, Any]:
    """Everything that a run leaves behind, but for times."""
    last = path / "checkpoints" / "last"
    state = json.loads((last / "trainer.json").read_text())
    del state["history"]["seconds"]
    summary = read_summary(path / "summary.json")
    return {
        "weights": load_file(last / "model.safetensors"),
        "optimizer": load_file(last / "trainer.safetensors"),
        "state": state,
        "metrics": [
            {name: value for name, value in row.items() if not name.startswith(TIMES)}
            for row in read_metrics(path / "metrics.jsonl")
        ],
        "rollouts": {file.name: file.read_bytes() for file in (path / "rollouts").iterdir()},
        "evaluations": {file.name: file.read_bytes() for file in (path / "evaluations").iterdir()},
        "summary": (summary.status, summary.best_step, summary.last_step, summary.evaluations, summary.signal),
        "links": {name: (path / "checkpoints" / name).readlink() for name in ("best", "last")},
        "best": load_file(path / "checkpoints" / "best" / "model.safetensors"),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for what in ("weights", "optimizer", "best"):
        assert found[what].keys() == expected[what].keys()
        for name, tensor in expected[what].items():
            assert torch.equal(found[what][name], tensor), (what, name)
    for what in ("metrics", "state", "rollouts", "evaluations", "summary", "links"):
        assert found[what] == expected[what], what


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], scope="module")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def make_run(recipe: Callable[..., Any], train: Callable[..., Any], watch: Any) -> Callable[..., Run]:
    def make(name: str = "tiny", **sections: Any) -> Run:
        from flatpeak.recipe import merge

        return Run(train, watch, recipe(**merge(merge(EVERYTHING, sections), {"run": {"name": name}})))

    return make


@pytest.fixture(scope="module")
def uninterrupted(threads: int) -> dict[str, Any]:
    """Filled by the first test that asks for it, once for each number of threads."""
    return {}


@pytest.fixture
def expected(uninterrupted: dict[str, Any], make_run: Callable[..., Run]) -> dict[str, Any]:
    if not uninterrupted:
        run = make_run("uninterrupted")
        assert run.start().exit_code == 0
        uninterrupted.update(outcome(run.path))
    return uninterrupted


def test_the_uninterrupted_run_has_all_that_a_resumed_one_could_lose(expected: dict[str, Any]) -> None:
    rows = [row for row in expected["metrics"] if row["stage"] == "train"]
    assert expected["links"] == {"best": Path("step_000002"), "last": Path("step_000006")}
    assert max(row["groups/drawn"] for row in rows) > 4
    assert all(row["optimizer/updates"] == 4 for row in rows)
    assert min(row["policy/kl_reference"] for row in rows[1:]) > 0
    # 12 places of the first phase are more than a pass over its 7 prompts.
    assert expected["state"]["stage"]["phase"] == 1
    assert expected["state"]["stage"]["cursors"][0] > 7
    assert [(row.stage, row.step) for row in expected["summary"][3]] == [
        ("start", 0),
        ("sft", 3),
        ("train", 2),
        ("train", 4),
        ("train", 6),
    ]


@pytest.mark.parametrize(
    ("stage", "step"),
    [("eval", 0), ("sft", 1), ("sft", 3), ("eval", 3), ("train", 1), ("train", 2), ("train", 3), ("train", 5)],
)
def test_a_run_stopped_between_steps_ends_the_same(
    make_run: Callable[..., Run], expected: dict[str, Any], send: Any, stage: str, step: int
) -> None:
    run = make_run()
    stopped = run.start(stop={(stage, step): send(signal.SIGTERM)})
    assert stopped.exit_code == 143
    assert (stopped.summary.status, stopped.summary.signal) == ("stopped", signal.SIGTERM)
    if stage == "train":
        assert stopped.summary.last_step == step
    finished = run.start(resume=True)
    assert finished.exit_code == 0
    assert_same(outcome(run.path), expected)
