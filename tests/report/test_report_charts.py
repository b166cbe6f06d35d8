"""Which charts a run has, and what they draw."""

from __future__ import annotations

import re
from typing import Any

from flatpeak.report.charts import CHARTS, Chart, accuracy_curves, charts, metric_curves, sharpness_curves
from support.summaries import evaluation


def named(title: str) -> Chart:
    return next(chart for chart in CHARTS if chart.title == title)


def trained(*steps: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"step": step, "stage": "train", **metrics} for step, metrics in enumerate(steps, start=1)]


def drawn(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The charts by title."""
    result = {}
    for chart in charts(rows, ()):
        title = next(one.title for one in CHARTS if f">{one.title}</text>" in chart["svg"])
        result[title] = chart["svg"]
    return result


def test_failures_of_a_part_are_no_reward_and_a_step_without_any_counts_as_0() -> None:
    rows = trained({"reward/mean": 1.0}, {"reward/mean": 0.5, "reward/style/failed": 3.0}, {"reward/mean": 0.5})
    assert [curve.label for curve in metric_curves(rows, named("Reward"))] == ["reward/mean"]
    [failures] = metric_curves(rows, named("Failures of reward parts"))
    assert (failures.label, failures.steps, failures.values) == ("reward/style/failed", (1, 2, 3), (0.0, 3.0, 0.0))
    svg = drawn(rows)["Failures of reward parts"]
    assert ">reward/style/failed</text>" in svg
    assert ">completions per step</text>" in svg


def test_equal_curves_are_one_with_all_their_names() -> None:
    rows = trained(
        {"reward/mean": 0.5, "reward/right": 0.5, "reward/style": 0.5},
        {"reward/mean": 1.0, "reward/right": 1.0, "reward/style": 0.75},
    )
    curves = metric_curves(rows, named("Reward"))
    assert [(curve.label, curve.values) for curve in curves] == [
        ("reward/mean = reward/right", (0.5, 1.0)),
        ("reward/style", (0.5, 0.75)),
    ]


def test_curves_that_differ_by_rounding_alone_are_one_and_others_are_not() -> None:
    rows = trained(
        {"reward/mean": 0.3840000033, "reward/proxy": 0.384, "reward/near": 0.3841},
        {"reward/mean": 0.0, "reward/proxy": 1e-9, "reward/near": 0.0},
    )
    labels = [curve.label for curve in metric_curves(rows, named("Reward"))]
    assert labels == ["reward/mean = reward/proxy", "reward/near"]
    # The same values at other steps are another curve.
    shorter = trained({"reward/mean": 1.0, "reward/part": 1.0}, {"reward/mean": 1.0})
    assert [curve.label for curve in metric_curves(shorter, named("Reward"))] == ["reward/mean", "reward/part"]


def test_a_run_without_failures_has_no_chart_of_them() -> None:
    rows = trained({"reward/mean": 1.0, "reward/missing_fraction": 0.0}, {"reward/missing_fraction": 0.0})
    assert set(drawn(rows)) == {"Reward"}


def test_missing_rewards_are_drawn_where_there_are_any() -> None:
    rows = trained({"reward/missing_fraction": 0.0}, {"reward/missing_fraction": 0.25})
    [curve] = metric_curves(rows, named("Missing rewards"))
    assert curve.values == (0.0, 0.25)


def test_each_judge_has_its_curves() -> None:
    judged = {
        "judge/valid_fraction": 0.9,
        "judge/style/valid_fraction": 0.8,
        "judge/canary_false_positive_rate": 0.0,
        "judge/shadow_gap": 0.3,
        "judge/cost": 0.02,
        "judge/calls": 7.0,
    }
    result = drawn(trained(judged, judged))
    assert set(result) == {
        "Judge: questions with a verdict",
        "Judge: worthless answers that fooled it",
        "Judge minus verifier",
        "Judge: cost",
    }
    labels = re.findall(r">(judge/[a-z/_]+)</text>", "".join(result.values()))
    assert sorted(labels) == sorted(set(judged) - {"judge/calls"})
    assert not drawn(trained({"reward/mean": 1.0})).keys() - {"Reward"}


def test_a_judge_without_prices_has_no_chart_of_its_cost() -> None:
    assert set(drawn(trained({"judge/cost": 0.0, "judge/valid_fraction": 1.0}))) == {"Judge: questions with a verdict"}


def test_failed_extractions_stand_beside_accuracy() -> None:
    result = [
        evaluation("start", 0, accuracy=0.0, extraction_failed=1.0),
        evaluation("sft", 9, accuracy=0.4, extraction_failed=0.25),
        evaluation("train", 5, accuracy=0.6, extraction_failed=0.0),
    ]
    accuracy, failed = accuracy_curves(result)
    assert (accuracy.label, accuracy.steps, accuracy.values) == ("accuracy", [0, 5], [0.4, 0.6])
    assert (failed.label, failed.steps, failed.values) == ("no answer found", [0, 5], [0.25, 0.0])
    [chart] = charts([], result)
    assert ">no answer found</text>" in chart["svg"]


def test_samples_give_the_accuracy_where_there_are_no_greedy_answers() -> None:
    result = [evaluation("train", 1, **{"sampled/accuracy": 0.5, "sampled/extraction_failed": 0.1, "pass@1": 0.5})]
    accuracy, failed = accuracy_curves(result)
    assert (accuracy.label, accuracy.values, failed.values) == ("sampled/accuracy", [0.5], [0.1])


def test_what_chooses_the_best_checkpoint_is_drawn_where_nothing_says_right_or_wrong() -> None:
    result = [evaluation("start", 0, reward=0.1), evaluation("train", 4, reward=0.9)]
    [chart] = charts([], result, metric="reward")
    assert ">Held-out reward</text>" in chart["svg"]
    assert "greedy" in chart["note"]
    assert charts([], result, metric="other") == []


def test_falls_of_the_total_reward_have_a_curve_for_each_radius():
    evaluations = [
        evaluation("start", 0, **{"sharpness/fall_0.1": 0.0, "sharpness/fall_0.6": 0.25, "sharpness/clean": 1.0}),
        evaluation(
            "train", 5, **{"sharpness/fall_0.1": 0.125, "sharpness/fall_0.6": None, "sharpness/fall_0.6/x": 9.0}
        ),
        evaluation("train", 9, **{"sharpness/fall_0.1": -0.5, "sharpness/fall_0.6": 0.5}),
    ]
    curves = sharpness_curves(evaluations)
    assert [(curve.label, list(curve.steps), list(curve.values)) for curve in curves] == [
        ("radius 0.1", [0, 5, 9], [0.0, 0.125, -0.5]),
        ("radius 0.6", [0, 9], [0.25, 0.5]),
    ]
    drawn = charts([], evaluations)
    assert any(">Sharpness</text>" in chart["svg"] and ">radius 0.6</text>" in chart["svg"] for chart in drawn)
    assert not any(">Sharpness</text>" in chart["svg"] for chart in charts([], [evaluation("start", 0, accuracy=1.0)]))


def test_the_gradient_norm_of_a_run_without_a_penalty_is_drawn_once() -> None:
    rows = trained({"policy/grad_norm": 0.5, "gradreg/g1_norm": 0.4}, {"policy/grad_norm": 0.7, "gradreg/g1_norm": 0.6})
    assert list(drawn(rows)) == ["Gradient norm"]
    rows[1]["gradreg/penalty_ratio"] = 0.1
    assert list(drawn(rows)) == ["Gradient norm", "Penalty ratio", "Gradient norm without penalty"]


def test_metrics_of_rewards_and_callbacks_have_charts_of_their_own() -> None:
    rows = trained(
        {"reward/mean": 0.5, "reward/a": 0.1, "reward/a/margin": 2.0, "policy/loss": 1.0, "mine": 3.0, "my/x": 4.0}
    )
    assert [curve.label for curve in metric_curves(rows, named("Reward"))] == ["reward/mean", "reward/a"]
    assert [curve.label for curve in metric_curves(rows, named("Logged by rewards"))] == ["reward/a/margin"]
    assert [curve.label for curve in metric_curves(rows, named("Logged by callbacks"))] == ["mine", "my/x"]
    assert ">Logged by callbacks</text>" in drawn(rows)["Logged by callbacks"]
