from __future__ import annotations

import math
from typing import Any

from flatpeak.training.history import History


def row(stage: str, step: int, choice: float, reward: float = math.nan) -> dict[str, Any]:
    metrics = {"accuracy": choice, "pass@2": choice, "reward": reward}
    return {
        "stage": stage,
        "step": step,
        "metrics": metrics,
        "intervals": {"accuracy": [0.0, 1.0]},
        "subsets": {"level": {"micro": {"metrics": metrics}}},
        "choice": choice,
        "reward": reward,
    }


def test_a_value_is_best_where_it_is_higher_or_the_first_number() -> None:
    history = History()
    best = []
    for step, value in enumerate([math.nan, 0.2, 0.2, math.nan, 0.3, 0.1]):
        history.consider(step, value)
        best.append(history.best_step)
    assert best == [0, 1, 1, 1, 4, 4]


def test_only_the_best_and_the_newest_evaluation_of_training_keep_their_subsets() -> None:
    history = History(best_step=1)
    for stage, step in [("start", 0), ("train", 1), ("train", 2), ("train", 3)]:
        history.add(row(stage, step, 0.5))
    assert [bool(one["subsets"]) for one in history.evaluations] == [True, True, False, True]


def test_where_accuracy_ends_the_best_step_stays_with_its_reward() -> None:
    history = History(
        evaluations=[row("start", 0, 0.5, 0.4), row("sft", 9, 0.6, 0.45), row("train", 1, 0.8, 0.1)],
        best_step=1,
        best_value=0.8,
    )
    history.end_accuracy(chose=True)
    assert (history.graded, history.best_step, history.best_value) == (True, 1, 0.1)
    assert [one["choice"] for one in history.evaluations] == [0.4, 0.45, 0.1]
    assert [one["metrics"] for one in history.evaluations] == [{"reward": 0.4}, {"reward": 0.45}, {"reward": 0.1}]
    assert history.evaluations[0]["intervals"] == {}
    assert history.evaluations[2]["subsets"] == {"level": {"micro": {"metrics": {"reward": 0.1}}}}
    # The model before RL, step 0, is the one after SFT.
    after_sft = History(evaluations=[row("start", 0, 0.5, 0.4), row("sft", 9, 0.6, 0.45)], best_step=0, best_value=0.6)
    after_sft.end_accuracy(chose=True)
    assert after_sft.best_value == 0.45


def test_another_metric_than_accuracy_goes_on_choosing() -> None:
    history = History(evaluations=[row("train", 1, 0.8, 0.1)], best_step=1, best_value=0.8)
    history.end_accuracy(chose=False)
    assert (history.best_value, history.evaluations[0]["choice"]) == (0.8, 0.8)
    assert history.evaluations[0]["metrics"] == {"reward": 0.1}


def test_the_best_of_the_steps_at_hand_replaces_one_that_is_gone() -> None:
    rows = [row("start", 0, 0.1), row("train", 1, 0.9), row("train", 2, 0.7), row("train", 3, 0.3)]
    history = History(evaluations=rows, best_step=1, best_value=0.9)
    history.choose_among([0, 1, 3])
    assert (history.best_step, history.best_value) == (1, 0.9)
    history.choose_among([0, 3])
    assert (history.best_step, history.best_value) == (3, 0.3)


def test_a_goal_is_reached_by_an_evaluation_of_the_saved_step() -> None:
    rows = [row("train", 1, 0.9), row("train", 2, 0.4), row("train", 2, 0.6)]
    history = History(evaluations=rows, last_step=2)
    assert [history.reached(goal) for goal in (None, 0.6, 0.7)] == [False, True, False]
