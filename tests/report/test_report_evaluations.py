"""The report's tables of held-out evaluations, from what evaluations write to summary.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from flatpeak.evaluation.result import Evaluation
from flatpeak.evaluation.robustness import Robustness
from flatpeak.report.evaluations import (
    MANY_VALUES,
    EvaluationColumn,
    best_evaluation,
    cell,
    evaluation_columns,
    headline_metric,
    metric_table,
    robustness_table,
    subset_tables,
)
from flatpeak.runs.summary import EvaluationStage, StageEvaluation, finite
from support.summaries import summary


def evaluation(
    stage: EvaluationStage,
    step: int,
    values: Mapping[str, Sequence[float | None]],
    *,
    subsets: Sequence[Mapping[str, str]] = (),
    robustness: Mapping[str, Robustness] | None = None,
) -> StageEvaluation:
    """As a run's summary holds what was measured."""
    size = len(next(iter(values.values())))
    result = Evaluation(
        task="sums",
        size=size,
        values=values,
        ids=[str(index) for index in range(size)],
        rows=[{}] * size,
        subsets=subsets,
        robustness=robustness or {},
    )
    return StageEvaluation(stage=stage, step=step, **finite(result.as_dict()))


def plain(stage: EvaluationStage, step: int) -> StageEvaluation:
    return evaluation(stage, step, {"accuracy": [1.0, 0.0]})


def columns(found: StageEvaluation) -> list[EvaluationColumn]:
    return [EvaluationColumn(label="last", evaluation=found, outcome=True)]


def labels(*evaluations: StageEvaluation, best_step: int | None) -> list[str]:
    return [one.label for one in evaluation_columns(evaluations, best_step=best_step)]


def test_the_stages_the_best_and_the_last_evaluation_are_shown_once() -> None:
    start, sft, early, late = plain("start", 0), plain("sft", 30), plain("train", 20), plain("train", 40)
    assert labels(start, sft, early, late, best_step=20) == [
        "before training",
        "after SFT",
        "at its best, step 20",
        "after RL, step 40",
    ]
    assert labels(start, early, late, best_step=40) == ["before training", "after RL and at its best, step 40"]
    assert labels(start, sft, late, best_step=0) == [
        "before training",
        "after SFT and at its best",
        "after RL, step 40",
    ]
    assert labels(start, best_step=None) == ["before training"]
    assert labels(best_step=None) == []


def test_the_best_evaluation_of_step_0_is_of_the_model_rl_began_with() -> None:
    start, sft, late = plain("start", 0), plain("sft", 30), plain("train", 40)
    for best, expected in ((0, sft), (40, late), (None, None)):
        assert best_evaluation(summary(start, sft, late, best_step=best)) is expected


def test_a_figure_over_fewer_questions_says_over_how_many() -> None:
    result = evaluation("train", 1, {"accuracy": [1.0, 1.0, None, 0.0], "style": [None] * 4})
    assert cell(result, "accuracy") == "0.667 [0.208, 0.939] of 3"
    assert cell(result, "style") == "unknown"
    assert cell(result, "reward") == ""


def test_failures_stand_beside_accuracy_and_each_row_names_its_interval() -> None:
    values = {
        "reward": [0.2, 0.4],
        "sampled/accuracy": [0.5, 1.0],
        "pass@2": [1.0, 1.0],
        "accuracy": [1.0, 0.0],
        "missing": [0.0, 0.0],
        "extraction_failed": [0.0, 1.0],
    }
    table = metric_table(columns(evaluation("train", 7, values)))
    assert table is not None
    assert [(row["metric"], row["method"]) for row in table["rows"]] == [
        ("accuracy", "Wilson"),
        ("extraction_failed", "Wilson"),
        ("reward", "bootstrap"),
        ("missing", "Wilson"),
        ("sampled/accuracy", "bootstrap"),
        ("pass@2", "Wilson"),
    ]
    assert table["columns"] == [{"label": "last", "size": 2}]
    assert table["with_sampled"]
    assert not table["sizes_differ"]
    assert metric_table([]) is None


def test_what_stands_for_an_evaluation_is_its_accuracy_or_what_chooses() -> None:
    one = {"reward": [1.0], "sampled/reward": [1.0]}
    assert headline_metric(evaluation("train", 1, {**one, "accuracy": [1.0]}), metric="reward") == "accuracy"
    assert headline_metric(evaluation("train", 1, {**one, "style": [1.0]}), metric="style") == "style"
    assert headline_metric(evaluation("train", 1, one), metric="pass@1") == "reward"
    assert headline_metric(evaluation("train", 1, {"loss": [1.0]}), metric=None) is None


