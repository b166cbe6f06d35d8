"""Runs that end by a training metric: evaluated and saved as others, resumed and forked to the same step."""

from __future__ import annotations

from typing import Any

import pytest

import flatpeak
from flatpeak.errors import UserError
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.notices import read_notices
from support.resumes import RL_STEPS, Judge, MakeRun, Whole, assert_same, outcome
from support.runs import Recipe, Train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

RATE = 1e-3
WARM_UP: dict[str, Any] = {"schedule": "constant", "warmup_steps": RL_STEPS, "learning_rate": RATE}
"""The rate of step k is k / 5 of the whole: a metric that is known beforehand."""
CONDITION = {"metric": "optimizer/learning_rate", "above": 0.45 * RATE, "window": 2}
"""Means of 0.3 at step 2 and of 0.5 at step 3, in rates."""
REASON = "training.stop_when: optimizer/learning_rate was 0.0005 on average over steps 2 to 3, above 0.00045"


def sections(condition: dict[str, Any] | None = CONDITION) -> dict[str, Any]:
    return {"optimizer": WARM_UP, "training": {"stop_when": condition}}


@pytest.fixture
def ended(whole: Whole) -> dict[str, Any]:
    """The outcome of an uninterrupted run that the condition ends."""
    return whole(**sections())


def train_steps(run: Any) -> list[int]:
    return [row["step"] for row in read_metrics(run.path / "metrics.jsonl") if row["stage"] == "train"]


def test_a_run_ends_after_the_step_that_meets_the_condition(ended: dict[str, Any]) -> None:
    assert [row["step"] for row in ended["metrics"] if row["stage"] == "train"] == [1, 2, 3]
    status, _, last, evaluations, _ = ended["summary"]
    assert (status, last, ended["links"]["last"].name) == ("done", 3, "step_000003")
    # Steps 2 (evaluation.every) and 3, the latter on evaluation.final_size questions as the end of a run is.
    assert [(row.stage, row.step, row.size) for row in evaluations][-2:] == [("train", 2, 3), ("train", 3, 6)]
    assert ("train", 3, f"the run ends after step 3: {REASON}") in ended["notices"]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_run_that_died_ends_after_the_same_step(make_run: MakeRun, ended: dict[str, Any], step: int) -> None:
    run = make_run(**sections())
    run.die_at("train", step)
    assert run.start(resume=True).summary.ended_by == REASON
    assert_same(outcome(run.path), ended)


@pytest.mark.parametrize("step", [2, 3])
def test_a_stopped_run_ends_after_the_same_step(make_run: MakeRun, ended: dict[str, Any], step: int) -> None:
    run = make_run(**sections())
    stopped = run.stop_at("train", step)
    assert (stopped.summary.status, stopped.summary.ended_by) == ("stopped", None)
    assert run.start(resume=True).summary.ended_by == REASON
    assert_same(outcome(run.path), ended)


def test_a_run_that_ended_by_a_condition_stays_as_it_is(make_run: MakeRun, ended: dict[str, Any]) -> None:
    run = make_run(**sections())
    assert run.start().summary.ended_by == REASON
    assert run.start(resume=True).summary.ended_by == REASON
    assert_same(outcome(run.path), ended)


@pytest.mark.parametrize(
    ("origin", "condition", "last", "ended"),
    [
        (2, CONDITION, 4, True),  # without step 2's value of the run that it comes from
        (2, CONDITION | {"above": 0.75 * RATE}, 5, True),  # means of 0.7 and 0.9
        (2, CONDITION | {"metric": "policy/grad_norm", "above": 0.0}, 4, True),
        (3, CONDITION, 5, True),
        (3, CONDITION | {"above": 0.95 * RATE}, 5, False),
        (3, None, 5, False),
    ],
    ids=["same", "higher", "another metric", "met before", "met, then raised", "met, then left out"],
)
def test_a_fork_goes_on_to_its_own_condition(
    make_run: MakeRun, origin: int, condition: dict[str, Any] | None, last: int, ended: bool
) -> None:
    first = make_run("first", run={"checkpoint_every": 1, "keep_checkpoints": 9}, **sections())
    first.start()
    settings = {"training": {"stop_when": condition}}
    forked = flatpeak.fork(first.path, origin, name="second", settings=settings, reward=Judge())
    assert (forked.summary.status, forked.summary.last_step) == ("done", last)
    assert train_steps(forked) == list(range(1, last + 1))
    assert (forked.summary.ended_by is not None) == ended


def test_a_misspelt_metric_is_told_once_and_ends_nothing(make_run: MakeRun) -> None:
    run = make_run(**sections({"metric": "optimizer/learning_rates", "above": 0.0}))
    run.stop_at("train", 2)
    result = run.start(resume=True)
    assert (result.summary.last_step, result.summary.ended_by) == (RL_STEPS, None)
    told = [row for row in read_notices(run.path / "notices.jsonl") if "stop_when" in row["text"]]
    assert [row["step"] for row in told] == [1]
    assert "did you mean optimizer/learning_rate" in told[0]["text"]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ({"metric": "reward/mean"}, r"training\.stop_when: give one of above and below"),
        ({"metric": "eval/arithmetic/accuracy", "above": 0.5}, r"training\.stop_when\.metric=eval/.*training\.stop_at"),
        ({"metric": "reward/mean", "above": 1, "windw": 2}, r"training\.stop_when\.windw: did you mean .*window"),
        ({"metric": "reward/mean", "above": 1, "window": 0}, r"training\.stop_when\.window=0"),
    ],
)
def test_a_condition_that_cannot_be_decided_is_one_line(
    recipe: Recipe, train: Train, condition: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        train(recipe(training={"stop_when": condition}), reward=Judge())
    assert "\n" not in str(caught.value)


def test_the_summary_names_an_evaluation_that_ended_a_run_too(make_run: MakeRun) -> None:
    result = make_run(training={"stop_at": 0.8}).start()
    assert (result.summary.last_step, result.summary.ended_by) == (2, "training.stop_at=0.8 was reached")
