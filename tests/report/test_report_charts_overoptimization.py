"""The parts that are paid for beside those that are only measured."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from flatpeak.report.charts import OVEROPTIMIZATION, charts, paid_and_measured, reward_weights
from flatpeak.report.curves import Curve, curve_svg
from flatpeak.runs.summary import EvaluationStage, StageEvaluation
from support import summaries

WEIGHTS = {"proxy": 1.0, "gold": 0.0}


def evaluation(stage: EvaluationStage, step: int, **metrics: float | None) -> StageEvaluation:
    return summaries.evaluation(stage, step, intervals={"gold": (0.1, 0.7)}, **metrics)


def test_weights_are_read_from_a_resolved_recipe() -> None:
    recipe = {"rewards": {"a": {"type": "number", "weight": 1.0}, "b": {"weight": 0}}}
    assert reward_weights(recipe) == {"a": 1.0, "b": 0.0}
    assert reward_weights({"run": {"name": "x"}}) == {}
    assert reward_weights({}) == {}


def test_both_curves_begin_with_the_model_that_rl_began_with() -> None:
    result = [
        evaluation("start", 0, proxy=0.0, gold=0.0),
        evaluation("sft", 30, proxy=0.5, gold=0.4),
        evaluation("train", 10, proxy=2.0, gold=0.6),
        evaluation("train", 20, proxy=3.0, gold=None),
    ]
    [proxy], [gold] = paid_and_measured(result, WEIGHTS)
    assert (proxy.label, proxy.steps, proxy.values) == ("proxy", [0, 10, 20], [0.5, 2.0, 3.0])
    assert (gold.label, gold.steps, gold.values) == ("gold", [0, 10], [0.4, 0.6])
    assert gold.intervals == [(0.1, 0.7), (0.1, 0.7)]


def test_sampled_completions_are_shown_where_there_are_any() -> None:
    result = [evaluation("train", 1, **{"proxy": 1.0, "sampled/proxy": 2.0, "gold": 0.3, "sampled/gold": 0.1})]
    [proxy], [gold] = paid_and_measured(result, WEIGHTS)
    assert (proxy.values, gold.values) == ([2.0], [0.1])


def test_a_run_that_measures_nothing_else_has_no_such_chart() -> None:
    result = [evaluation("train", 1, proxy=1.0, gold=0.5)]
    assert paid_and_measured(result, {"proxy": 1.0}) == ([], [])
    assert paid_and_measured(result, {"gold": 0.0}) == ([], [])
    assert paid_and_measured([evaluation("train", 1, proxy=1.0)], WEIGHTS) == ([], [])
    assert charts([], result, weights={"proxy": 1.0}) == []
    [chart] = charts([], result, weights=WEIGHTS)
    assert OVEROPTIMIZATION in chart["svg"]


def test_curves_on_the_right_have_an_axis_of_their_own() -> None:
    left = Curve(label="proxy", steps=[0, 1, 2], values=[0.0, 50.0, 100.0])
    right = Curve(label="gold", steps=[0, 1, 2], values=[0.0, 0.5, 1.0])
    svg = curve_svg("x", [left], right=[right])
    ElementTree.fromstring(svg)
    lines: dict[str, list[str]] = {}
    for path, style in re.findall(r'<path d="([^"]+)"[^>]*style="(fill: none[^"]+)"', svg):
        if path.count("L") == 2:
            color = re.findall("#1f77b4|#ff7f0e", style)
            # The curves come before the legend's own lines.
            lines.setdefault(color[0] if color else "", re.findall(r"[ML] [\d.]+ ([\d.]+)", path))
    # A hundred times as large, and drawn as high: each by its own axis.
    assert lines["#1f77b4"] == lines["#ff7f0e"]
    assert len(set(lines["#1f77b4"])) == 3
    assert ">proxy</text>" in svg
    assert ">gold</text>" in svg
