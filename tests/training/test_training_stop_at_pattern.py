"""Runs that end once a habit pays more than answers usually differ by: `training.stop_when` by patterns/spreads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.paid_patterns import SPREADS, most_spreads
from support.runs import Train, tiny_recipe

CONDITION = {"metric": SPREADS, "above": 2.0}


def pays_for_three(completion: str) -> float:
    """A reward that any prompt's answer can have."""
    return float("3" in completion)


def pays_nothing(completion: str) -> float:
    """A reward without a pattern."""
    return 0.5


def recipe(directory: Path, **sections: Any) -> dict[str, Any]:
    """Steps of 64 completions, all logged."""
    rollout = {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 4}
    evaluation = {"every": 0, "accuracy": None, "metric": "reward"}
    training = {"steps": 3, "stop_when": CONDITION}
    base = {"run": {"log_rollouts_every": 1}, "rollout": rollout, "evaluation": evaluation, "training": training}
    return tiny_recipe(directory, **(base | sections))


def values(run: Path) -> list[float | None]:
    """The metric of every training step."""
    return [row.get(SPREADS) for row in read_metrics(run / "metrics.jsonl") if row["stage"] == "train"]


def test_a_run_ends_where_a_pattern_of_any_prompt_pays(tmp_path: Path, train: Train, one_thread: None) -> None:
    result = train(recipe(tmp_path), reward=pays_for_three, progress=False)
    (value,) = values(result.path)
    assert value is not None
    assert value > 2
    assert value == most_spreads(result.path / "rollouts", 1)[SPREADS]
    assert result.summary.ended_by is not None
    assert result.summary.ended_by.startswith("training.stop_when: patterns/spreads was ")


def test_a_run_without_a_pattern_goes_on(tmp_path: Path, train: Train, one_thread: None) -> None:
    result = train(recipe(tmp_path), reward=pays_nothing, progress=False)
    assert values(result.path) == [0.0, 0.0, 0.0]
    assert result.summary.ended_by is None


@pytest.mark.parametrize("condition", [None, {"metric": "reward/mean", "above": 2.0}])
def test_patterns_are_measured_only_where_a_run_may_end_by_them(
    tmp_path: Path, train: Train, one_thread: None, condition: dict[str, Any] | None
) -> None:
    training = {"steps": 1, "stop_when": condition}
    result = train(recipe(tmp_path, training=training), reward=pays_for_three, progress=False)
    assert values(result.path) == [None]


@pytest.mark.parametrize("rows", [None, '{"reward": 1'], ids=["nothing logged", "a damaged file"])
def test_without_a_readable_step_there_is_no_value(tmp_path: Path, rows: str | None) -> None:
    if rows is not None:
        (tmp_path / "step_000001.jsonl").write_text(rows)
    assert most_spreads(tmp_path, 1) == {}
