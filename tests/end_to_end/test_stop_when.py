"""Runs that end by a training metric: evaluated and saved as others, resumed and forked to the same step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

import flatpeak
from flatpeak.errors import UserError
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.notices import read_notices
from flatpeak.runs.summary import read_summary
from support.resumes import RL_STEPS, Death, Judge, Run, assert_same, die, outcome
from support.runs import Recipe, Train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
MakeRun = Callable[..., Run]

RATE = 1e-3
WARM_UP: dict[str, Any] = {"schedule": "constant", "warmup_steps": RL_STEPS, "learning_rate": RATE}
"""The rate of step k is k / 5 of the whole: a metric that is known beforehand."""
CONDITION = {"metric": "optimizer/learning_rate", "above": 0.45 * RATE, "window": 2}
"""Means of 0.3 at step 2 and of 0.5 at step 3, in rates."""
REASON = "training.stop_when: optimizer/learning_rate was 0.0005 on average over steps 2 to 3, above 0.00045"


@pytest.fixture
def make(make_run: MakeRun) -> MakeRun:
    def ended_run(name: str = "tiny", *, condition: dict[str, Any] | None = CONDITION, **sections: Any) -> Run:
        return make_run(name, optimizer=WARM_UP, training={"stop_when": condition}, **sections)

    return ended_run


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """The outcome of the uninterrupted run, once it was made."""
    return {}


@pytest.fixture
def whole(kept: dict[str, Any], make: MakeRun) -> dict[str, Any]:
    if not kept:
        run = make("whole")
        assert run.start().exit_code == 0
        kept.update(outcome(run.path), ended_by=read_summary(run.path / "summary.json").ended_by)
    return kept


def train_steps(run: Any) -> list[int]:
    return [row["step"] for row in read_metrics(run.path / "metrics.jsonl") if row["stage"] == "train"]


def test_a_run_ends_after_the_step_that_meets_the_condition(whole: dict[str, Any]) -> None:
    assert [row["step"] for row in whole["metrics"] if row["stage"] == "train"] == [1, 2, 3]
    status, _, last, evaluations, _ = whole["summary"]
    assert (status, last, whole["links"]["last"].name) == ("done", 3, "step_000003")
    # Steps 2 (evaluation.every) and 3, the latter on evaluation.final_size questions as the end of a run is.
    assert [(row.stage, row.step, row.size) for row in evaluations][-2:] == [("train", 2, 3), ("train", 3, 6)]
    assert whole["ended_by"] == REASON
    assert ("train", 3, f"the run ends after step 3: {REASON}") in whole["notices"]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_run_that_died_ends_after_the_same_step(make: MakeRun, whole: dict[str, Any], step: int) -> None:
    run = make()
    with pytest.raises(Death):
        run.start(stop={("train", step): die})
    assert run.start(resume=True).summary.ended_by == REASON
    assert_same(outcome(run.path), whole)


@pytest.mark.parametrize("step", [2, 3])
def test_a_stopped_run_ends_after_the_same_step(make: MakeRun, whole: dict[str, Any], send: Any, step: int) -> None:
    run = make()
    stopped = run.start(stop={("train", step): send(signal.SIGTERM)})
    assert (stopped.exit_code, stopped.summary.status, stopped.summary.ended_by) == (143, "stopped", None)
    assert run.start(resume=True).summary.ended_by == REASON
    assert_same(outcome(run.path), whole)


def test_a_run_that_ended_by_a_condition_stays_as_it_is(make: MakeRun, whole: dict[str, Any]) -> None:
    run = make()
    run.start()
    assert run.start(resume=True).summary.ended_by == REASON
    assert_same(outcome(run.path), whole)


@pytest.mark.parametrize(
    ("origin", "condition", "last", "ended"),
    [
        (2, CONDITION, 3, True),  # with step 2's value of the run that it comes from
        (2, CONDITION | {"above": 0.65 * RATE}, 4, True),  # a mean of 0.7
        (2, CONDITION | {"metric": "policy/grad_norm", "above": 0.0}, 4, True),  # two steps after the fork
        (3, CONDITION, 3, True),
        (3, CONDITION | {"above": 0.65 * RATE}, 4, True),
        (3, None, 5, False),
    ],
    ids=["same", "higher", "another metric", "met before", "met, then raised", "met, then left out"],
)
def test_a_fork_goes_on_to_its_own_condition(
    make: MakeRun, origin: int, condition: dict[str, Any] | None, last: int, ended: bool
) -> None:
    first = make("first", run={"checkpoint_every": 1, "keep_checkpoints": 9})
    first.start()
    settings = {"training": {"stop_when": condition}}
    forked = flatpeak.fork(first.path, origin, name="second", settings=settings, reward=Judge())
    assert (forked.summary.status, forked.summary.last_step) == ("done", last)
    assert train_steps(forked) == list(range(1, last + 1))
    assert (forked.summary.ended_by is not None) == ended


def test_a_misspelt_metric_is_told_once_and_ends_nothing(make: MakeRun, send: Any) -> None:
    run = make(condition={"metric": "optimizer/learning_rates", "above": 0.0})
    run.start(stop={("train", 2): send(signal.SIGTERM)})
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
