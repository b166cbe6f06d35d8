"""A fork goes on from a checkpoint of another run, with settings of its own, and leaves that run as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import flatpeak
from flatpeak.cli.train import fork as fork_command
from flatpeak.errors import DivergedError, UserError
from flatpeak.runs.checkpoints import write_manifest
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.summary import read_summary
from flatpeak.training.recorder import Recorder
from support.resumes import assert_same, diverge, outcome
from support.reward_functions import odd
from support.runs import Finished, Recipe, Train

pytestmark = pytest.mark.usefixtures("one_thread")
KL = {"kl": {"coefficient": 0.1}}
RESETS = {**KL, "reference": {"reset_every": 1}}
REGULARIZED = {"gradient_regularization": {"strength": 0.1, "every": 2}}


FIRST: dict[str, Any] = {
    "run": {"name": "first", "checkpoint_every": 1, "keep_checkpoints": 2},
    "training": {"steps": 4},
    "evaluation": {"every": 2},
}
"""A run of four steps with checkpoints of 0, 2, 3 and 4."""
MakeFirst = Callable[..., Path]


@pytest.fixture
def make_first(finished: Finished) -> MakeFirst:
    return lambda **sections: finished(odd, **FIRST, **sections)


def files(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_fork_names_no_secret_among_its_changes(recipe: Recipe, train: Train) -> None:
    arguments = {"credentials": {"user": "swordfish"}, "k": 1}
    function = {"type": "function", "function": "support.reward_functions:varied_text", "arguments": arguments}
    settings = {"run": {"name": "first", "checkpoint_every": 1, "grading_workers": 0}, "training": {"steps": 2}}
    judged = {"rewards": {"f": function}, "evaluation": {"accuracy": None, "metric": "reward"}}
    first = Path(train(recipe(**settings, **judged)).path)
    place = "rewards.f.arguments"
    forked = flatpeak.fork(first, 1, name="second", settings=[f"{place}.credentials.user=marlin", f"{place}.k=2"])
    manifest = (forked.path / "manifest.json").read_text()
    assert json.loads(manifest)["forked"]["changed"] == {f"{place}.k": "1 -> 2", "run.name": "first -> second"}
    assert not any(secret in manifest for secret in ("marlin", "swordfish"))


@pytest.mark.parametrize("sections", [KL, RESETS, REGULARIZED, {"model": {"dtype": "bfloat16"}}], ids=str)
def test_a_fork_without_changes_ends_as_the_run_did(make_first: MakeFirst, sections: dict[str, Any]) -> None:
    first = make_first(**sections)
    before = files(first)
    forked = flatpeak.fork(first, 3, name="second", reward=odd)
    assert forked.path == first.with_name("second")
    assert (forked.exit_code, forked.summary.status, forked.summary.last_step) == (0, "done", 4)
    assert_same(outcome(forked.path), outcome(first))
    assert files(first) == before


def test_a_fork_takes_its_settings_from_its_step_on_and_says_where_it_comes_from(make_first: MakeFirst) -> None:
    first = make_first()
    forked = flatpeak.fork(first, 3, name="second", settings=["optimizer.learning_rate=1e-3"], reward=odd)
    rows = [row for row in read_metrics(forked.path / "metrics.jsonl") if row["stage"] == "train"]
    rates = [row["optimizer/learning_rate"] for row in rows]
    assert rates == [1e-2, 1e-2, 1e-2, 1e-3]
    assert sorted(path.name for path in (forked.path / "rollouts").iterdir()) == [
        f"step_{step:06d}.jsonl" for step in (1, 2, 3, 4)
    ]
    manifest = json.loads((forked.path / "manifest.json").read_text())
    assert manifest["forked"] == {
        "run": str(first),
        "step": 3,
        "changed": {"optimizer.learning_rate": "0.01 -> 0.001", "run.name": "first -> second"},
    }
    weights = [load_file(path / "checkpoints" / "last" / "model.safetensors") for path in (first, forked.path)]
    assert not all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_an_adapted_coefficient_is_not_overwritten_unheard(make_first: MakeFirst) -> None:
    first = make_first(
        kl={"coefficient": 0.1, "adaptive": {"target": 0.01}}, objective={"adaptive_entropy": {"start": 0.1}}
    )
    for settings in ({"kl": {"coefficient": 0.2}}, {"objective": {"adaptive_entropy": {"start": 0.2}}}):
        with pytest.raises(UserError, match=r"cannot change in a fork.*a coefficient that has adapted since"):
            flatpeak.fork(first, 3, name="second", settings=settings, reward=odd)
    fixed = {"kl": {"coefficient": 0.2, "adaptive": None}, "objective": {"loss": "unclipped_surrogate"}}
    forked = flatpeak.fork(first, 3, name="second", settings=fixed, reward=odd)
    assert forked.summary.last_step == 4


@pytest.mark.parametrize(
    ("sections", "settings"),
    [
        ({}, {"gradient_regularization": {"strength": 0.1}}),
        (REGULARIZED, {"gradient_regularization": {"strength": 0.0}}),
        ({}, {"kl": {"coefficient": 0.1}}),
        (RESETS, {"kl": {"coefficient": 0.0}, "reference": {"reset_every": None}}),
        (KL, {"reference": {"reset_every": 2}, "training": {"steps": 5}}),
    ],
    ids=str,
)
def test_what_the_checkpoint_does_not_hold_may_change(
    make_first: MakeFirst, sections: dict[str, Any], settings: dict[str, Any]
) -> None:
    first = make_first(**sections)
    forked = flatpeak.fork(first, 3, name="second", settings=settings, reward=odd)
    assert forked.summary.status == "done"
    assert forked.summary.last_step == settings.get("training", {}).get("steps", 4)


def test_a_run_that_diverged_is_forked_as_its_error_says(
    recipe: Recipe, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        diverge(patched, lambda weights: weights[0].fill_(torch.nan))
        advice = r"flatpeak fork RUN STEP .*\(checkpoints: step_000000, .*step_000002\)"
        with pytest.raises(DivergedError, match=advice) as caught:
            train(recipe(**FIRST), reward=odd)
    assert "optimizer.learning_rate" in str(caught.value)
    first = Path(recipe()["run"]["directory"]) / "first"
    forked = flatpeak.fork(first, 2, name="second", settings=["optimizer.learning_rate=1e-3"], reward=odd)
    assert forked.summary.status == "done"


@pytest.mark.parametrize(("goal", "last"), [(None, 4), (1.0, 4), (0.5, 2)])
def test_a_fork_of_a_run_that_reached_its_goal_goes_on_to_its_own(
    recipe: Recipe, train: Train, monkeypatch: pytest.MonkeyPatch, goal: float | None, last: int
) -> None:
    plain = Recorder.evaluate
    values = iter([0.0, 0.75])  # at steps 0 and 2 of the run; later ones are of forks

    def graded(self: Recorder, *args: Any, **kwargs: Any) -> float:
        plain(self, *args, **kwargs)
        value = next(values, 0.25)
        self.history.evaluations[-1]["choice"] = value
        return value

    monkeypatch.setattr(Recorder, "evaluate", graded)
    config = recipe(
        run={"name": "first", "checkpoint_every": 1}, training={"steps": 4, "stop_at": 0.7}, evaluation={"every": 2}
    )
    first = Path(train(config, reward=odd).path)
    assert read_summary(first / "summary.json").last_step == 2
    settings = {"training": {"stop_at": goal}}
    forked = flatpeak.fork(first, 2, name="second", settings=settings, reward=odd)
    assert (forked.summary.status, forked.summary.last_step) == ("done", last)


def test_a_mapping_of_settings_supersedes_what_it_leaves_without_effect_as_the_command_does(
    make_first: MakeFirst,
) -> None:
    first = make_first(objective={"clip_high": 0.28})
    settings = {"objective": {"loss": "policy_gradient"}}
    forked = flatpeak.fork(first, 3, name="second", settings=settings, reward=odd)
    assert forked.summary.status == "done"
    with pytest.raises(UserError, match=r"clip_high=0\.3 has no effect"):
        flatpeak.fork(first, 3, name="third", settings={"objective": {"loss": "policy_gradient", "clip_high": 0.3}})


def test_kl_that_a_fork_left_behind_is_measured_against_step_0_where_it_is_taken_up_again(
    make_first: MakeFirst,
) -> None:
    first = make_first(**RESETS)
    without = {"kl": {"coefficient": 0.0}, "reference": {"reset_every": None}, "training": {"steps": 5}}
    second = flatpeak.fork(first, 3, name="second", settings=without, reward=odd)
    third = flatpeak.fork(second.path, 5, name="third", settings={**KL, "training": {"steps": 6}}, reward=odd)
    rows = [row for row in read_metrics(third.path / "metrics.jsonl") if row["stage"] == "train"]
    assert ["policy/kl_reference" in row for row in rows] == [True] * 3 + [False] * 2 + [True]
    assert rows[-1]["policy/kl_reference"] > rows[0]["policy/kl_reference"]


def test_a_reference_that_was_reset_gives_way_to_no_other(make_first: MakeFirst) -> None:
    first = make_first(**RESETS)
    settings = {"reference": {"model": str(first / "checkpoints" / "step_000000"), "reset_every": None}}
    with pytest.raises(UserError, match=r"reference\.model cannot change in a fork.*has moved since"):
        flatpeak.fork(first, 3, name="second", settings=settings, reward=odd)


@pytest.mark.parametrize(
    ("step", "name", "settings", "message"),
    [
        (1, "second", [], r"no checkpoint of step 1: choose one of 0, .*3, 4"),
        (3, "first", [], r"first exists: choose another --name"),
        (3, "../second", [], r"--name \.\./second: give a name"),
        (3, "second", ["model.path=other", "model.new=null"], r"model\.\w+.* cannot change in a fork.*holds the model"),
        (3, "second", ["model.dtype=bfloat16"], r"model\.dtype cannot change"),
        (3, "second", ["evaluation.metric=reward"], r"evaluation\.metric cannot change.*best value of that metric"),
        (3, "second", ["optimizer.name=sgd"], r"optimizer\.name cannot change in a fork.*state of that optimizer"),
        (3, "second", ["sft.steps=3"], r"sft\.steps cannot change"),
        (3, "second", ["training.steps=3"], r"training\.steps=3: nothing is left to train after step 3"),
        (3, "second", ["curriculum={task: {type: arithmetic}, steps: 2}"], r"1 places in the data .* 2 tasks"),
        (3, "second", ["reference.model=./nowhere", "kl.coefficient=0.1"], r"reference\.model: .*no such directory"),
        (3, "second", ["distributed.processes=2"], r"forks are trained in one process: set distributed\.processes=1"),
        (3, "second", ["optimizer.lerning_rate=1"], r"unknown key optimizer\.lerning_rate"),
    ],
)
def test_what_cannot_be_forked_is_refused_in_one_line_and_leaves_nothing(
    make_first: MakeFirst, step: int, name: str, settings: list[str], message: str
) -> None:
    first = make_first()
    before = files(first.parent)
    with pytest.raises(UserError, match=message):
        flatpeak.fork(first, step, name=name, settings=settings, reward=odd)
    assert files(first.parent) == before
    assert not list(first.parent.glob(".fork*"))


def test_a_damaged_checkpoint_is_not_forked(make_first: MakeFirst) -> None:
    first = make_first()
    (first / "checkpoints" / "step_000003" / "config.json").unlink()
    with pytest.raises(UserError, match=r"step_000003/config\.json: missing"):
        flatpeak.fork(first, 3, name="second", reward=odd)
    assert not first.with_name("second").exists()


def test_a_fork_whose_best_checkpoint_is_gone_takes_the_best_of_those_at_hand(make_first: MakeFirst) -> None:
    first = make_first()
    path = first / "checkpoints" / "step_000003"
    state = json.loads((path / "trainer" / "state.json").read_text())
    assert state["history"]["best_step"] == 0
    state["history"] |= {"best_step": 1, "best_value": 0.9}
    (path / "trainer" / "state.json").write_text(json.dumps(state))
    (path / "manifest.json").unlink()
    write_manifest(path, step=3)
    forked = flatpeak.fork(first, 3, name="second", reward=odd)
    assert forked.summary.best_step == read_summary(first / "summary.json").best_step
    assert forked.best.resolve().name == f"step_{forked.summary.best_step:06d}"


def test_a_fork_of_a_run_without_accuracy_has_none_and_cannot_name_one(recipe: Recipe, train: Train) -> None:
    first = Path(train(recipe(run={"name": "first"}, training={"steps": 2}), reward=lambda completion: 0.5).path)
    for key, value in {"evaluation.accuracy": "correctness", "training.stop_at": 0.4}.items():
        with pytest.raises(UserError, match=rf"^{key} cannot change .* holds evaluations without accuracy"):
            flatpeak.fork(first, 0, name="other", settings={key: value}, reward=lambda completion: 0.5)
    forked = flatpeak.fork(first, 0, name="second", reward=lambda completion: 1.0).summary
    assert (forked.metric, [row.metrics["reward"] for row in forked.evaluations]) == ("reward", [0.5, 1.0])
    assert not any("accuracy" in row.metrics for row in forked.evaluations)


def test_the_command_forks_a_run_by_its_name(
    recipe: Recipe, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe(run={"name": "first"}))
    monkeypatch.chdir(tmp_path)
    fork_command("first", 2, name="second", overrides=["training.steps=3"])
    assert capsys.readouterr().out.splitlines()[-2].startswith("fork: held-out accuracy ")
    assert (tmp_path / "runs" / "second" / "checkpoints" / "step_000003").is_dir()
    with pytest.raises(UserError, match=r"nowhere is not a run's directory"):
        fork_command("nowhere", 2, name="third", overrides=[])
