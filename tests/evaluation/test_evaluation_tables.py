"""Figures apart for each subject and level, and how they are printed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flatpeak.evaluation.config import is_verdict
from flatpeak.evaluation.estimates import estimate, format_estimate
from flatpeak.evaluation.result import Evaluation, subset_tables
from flatpeak.evaluation.tables import Comparison, differences
from flatpeak.experiments.mcnemar import tango_interval
from flatpeak.functional import wilson_interval

SUBJECTS = ["algebra", "algebra", "algebra", "geometry", "geometry", "logic"]
LEVELS = ["10", "9", "9", "10", "9", "9"]
ACCURACY = [1.0, 0.0, 1.0, 0.0, None, 1.0]
FAILED = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def evaluation(accuracy: list[float | None]) -> Evaluation:
    return Evaluation(
        task="school",
        size=6,
        values={"accuracy": accuracy, "extraction_failed": FAILED},
        ids=list("abcdef"),
        rows=[{"id": id} for id in "abcdef"],
        subsets=[{"subject": subject, "level": level} for subject, level in zip(SUBJECTS, LEVELS, strict=True)],
    )


def test_a_table_has_the_figures_of_each_value_and_both_averages() -> None:
    table = subset_tables([{"subject": subject} for subject in SUBJECTS], {"accuracy": ACCURACY})["subject"]
    assert table.sizes == {"algebra": 3, "geometry": 2, "logic": 1}
    assert [table.estimates[subject]["accuracy"].mean for subject in table.sizes] == pytest.approx([2 / 3, 0.0, 1.0])
    assert table.estimates["algebra"]["accuracy"].interval == wilson_interval(2, 3)
    # Five verdicts, three of them right; the mean of 2/3, 0 and 1.
    assert table.micro["accuracy"].mean == pytest.approx(3 / 5)
    assert table.micro["accuracy"].interval == wilson_interval(3, 5)
    assert table.macro["accuracy"] == pytest.approx(5 / 9)


def test_a_single_question_has_no_interval() -> None:
    table = subset_tables([{"subject": subject} for subject in SUBJECTS], {"accuracy": ACCURACY})["subject"]
    logic, geometry = (table.estimates[subject]["accuracy"] for subject in ("logic", "geometry"))
    assert (logic.mean, logic.questions, logic.interval, logic.method) == (1.0, 1, None, None)
    # The other of the two has no verdict.
    assert (geometry.mean, geometry.questions, geometry.interval) == (0.0, 1, None)


def test_values_without_any_verdict_stay_out_of_the_macro_average() -> None:
    table = subset_tables([{"s": "x"}, {"s": "x"}, {"s": "y"}], {"accuracy": [1.0, 0.0, None]})["s"]
    assert table.macro == {"accuracy": 0.5}
    assert math.isnan(table.estimates["y"]["accuracy"].mean)
    assert table.as_dict()["values"]["y"]["counted"] == {"accuracy": 0}


def test_numbers_in_values_are_sorted_as_numbers_and_columns_may_be_missing() -> None:
    marks = [{"level": "Level 10"}, {"level": "Level 9"}, {}, {"topic": "sets"}]
    tables = subset_tables(marks, {"accuracy": [1.0, 0.0, 1.0, 1.0]})
    assert list(tables) == ["level", "topic"]
    assert list(tables["level"].sizes) == ["Level 9", "Level 10"]
    assert tables["level"].micro["accuracy"].questions == 2


def test_the_summary_has_the_tables_and_the_metrics_do_not() -> None:
    result = evaluation(ACCURACY)
    assert result.metrics() == pytest.approx({"accuracy": 0.6, "extraction_failed": 2 / 6})
    level = result.as_dict()["subsets"]["level"]
    assert level["values"]["9"] == {
        "size": 4,
        "metrics": {"accuracy": pytest.approx(2 / 3), "extraction_failed": 0.25},
        "intervals": {
            "accuracy": list(wilson_interval(2, 3)),
            "extraction_failed": list(wilson_interval(1, 4)),
        },
        "methods": {"accuracy": "wilson", "extraction_failed": "wilson"},
        "counted": {"accuracy": 3},
    }
    assert level["macro"]["accuracy"] == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_the_first_questions_have_their_own_tables() -> None:
    assert evaluation(ACCURACY).first(4).subset_tables["subject"].sizes == {"algebra": 3, "geometry": 1}
    assert evaluation(ACCURACY).only({"b", "f"}).subset_tables["level"].sizes == {"9": 2}


def test_every_value_is_printed_with_its_count_and_what_found_no_answer() -> None:
    text = Comparison(labels=["model"], evaluations=[evaluation(ACCURACY)]).render()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "│ accuracy │ 0.6 [0.2307, 0.8824] of 5 │ wilson │" in lines
    assert "│ algebra │ 3 │ 0.6667 [0.2077, 0.9385] │ 0.333 │" in lines
    assert "│ logic │ 1 │ 1 │ 0 │" in lines
    assert "│ all questions (micro) │ 6 │ 0.6 [0.2307, 0.8824] of 5 │ 0.333 │" in lines
    assert "│ mean of the rows (macro) │ │ 0.5556 │ 0.2778 │" in lines
    assert lines.index("│ 9 │ 4 │ 0.6667 [0.2077, 0.9385] of 3 │ 0.25 │") < lines.index("│ logic │ 1 │ 1 │ 0 │")


def test_brackets_in_the_values_of_a_column_are_printed_as_they_are() -> None:
    named = replace(evaluation(ACCURACY), subsets=[{"topic": topic} for topic in ["[red]hot", "[/b]"] * 3])
    text = Comparison(labels=["runs/[bold]x"], evaluations=[named]).render()
    assert all(name in text for name in ("[red]hot", "[/b]", "runs/[bold]x"))


def test_rows_have_the_questions_of_further_sets() -> None:
    whole = replace(evaluation(ACCURACY), sets={"exam": replace(evaluation(ACCURACY), rows=[{"id": "exam/a"}])})
    ids = [row["id"] for row in Comparison(labels=["m"], evaluations=[whole]).rows()]
    assert ids == [*"abcdef", "exam/a"]


@pytest.mark.parametrize(
    ("metric", "verdict"),
    [
        *((name, True) for name in ("accuracy", "sampled/accuracy", "accuracy/not_near_train", "pass@8")),
        *((name, False) for name in ("accuracy_reward", "sampled/accuracy_reward", "maj@x")),
    ],
)
def test_a_reward_whose_name_begins_with_accuracy_is_not_a_verdict(metric: str, verdict: bool) -> None:
    assert is_verdict(metric) is verdict


def test_models_stand_side_by_side_with_paired_differences() -> None:
    before, after = evaluation(ACCURACY), evaluation([1.0, 1.0, 1.0, 0.0, 1.0, None])
    change = differences(before, after)["accuracy"]
    # Both have a verdict on four questions, of which one changed.
    assert (change["difference"], change["questions"]) == (0.25, 4)
    text = Comparison(labels=["a", "b"], evaluations=[before, after], notices=["mind the gap"]).render()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(
        line.startswith("│ accuracy │ 0.6 [0.2307, 0.8824] of 5 │ 0.8 [") and "+0.25 [" in line for line in lines
    )
    assert "│ geometry │ 2 │ 0 of 1 │ 0.5 [0.09453, 0.9055] │ 0.5 │ 0.5 │" in lines
    assert lines[-1] == "mind the gap"


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_shares_that_all_differ_by_as_much_have_the_score_interval(before: float, after: float) -> None:
    change = differences(evaluation([before] * 6), evaluation([after] * 6))["accuracy"]
    low, high = tango_interval(6 * int(after > before), 6 * int(after < before), 6)
    assert (change["low"], change["high"]) == pytest.approx((low, high), abs=1e-9)
    assert high - low > 0.1


def test_a_table_is_folded_into_the_width_of_a_terminal() -> None:
    comparison = Comparison(labels=["one", "two"], evaluations=[evaluation(ACCURACY)] * 2)
    assert max(map(len, comparison.render().splitlines())) > 80
    assert max(map(len, comparison.render(width=80).splitlines())) <= 80


@pytest.mark.parametrize(("verdict", "told"), [(0.0, False), (None, True)])
def test_a_mean_of_fewer_questions_is_explained_where_there_is_one(verdict: float | None, told: bool) -> None:
    values = {"accuracy": [1.0, 0.0, verdict]}
    evaluation = Evaluation(task="sums", size=3, values=values, ids=["a", "b", "c"], rows=[{}, {}, {}])
    text = Comparison(labels=["base"], evaluations=[evaluation]).render()
    assert ("] of 2" in text, "'of 98' marks a mean over another number of questions" in text) == (told, told)


def test_figures_say_what_they_are() -> None:
    assert format_estimate(estimate([], metric="accuracy")) == "-"
    assert format_estimate(estimate([None, 1.0], metric="accuracy"), of=2) == "1 of 1"
    assert estimate([0.0, 1.0, 0.5], metric="accuracy").method == "bootstrap"
    assert estimate([0.0, 0.0], metric="sampled/length").interval == (0.0, 0.0)