LEVELS = [{"level": f"Level {1 + index % 3}"} for index in range(6)]
VALUES: dict[str, list[float | None]] = {
    "accuracy": [1.0, 0.0, 0.0, 1.0, 1.0, None],
    "extraction_failed": [0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
}


def test_a_small_subset_table_keeps_the_order_of_its_values_and_has_both_averages() -> None:
    [table] = subset_tables(columns(evaluation("train", 3, VALUES, subsets=LEVELS)))
    assert (table["column"], table["metric"], table["label"], table["folded"]) == ("level", "accuracy", "last", False)
    assert [(row["name"], row["size"], row["cell"], row["failed"]) for row in table["rows"]] == [
        ("Level 1", 2, "1.000 [0.342, 1.000]", "0.000"),
        ("Level 2", 2, "0.500 [0.095, 0.905]", "0.000"),
        ("Level 3", 2, "0.000 of 1", "0.500"),
    ]
    assert (table["micro"]["size"], table["micro"]["cell"]) == (6, "0.600 [0.231, 0.882] of 5")
    assert table["macro"] == {"cell": "0.500", "failed": "0.167"}


def test_a_large_subset_table_is_folded_and_sorted() -> None:
    count = MANY_VALUES + 1
    marks = [{"subject": f"s{index % count:02d}"} for index in range(2 * count)]
    accuracy = [float(index % count in (3, 5) or index == 7) for index in range(2 * count)]
    [table] = subset_tables(columns(evaluation("train", 3, {"accuracy": accuracy}, subsets=marks)))
    assert table["folded"]
    assert [row["name"] for row in table["rows"]][:4] == ["s03", "s05", "s07", "s00"]
    assert [row["value"] for row in table["rows"]][:4] == [1.0, 1.0, 0.5, 0.0]
    assert [row["name"] for row in table["extremes"]] == ["s03", "s12"]
    assert not table["with_failures"]


def test_a_value_whose_verdicts_are_all_missing_comes_last_and_is_unknown() -> None:
    count = MANY_VALUES + 1
    marks = [{"subject": f"s{index:02d}"} for index in range(count)]
    accuracy: list[float | None] = [None, *[0.0] * (count - 1)]
    [table] = subset_tables(columns(evaluation("train", 3, {"accuracy": accuracy}, subsets=marks)))
    assert (table["rows"][-1]["name"], table["rows"][-1]["cell"]) == ("s00", "unknown")
    assert table["extremes"][1]["name"] == "s12"


def test_tables_by_subset_are_of_the_best_and_the_last_evaluation() -> None:
    start = evaluation("start", 0, VALUES, subsets=LEVELS)
    best, last = (evaluation("train", step, VALUES, subsets=LEVELS) for step in (2, 4))
    tables = subset_tables(evaluation_columns([start, best, last], best_step=2))
    assert [table["label"] for table in tables] == ["at its best, step 2", "after RL, step 4"]
    assert [table["label"] for table in subset_tables(evaluation_columns([start], best_step=None))] == [
        "before training"
    ]


def test_the_methods_of_a_subset_tables_intervals_are_told() -> None:
    result = evaluation("train", 3, VALUES, subsets=LEVELS)
    content: dict[str, Any] = dict(result.subsets["level"])
    for row in content["values"].values():
        row["methods"] = {"accuracy": "wilson"}
    result.subsets["level"].update(content)
    assert subset_tables(columns(result))[0]["methods"] == "Wilson"
    for row in content["values"].values():
        del row["methods"]
    assert "Wilson's where" in subset_tables(columns(result))[0]["methods"]


def robust(clean: Sequence[float | None], perturbed: Sequence[float | None], *, asked: int) -> Robustness:
    return Robustness(
        kind="typos",
        asked=asked,
        clean=clean,
        perturbed=perturbed,
        extraction_failed=[0.0] * len(clean),
        rows=[{}] * len(clean),
    )


def test_perturbed_questions_stand_beside_the_same_ones_as_they_were() -> None:
    one = robust([1.0] * 9 + [0.0], [0.0] * 8 + [None, 0.0], asked=12)
    result = evaluation("train", 3, {"accuracy": [1.0] * 12}, robustness={"typos": one})
    table = robustness_table(columns(result))
    assert table is not None
    [row] = table["rows"]
    assert (row["kind"], row["label"], row["covered"]) == ("typos", "last", "10 of 12")
    assert row["clean"].startswith("0.889 [")
    assert row["clean"].endswith("] of 9")
    assert row["perturbed"].startswith("0.000 [0.000, ")
    assert row["difference"].startswith("-0.889 [-1.000, -0.")
    assert row["certain"]
    assert (row["failed"], table["methods"]) == ("0.000", "Wilson")
    metrics = metric_table(columns(result))
    assert metrics is not None
    assert [row["metric"] for row in metrics["rows"]] == ["accuracy"]


def test_a_kind_that_covers_nothing_has_no_figures() -> None:
    result = evaluation("train", 3, {"accuracy": [1.0, 1.0]}, robustness={"typos": robust([], [], asked=2)})
    table = robustness_table(columns(result))
    assert table is not None
    [row] = table["rows"]
    assert row["covered"] == "0 of 2"
    assert {row["clean"], row["perturbed"], row["difference"], row["failed"]} == {""}
    assert not row["certain"]


@pytest.mark.parametrize("metric", ["accuracy", "sampled/accuracy"])
def test_without_perturbed_questions_there_is_no_such_table(metric: str) -> None:
    assert robustness_table(columns(evaluation("train", 1, {metric: [1.0]}))) is None


def test_metrics_of_sharpness_say_what_they_are() -> None:
    values = {"accuracy": [1.0, 0.0]}
    found = evaluation("train", 5, values)
    metrics = {
        "sharpness/clean": 0.75,
        "sharpness/fall_0.3": 0.25,
        "sharpness/fall_0.3/format": 0.5,
        "sharpness/relative_fall_1e-05": 0.125,
        "sharpness/top_eigenvalue": 12.0,
    }
    table = metric_table(columns(replace(found, metrics={**found.metrics, **metrics}, counted={"sharpness/clean": 32})))
    assert table is not None
    rows = {row["metric"]: (row["meaning"], row["cells"]) for row in table["rows"] if "sharpness" in row["metric"]}
    assert rows == {
        "sharpness/clean": ("reward of samples, the weights as they are", ["0.750 of 32"]),
        "sharpness/fall_0.3": ("reward lost under noise of this radius in the weights", ["0.250"]),
        "sharpness/fall_0.3/format": ("", ["0.500"]),
        "sharpness/relative_fall_1e-05": ("the same over the reward", ["0.125"]),
        "sharpness/top_eigenvalue": ("of the Hessian of the policy loss", ["12.000"]),
    }
