"""Means and intervals over a mixture of tasks, and results of further evaluation sets."""

from __future__ import annotations

import pytest

from flatpeak.evaluation.estimates import estimate
from flatpeak.evaluation.result import Evaluation, first_of_each
from flatpeak.evaluation.tables import Comparison, differences
from flatpeak.functional import bootstrap_interval, wilson_interval

TASKS = ["a", "b", "a", "b", "b", "b"]


def mixture(accuracy: list[float | None], *, length: list[float] | None = None, **shares: float) -> Evaluation:
    return Evaluation(
        task="mixture",
        size=6,
        values={"accuracy": accuracy, "length": length or [4.0, 1.0, 6.0, 1.0, 1.0, 1.0]},
        ids=[f"{task}/{index}" for index, task in enumerate(TASKS)],
        rows=[{"id": index} for index in range(6)],
        tasks=TASKS,
        shares=shares or {"a": 0.75, "b": 0.25},
    )


def test_a_mean_weighs_each_task_by_its_share() -> None:
    evaluation = mixture([1, 0, 0, 1, 1, 1])
    # 1 of 2 right in a, 3 of 4 in b.
    assert evaluation.mean("accuracy") == pytest.approx(0.75 * 1 / 2 + 0.25 * 3 / 4)
    assert evaluation.metrics()["length"] == pytest.approx(0.75 * 5 + 0.25 * 1)
    assert {name: one.mean("accuracy") for name, one in evaluation.apart.items()} == {"a": 0.5, "b": 0.75}
    assert [one.as_dict()["size"] for one in evaluation.apart.values()] == [2, 4]
    assert evaluation.as_dict()["sets"]["b"]["metrics"]["accuracy"] == 0.75


def test_the_first_questions_are_those_of_each_task() -> None:
    assert first_of_each(TASKS, 1) == [0, 1]
    assert first_of_each(TASKS, 3) == [0, 1, 2, 3, 4]
    assert first_of_each(TASKS, None) == list(range(6))
    first = mixture([1, 0, 0, 1, 1, 1]).first(1)
    assert (first.size, first.mean("accuracy")) == (2, 0.75)
    # Three questions of b weigh as much as its four.
    assert mixture([1, 0, 0, 1, 1, 1]).first(3).mean("accuracy") == pytest.approx(0.75 / 2 + 0.25 * 2 / 3)


def test_missing_verdicts_leave_the_mean() -> None:
    assert mixture([1, None, 1, None, None, None]).mean("accuracy") == 1.0


def test_intervals_are_those_of_fewer_questions_where_weights_differ() -> None:
    weighted = estimate([1, 0, 1, 1], metric="accuracy", weights=[0.25] * 4)
    assert weighted.interval == pytest.approx(wilson_interval(3, 4))
    right = estimate([1.0] * 6, metric="accuracy", weights=mixture([1.0] * 6).weights)
    # Weights 3/8 twice and 1/16 four times: 1 / (2 * 9/64 + 4 / 256) questions.
    assert right.interval == pytest.approx(wilson_interval(64 / 19, 64 / 19))
    assert right.mean == 1.0


def test_weights_enter_the_bootstrap() -> None:
    values = [0.0, 1.0, 2.0, 5.0, 3.0]
    assert bootstrap_interval(values, weights=[2.0] * 5) == pytest.approx(bootstrap_interval(values))
    low, high = bootstrap_interval([1.0, 1.0, 1.0, 1.0, 9.0], weights=[1.0, 1.0, 1.0, 1.0, 1e-12])
    assert (low, high) == pytest.approx((1.0, 1.0), abs=1e-6)


def test_differences_between_models_weigh_tasks_too() -> None:
    before, after = mixture([0, 0, 0, 0, 0, 0]), mixture([1, 0, 1, 0, 0, 0])
    assert differences(before, after)["accuracy"]["difference"] == pytest.approx(0.75)
    text = Comparison(labels=["x", "y"], evaluations=[before, after]).render()
    assert "accuracy by task" in text
    assert "b, 4 questions" in text


def test_a_set_stands_beside_the_task_and_changes_none_of_its_means() -> None:
    alone = Evaluation(task="sums", size=2, values={"accuracy": [1, 0]}, ids=["1", "2"], rows=[{}, {}])
    hard = Evaluation(task="hard", size=1, values={"accuracy": [0]}, ids=["hard/1"], rows=[{}])
    both = Evaluation(
        task="sums", size=2, values={"accuracy": [1, 0]}, ids=["1", "2"], rows=[{}, {}], sets={"hard": hard}
    )
    assert both.metrics() == alone.metrics()
    assert both.as_dict() == alone.as_dict() | {"sets": {"hard": hard.as_dict()}}
    assert "sets" not in alone.as_dict()
    assert both.all_ids == {"1", "2", "hard/1"}
    assert both.only({"1", "hard/1"}).sets["hard"].size == 1
    assert "accuracy" not in both.without_verdicts().sets["hard"].values
