"""Stopped anywhere and resumed, a run ends as if it had never been interrupted, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from flatpeak.errors import UserError
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.summary import read_summary

pytestmark = pytest.mark.usefixtures("one_thread")

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


class Death(BaseException):
    """Stands for a kill where a test cannot afford a process of its own."""


def die() -> None:
    raise Death


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


@pytest.fixture
def make_run(recipe: Callable[..., Any], train: Callable[..., Any], watch: Any) -> Callable[..., Run]:
    def make(name: str = "tiny", **sections: Any) -> Run:
        from flatpeak.recipe import merge

        return Run(train, watch, recipe(**merge(merge(EVERYTHING, sections), {"run": {"name": name}})))

    return make


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    """Filled by the first test that asks for it."""
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


def test_an_interrupt_in_the_middle_of_a_step_lets_the_step_end(
    make_run: Callable[..., Run], expected: dict[str, Any], send: Any
) -> None:
    run = make_run()
    calls = []

    class Interrupting(Judge):
        def __call__(self, group: Any) -> list[float]:
            calls.append(len(group.completions))
            if calls.count(3) == 10:
                send(signal.SIGINT)()
            return super().__call__(group)

    stopped = run.start(reward=Interrupting())
    assert stopped.exit_code == 130
    assert stopped.summary.signal == signal.SIGINT
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), expected)


def test_a_run_stopped_twice_ends_the_same(make_run: Callable[..., Run], expected: dict[str, Any], send: Any) -> None:
    run = make_run()
    assert run.start(stop={("sft", 2): send(signal.SIGTERM)}).exit_code == 143
    assert run.start(stop={("train", 4): send(signal.SIGINT)}, resume=True).exit_code == 130
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), expected)


@pytest.mark.parametrize(
    ("stage", "step"),
    [("eval", 0), ("sft", 1), ("sft", 3), ("eval", 3), ("train", 1), ("train", 3), ("eval", 4), ("train", 6)],
)
def test_a_run_that_died_between_checkpoints_ends_the_same(
    make_run: Callable[..., Run], expected: dict[str, Any], stage: str, step: int
) -> None:
    run = make_run()
    with pytest.raises(Death):
        run.start(stop={(stage, step): die})
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), expected)


@pytest.mark.parametrize("link", ["last", "best"])
def test_a_run_that_died_while_it_pointed_at_its_new_checkpoint_ends_the_same(
    make_run: Callable[..., Run], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    from flatpeak.training import journal

    run, original = make_run(), journal.point

    def point(parent: Path, name: str, target: Path) -> None:
        if (name, target.name) == (link, "step_000002"):
            raise Death
        original(parent, name, target)

    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(journal, "point", point)
        run.start()
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), expected)


KILLED = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
import flatpeak
from conftest import Watcher
from test_resume import Judge
judge = Judge()
class Killer(Watcher):
    def update(self, stage, *, step, total, metrics):
        judge.step = step if stage == "train" else judge.step
        if (stage, step) == ("train", 3):
            os.kill(os.getpid(), signal.SIGKILL)
flatpeak.train(json.loads(sys.argv[1]), reward=judge, progress=Killer())
"""


def test_a_run_that_was_killed_ends_the_same(make_run: Callable[..., Run], expected: dict[str, Any]) -> None:
    run = make_run()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(run.config)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert [row["step"] for row in read_metrics(run.path / "metrics.jsonl") if row["stage"] == "train"] == [1, 2, 3]
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), expected)


def test_a_damaged_checkpoint_is_passed_over(
    make_run: Callable[..., Run], expected: dict[str, Any], send: Any
) -> None:
    run = make_run(run={"keep_checkpoints": 3})
    run.start(stop={("train", 5): send(signal.SIGTERM)})
    model = run.path / "checkpoints" / "step_000005" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), expected)


def test_two_threads_resume_to_the_same_bits(make_run: Callable[..., Run], send: Any) -> None:
    # Large enough that torch gives both threads work, with one prompt position repeated for 16 completions.
    sections = {
        "run": {"threads": 2},
        "model": {"new": {"config": {"hidden_size": 128, "intermediate_size": 256}}},
        "rollout": {"prompts_per_step": 2, "group_size": 16, "max_new_tokens": 6},
        "sft": {"steps": 1},
        "training": {"steps": 4, "micro_batch_tokens": 16384},
    }
    ends = []
    for name, stop in (("whole", {}), ("cut", {("train", 2): send(signal.SIGTERM)})):
        run = make_run(name, **sections)
        run.start(stop=stop)
        run.start(resume=True)
        ends.append(outcome(run.path))
    assert_same(ends[1], ends[0])
    assert torch.get_num_threads() == 2


def test_dropout_resumes_to_the_same_bits(make_run: Callable[..., Run], send: Any) -> None:
    sections = {"model": {"dropout": True, "new": {"config": {"attention_dropout": 0.2}}}}
    ends = []
    for name, stop in (("whole", {}), ("cut", {("train", 3): send(signal.SIGTERM)})):
        run = make_run(name, **sections)
        run.start(stop=stop)
        run.start(resume=True)
        ends.append(outcome(run.path))
    assert_same(ends[1], ends[0])


@pytest.mark.parametrize("adapter", [False, True], ids=["full model", "LoRA"])
def test_a_model_of_the_callers_resumes_to_the_same_bits(
    recipe: Callable[..., Any], train: Callable[..., Any], watch: Any, make_tiny_model: Any, send: Any, adapter: bool
) -> None:
    def parts() -> tuple[Any, Any]:
        model, tokenizer = make_tiny_model()
        if adapter:
            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        return model, tokenizer

    ends = []
    for name, stop in (("whole", {}), ("cut", {("train", 2): send(signal.SIGTERM)})):
        config = recipe(run={"name": name}, kl={"coefficient": 0.1}, training={"steps": 4})
        for resume in (False, True):
            model, tokenizer = parts()
            given = {"model": model, "tokenizer": tokenizer, "reward": Judge()}
            train(config, **given, progress=watch({} if resume else stop), resume=resume)
        ends.append({key: value.clone() for key, value in model.state_dict().items()})
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_a_run_that_is_done_stays_as_it_is(make_run: Callable[..., Run], expected: dict[str, Any]) -> None:
    run = make_run()
    run.start()
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), expected)


def test_a_run_that_reached_its_goal_stays_as_it_is(make_run: Callable[..., Run]) -> None:
    run = make_run(training={"stop_at": 0.8})
    assert run.start().summary.last_step == 2
    before = outcome(run.path)
    assert run.start(resume=True).summary.last_step == 2
    assert_same(outcome(run.path), before)


def test_resume_starts_a_run_that_does_not_exist_yet(make_run: Callable[..., Run], expected: dict[str, Any]) -> None:
    run = make_run()
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), expected)


def test_a_changed_recipe_is_refused_by_the_key_that_changed(make_run: Callable[..., Run], send: Any) -> None:
    make_run().start(stop={("train", 1): send(signal.SIGTERM)})
    with pytest.raises(UserError, match=r"kl\.coefficient: 0\.05 -> 0\.5"):
        make_run(kl={"coefficient": 0.5}).start(resume=True)
