"""Callbacks of a Python caller: what they see, log and stop, in whole tiny runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import flatpeak
from flatpeak.errors import RunError, UserError
from flatpeak.runs.callbacks import RunControl, check_callbacks
from flatpeak.runs.metrics import read_metrics
from flatpeak.types import Group, Scores
from support.reward_functions import odd
from support.runs import Recipe, Train, Watch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
FOUR_STEPS: dict[str, Any] = {"training": {"steps": 4}, "evaluation": {"every": 2}}


class Listing(flatpeak.Callback):
    """Lists every call, and calls `act[hook, step]` in it."""

    def __init__(self, act: Mapping[tuple[str, int], Callable[[RunControl], object]] | None = None) -> None:
        self.act = dict(act or {})
        self.calls: list[tuple[str, str, int]] = []
        self.values: dict[str, Any] = {}

    def seen(self, hook: str, run: RunControl, step: int, **values: Any) -> None:
        self.calls.append((hook, run.stage, step))
        self.values |= values
        if (hook, step) in self.act:
            self.act[hook, step](run)

    def on_step(self, run: RunControl, step: int, metrics: Mapping[str, float]) -> None:
        self.seen("step", run, step, metrics=metrics)

    def on_rollouts(
        self,
        run: RunControl,
        step: int,
        groups: Sequence[Group],
        *,
        scores: Scores,
        advantages: Sequence[Sequence[float]],
    ) -> None:
        self.seen("rollouts", run, step, groups=groups, scores=scores, advantages=advantages)

    def on_evaluation(
        self, run: RunControl, step: int, metrics: Mapping[str, float], *, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        self.seen("evaluation", run, step, rows=rows)

    def on_checkpoint(self, run: RunControl, step: int, path: Path) -> None:
        self.seen("checkpoint", run, step, path=path)


def log(name: str, value: float) -> Callable[[RunControl], None]:
    return lambda run: run.log_metric(name, value)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "last" / "model.safetensors")


def test_a_callback_sees_steps_rollouts_evaluations_and_checkpoints(recipe: Recipe, train: Train) -> None:
    sections = {"sft": {"steps": 1}, "training": {"steps": 2}, "evaluation": {"every": 2}}
    seen = Listing()
    result = train(recipe(**sections), reward=odd, callbacks=[seen], progress=False)
    assert seen.calls == [
        ("evaluation", "start", 0),
        ("step", "sft", 1),
        ("evaluation", "sft", 1),
        ("checkpoint", "sft", 1),
        ("checkpoint", "train", 0),
        ("rollouts", "train", 1),
        ("step", "train", 1),
        ("rollouts", "train", 2),
        ("step", "train", 2),
        ("evaluation", "train", 2),
        ("checkpoint", "train", 2),
    ]
    values = seen.values
    scores = values["scores"].total
    assert [odd([one.token_ids for one in group.completions]) for group in values["groups"]] == scores
    assert all(abs(sum(advantages)) < 1e-5 for advantages in values["advantages"])
    row = read_metrics(result.path / "metrics.jsonl")[-2]
    assert (values["metrics"]["reward/mean"], row["step"]) == (row["reward/mean"], 2)
    assert (values["path"].name, len(values["rows"])) == ("step_000002", 6)


def test_a_stop_by_a_callback_leaves_a_checkpoint_that_resumes_bit_for_bit(
    recipe: Recipe, train: Train, watch: Watch
) -> None:
    whole = train(recipe(run={"name": "whole"}, **FOUR_STEPS), reward=odd, progress=False)
    stopping = Listing({("step", 3): lambda run: run.stop("three are enough")})
    progress = watch()
    config = recipe(run={"name": "stopped"}, **FOUR_STEPS)
    stopped = train(config, reward=odd, callbacks=[stopping], progress=progress)
    summary = json.loads((stopped.path / "summary.json").read_text())
    assert (summary["status"], summary["last_step"], summary["signal"]) == ("stopped", 3, None)
    assert summary["ended_by"] == "Listing.on_step: three are enough"
    assert (stopped.exit_code, flatpeak.load_run(stopped.path).exit_code) == (0, 0)
    assert "step_000003" in summary["checkpoints"]
    assert "the run ends after this step: Listing.on_step: three are enough" in progress.notices
    assert not torch.equal(*(next(iter(weights(path).values())) for path in (whole.path, stopped.path)))

    again = train(config, reward=odd, callbacks=[Listing()], progress=False, resume=True)
    assert (again.summary.status, again.summary.ended_by) == ("done", None)
    assert {
        name for name, tensor in weights(whole.path).items() if not torch.equal(weights(again.path)[name], tensor)
    } == set()
    rewards = [
        [row["reward/mean"] for row in read_metrics(path / "metrics.jsonl") if row["stage"] == "train"]
        for path in (whole.path, again.path)
    ]
    assert rewards[0] == rewards[1]


@pytest.mark.parametrize(
    ("hook", "step", "last"), [("rollouts", 2, 2), ("evaluation", 2, 2), ("evaluation", 0, 0), ("checkpoint", 2, 2)]
)
def test_every_method_may_stop_the_run(recipe: Recipe, train: Train, hook: str, step: int, last: int) -> None:
    stopping = Listing({(hook, step): lambda run: run.stop()})
    config = recipe(run={"checkpoint_every": 2}, **FOUR_STEPS)
    result = train(config, reward=odd, callbacks=[stopping], progress=False)
    assert (result.summary.status, result.summary.last_step) == ("stopped", last)
    assert result.summary.ended_by == f"Listing.on_{hook}: it called run.stop()"
    assert (result.path / "checkpoints" / "last").resolve().name == f"step_{last:06d}"


def test_a_logged_metric_is_in_the_row_of_its_step_or_evaluation(recipe: Recipe, train: Train, watch: Watch) -> None:
    logging = Listing(
        {
            ("rollouts", 1): log("mine/groups", 4),
            ("step", 1): log("mine/two", torch.tensor(2.0)),
            ("evaluation", 2): log("mine/answers", 6),
        }
    )
    progress = watch()
    result = train(recipe(evaluation={"every": 2}), reward=odd, callbacks=[logging], progress=progress)
    rows = {(row["stage"], row["step"]): row for row in read_metrics(result.path / "metrics.jsonl")}
    mine = {key: {name: row[name] for name in row if name.startswith("mine/")} for key, row in rows.items()}
    assert {key: row for key, row in mine.items() if row} == {
        ("train", 1): {"mine/groups": 4.0, "mine/two": 2.0},
        ("eval", 2): {"mine/answers": 6.0},
    }
    assert progress.rows[1][2]["mine/two"] == 2.0


def divide(run: RunControl) -> float:
    return 1 / 0


@pytest.mark.parametrize(
    ("hook", "step", "act", "message"),
    [
        (
            "step",
            2,
            divide,
            r"callback Listing\.on_step: ZeroDivisionError: division by zero \(.*test_callbacks\.py:\d+\)",
        ),
        ("rollouts", 2, divide, r"callback Listing\.on_rollouts: ZeroDivisionError"),
        ("evaluation", 2, divide, r"callback Listing\.on_evaluation: ZeroDivisionError"),
        ("checkpoint", 2, divide, r"callback Listing\.on_checkpoint: ZeroDivisionError"),
        (
            "step",
            2,
            log("reward/mean", 1.0),
            "a callback logged reward/mean, which the run logs itself: choose another",
        ),
        ("step", 2, log("stage", 1.0), "a callback logged stage, which the run logs itself"),
        ("checkpoint", 2, log("x", 1.0), r"on_checkpoint: UserError: the rows of this step are written: call run\.log"),
        (
            "step",
            2,
            log("x", "y"),
            r"log_metric\('x', ...\): the value is str 'y': give a number \(.*test_callbacks\.py:\d+\)",
        ),
        ("step", 2, log("", 1.0), "on_step: ValueError: log_metric: the name of a metric is str '': give a text"),
        (
            "evaluation",
            2,
            log("eval/mine", 1.0),
            r"log_metric\('eval/mine', ...\): evaluations have the names eval/...: choose another",
        ),
    ],
)
def test_an_error_in_a_callback_ends_the_run_after_the_step_with_a_checkpoint(
    recipe: Recipe, train: Train, hook: str, step: int, act: Any, message: str
) -> None:
    config, raising = recipe(run={"checkpoint_every": 2}, **FOUR_STEPS), Listing({(hook, step): act})
    with pytest.raises(RunError, match=message) as raised:
        train(config, reward=odd, callbacks=[raising], progress=False)
    assert raised.value.__cause__ is not None
    path = Path(config["run"]["directory"]) / "tiny"
    summary = flatpeak.load_run(path).summary
    assert (summary.status, summary.last_step) == ("failed", 2)
    assert (path / "checkpoints" / "last").resolve().name == "step_000002"
    rows = read_metrics(path / "metrics.jsonl")
    assert [row["step"] for row in rows if row["stage"] == "train"] == [1, 2]
    whole = train(recipe(run={"name": "whole"}, **FOUR_STEPS), reward=odd, progress=False)
    again = train(config, reward=odd, progress=False, resume=True)
    assert all(torch.equal(weights(again.path)[name], tensor) for name, tensor in weights(whole.path).items())


def test_an_error_before_the_first_step_leaves_no_run(recipe: Recipe, train: Train) -> None:
    config = recipe()
    with pytest.raises(UserError, match=r"callback Listing\.on_evaluation: ZeroDivisionError"):
        train(config, reward=odd, callbacks=[Listing({("evaluation", 0): divide})], progress=False)
    with pytest.raises(UserError, match="its training never began"):
        flatpeak.load_run(Path(config["run"]["directory"]) / "tiny")


@pytest.mark.parametrize("given", [Listing(), [Listing], [print], Listing, "abc"])
def test_what_is_no_list_of_callbacks_is_refused(recipe: Recipe, train: Train, given: Any) -> None:
    with pytest.raises(
        UserError, match=r"callbacks is .*: give a list of objects whose class derives from flatpeak\.C"
    ):
        train(recipe(), reward=odd, callbacks=given, progress=False)


def test_a_method_that_is_never_called_is_refused(recipe: Recipe, train: Train) -> None:
    class Typo(flatpeak.Callback):
        def on_steps(self, run: Any, step: int, metrics: Any) -> None:
            raise AssertionError

    with pytest.raises(UserError, match=r"flatpeak does not call Typo\.on_steps, did you mean 'on_step'\? Callbacks "):
        train(recipe(), reward=odd, callbacks=[Typo()], progress=False)


def test_other_attributes_of_a_callback_are_its_own() -> None:
    class Mixin:
        def on_steps(self) -> None: ...

    class Own(flatpeak.Callback, Mixin):
        on_steps_wanted = True

        def on_gradient_overflow(self) -> None: ...

    check_callbacks([Own()])
