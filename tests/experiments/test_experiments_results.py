"""The numbers of one run, from rows written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from flatpeak.experiments.config import CurvesConfig, TableConfig, ThresholdConfig
from flatpeak.experiments.results import (
    chosen_names,
    curve_bins,
    first_step_past,
    mean_by_area,
    read_series,
    run_measures,
)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train_row(step: int, value: float | None) -> dict[str, Any]:
    return {"step": step, "stage": "train", "reward/gold": value}


def test_the_last_best_final_and_area_of_a_metric_are_those_worked_out_by_hand() -> None:
    series = {"reward/gold": [(1, 0.0), (2, 1.0), (3, 0.5), (4, 0.0)]}
    cells = run_measures(series, ["reward/gold"], TableConfig(window=2))
    assert cells["reward/gold.last"] == 0.0
    assert cells["reward/gold.best"] == 1.0
    assert cells["reward/gold.final"] == 0.25
    # Trapezoids 0.5, 0.75 and 0.25 over three steps.
    assert cells["reward/gold.auc"] == pytest.approx(0.5, abs=1e-15)


def test_the_best_value_is_the_smallest_where_the_table_says_so() -> None:
    series = {"loss": [(1, 3.0), (2, 1.0), (3, 2.0)]}
    assert run_measures(series, ["loss"], TableConfig(best={"loss": "min"}))["loss.best"] == 1.0


def test_the_final_window_counts_steps_and_not_rows() -> None:
    """Step 3 has no value: of the window of two steps only step 4 is left."""
    series = {"policy/kl": [(1, 5.0), (2, 7.0), (4, 1.0)]}
    assert run_measures(series, ["policy/kl"], TableConfig(window=2))["policy/kl.final"] == 1.0


def test_a_value_that_is_not_finite_is_missing_and_never_zero() -> None:
    series = {"reward/gold": [(1, 0.5), (2, None)]}
    cells = run_measures(series, ["reward/gold"], TableConfig(window=1))
    assert cells["reward/gold.last"] is None
    assert cells["reward/gold.final"] is None
    assert cells["reward/gold.best"] == 0.5


def test_the_final_value_of_an_evaluation_is_its_last() -> None:
    series = {"reward/gold": [(step, 0.0) for step in range(1, 11)], "eval/x/accuracy": [(0, 0.1), (5, 0.9)]}
    assert run_measures(series, ["eval/x/accuracy"], TableConfig(window=2))["eval/x/accuracy.final"] == 0.9


def test_the_area_bridges_missing_steps_with_a_straight_line() -> None:
    assert mean_by_area([(0, 0.0), (1, None), (4, 1.0)]) == 0.5
    assert mean_by_area([(3, 0.25)]) == 0.25
    assert mean_by_area([(1, None)]) is None


@pytest.mark.parametrize(
    ("values", "threshold", "step"),
    [
        ([0.0, 0.6, 0.2, 0.7, 0.7], {"above": 0.5}, 2),
        ([0.0, 0.6, 0.2, 0.7, 0.7], {"above": 0.5, "window": 2}, 5),
        ([0.0, 0.6, 0.4, 0.2], {"above": 0.5, "window": 2}, None),
        ([0.5, 0.5], {"above": 0.5}, None),
        ([0.9, None, 0.9, 0.9], {"above": 0.5, "window": 2}, 4),
        ([0.9, 0.3], {"below": 0.5}, 2),
    ],
)
def test_the_first_step_is_where_the_mean_of_a_whole_window_has_passed(
    values: list[float | None], threshold: dict[str, Any], step: int | None
) -> None:
    assert first_step_past(list(enumerate(values, start=1)), ThresholdConfig(**threshold)) == step


def test_steps_of_sft_are_no_steps_of_the_run_and_its_evaluation_is_the_start(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "stage": "eval", "eval/x/accuracy": 0.0},
        {"step": 1, "stage": "sft", "sft/loss": 2.0},
        {"step": 1, "stage": "eval", "eval/x/accuracy": 0.4},
        train_row(1, 0.5),
        train_row(2, None),
        {"step": 2, "stage": "eval", "eval/x/accuracy": 0.8},
    ]
    assert read_series(write(tmp_path / "metrics.jsonl", rows)) == {
        "eval/x/accuracy": [(0, 0.4), (2, 0.8)],
        "reward/gold": [(1, 0.5), (2, None)],
    }


def test_names_are_chosen_by_pattern_and_a_plain_name_has_columns_even_if_absent() -> None:
    names = ["reward/gold", "reward/exploit", "policy/kl"]
    assert chosen_names(names, ["policy/kl", "reward/*"]) == ["policy/kl", "reward/exploit", "reward/gold"]
    assert chosen_names(names, ["gradreg/*", "reward/no"]) == ["reward/no"]


def test_curves_are_means_over_bins_named_by_their_last_step() -> None:
    series = {"reward/gold": [(1, 0.0), (2, 1.0), (3, 0.5)], "eval/x/accuracy": [(0, 0.1), (3, 0.3)]}
    config = CurvesConfig(metrics=("reward/gold", "eval/*"), every=2)
    assert curve_bins(series, config) == [
        {"step": 0, "reward/gold": None, "eval/x/accuracy": 0.1},
        {"step": 2, "reward/gold": 0.5, "eval/x/accuracy": None},
        {"step": 4, "reward/gold": 0.5, "eval/x/accuracy": 0.3},
    ]


def test_a_window_is_of_steps_but_of_evaluations_where_these_are_counted() -> None:
    points = [(5, 0.9), (10, 0.9), (11, 0.9)]
    threshold = ThresholdConfig(above=0.5, window=2)
    assert first_step_past(points, threshold) == 11
    assert first_step_past(points, threshold, consecutive=False) == 10
    config = TableConfig(first={"eval/x/accuracy": threshold, "reward/gold": threshold})
    cells = run_measures({"eval/x/accuracy": points, "reward/gold": points}, [], config)
    assert cells == {"eval/x/accuracy.first": 10, "reward/gold.first": 11}
