"""Plots of arms: the same bytes each time, one look per arm, every arm and label in the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from matplotlib.textpath import TextPath

from flatpeak.experiments import paired_t
from flatpeak.experiments.comparison import compare
from flatpeak.experiments.comparison_report import draw_plots, hold_last
from flatpeak.experiments.plots import (
    PairedValues,
    arm_styles,
    curves_with_bands,
    gold_against_kl,
    paired_dots,
    strip,
    survival,
)
from flatpeak.experiments.table import SweepTable
from support.sweep_tables import COLUMNS, row

FEW = ("none", "kl", "gr")
LONG = ("none", *(f"gradient_regularization_{index},strength=calibrated:0.3" for index in range(5)))
RUNS = [{10: 0.1, 20: 0.3}, {10: 0.2, 20: 0.5}, {10: 0.3}]


def texts(svg: str) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


def curves(arms: tuple[str, ...] = FEW, **changes: Any) -> str:
    styles = arm_styles(arms, baseline=arms[0])
    return curves_with_bands(dict.fromkeys(arms, RUNS), styles=styles, baseline=arms[0], label="reward/gold", **changes)


def against_kl(arms: tuple[str, ...] = FEW) -> str:
    run = {"gold": {10: 0.5, 20: 0.25}, "proxy": {10: 1.0, 20: 2.0}, "kl": {10: 4.0, 20: 9.0, 30: 16.0}}
    return gold_against_kl(
        {arm: [run, run] for arm in arms},
        styles=arm_styles(arms, baseline=arms[0]),
        baseline=arms[0],
        gold="gold",
        proxy="proxy",
        kl="kl",
    )


def survivors(arms: tuple[str, ...] = FEW) -> str:
    runs = {arm: [(30, True), (60, False)] for arm in arms}
    return survival(runs, styles=arm_styles(arms, baseline=arms[0]), baseline=arms[0], label="share not hacked")


def strips(arms: tuple[str, ...] = FEW) -> str:
    return strip({arm: [0.0, 0.0, 1.0] for arm in arms}, styles=arm_styles(arms, baseline=arms[0]), label="gold")


def dots(arms: tuple[str, ...] = FEW) -> str:
    before, after = [0.1, 0.2, 0.4], [0.6, 0.5, 0.9]
    pair = PairedValues(baseline=before, arm=after, difference=paired_t(after, before))
    pairs = dict.fromkeys(arms[1:], pair)
    return paired_dots(pairs, styles=arm_styles(arms, baseline=arms[0]), baseline=arms[0], label="gold")


ALL: list[Callable[..., str]] = [curves, against_kl, survivors, strips, dots]


@pytest.mark.parametrize("draw", ALL)
def test_a_plot_is_the_same_text_each_time(draw: Callable[..., str]) -> None:
    svg = draw()
    assert svg == draw()
    assert "<dc:date>" not in svg


@pytest.mark.parametrize("draw", ALL)
@pytest.mark.parametrize("arms", [LONG, LONG[:3]], ids=["many", "few"])
def test_every_arm_is_named_and_no_text_overlaps_or_leaves_the_page(
    draw: Callable[..., str], arms: tuple[str, ...]
) -> None:
    # Upright texts by their place and their size in the font that the layout is made with.
    svg = draw(arms)
    width = float(re.search(r'<svg [^>]*width="([\d.]+)pt"', svg)[1])  # type: ignore[index]
    named = " ".join(texts(svg))
    assert [arm for arm in arms if arm not in named] == []
    boxes = []
    for style, x, y, text in re.findall(
        r'<text style="([^"]*)" x="([\d.-]+)" y="([\d.-]+)" transform="rotate\(-0 [^"]*\)">([^<]*)</text>', svg
    ):
        size = float(re.search(r"([\d.]+)px", style)[1])  # type: ignore[index]
        own = TextPath((0, 0), text, size=size).get_extents().width
        left = float(x) - (own / 2 if "middle" in style else own if "end" in style else 0)
        boxes.append((left, left + own, float(y) - 0.75 * size, float(y), text))
    assert [text for left, right, _, _, text in boxes if left < 0 or right > width] == []
    assert len(boxes) > 5
    overlaps = [
        (one[4], other[4])
        for index, one in enumerate(boxes)
        for other in boxes[:index]
        if one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]
    ]
    assert overlaps == []


def test_axes_say_what_they_measure() -> None:
    assert {"training step", "reward/gold"} < set(texts(curves()))
    assert {"√KL to the reference (kl), √nat", "gold (full), proxy (dashed)"} < set(texts(against_kl()))
    assert {"training step", "share not hacked"} < set(texts(survivors()))
    assert {"baseline", "arm", "difference", "baseline: none", "gr, n = 3"} < set(texts(dots()))


def test_a_legend_counts_the_seeds_also_where_runs_end_early() -> None:
    assert "gr, n = 2-3" in texts(curves())
    assert "gr, n = 2" in texts(against_kl())


def test_kl_is_drawn_by_its_root() -> None:
    # KL 4 and 9 lie at 2 and 3; 16 has no gold.
    numbers = [float(text) for text in texts(against_kl()) if re.fullmatch(r"[\d.]+", text)]
    assert {2.0, 3.0} <= set(numbers)
    assert 4.0 not in numbers


def test_every_run_adds_a_thin_line_per_run() -> None:
    assert curves(every_run=True).count("stroke-width: 0.5") == 3 * len(RUNS)
    assert "stroke-width: 0.5" not in curves()


def test_every_seed_is_a_line_between_two_arms() -> None:
    assert dots().count("stroke-opacity: 0.3") == 2 * 3


def test_an_arm_looks_the_same_wherever_it_is() -> None:
    styles = arm_styles(FEW, baseline="none")
    assert list(styles) == list(FEW)
    assert styles["none"].color == "#000000"
    assert arm_styles(["kl", "none", "gr"], baseline="none") == {arm: styles[arm] for arm in ("kl", "none", "gr")}
    many = arm_styles([f"{n}" for n in range(27)], baseline=None)
    assert len({(style.color, style.marker) for style in many.values()}) == 27
    for svg in (draw() for draw in ALL):
        assert all(styles[arm].color.lower() in svg.lower() for arm in ("kl", "gr"))


def test_survival_falls_by_the_share_of_runs_still_at_risk() -> None:
    # 4 runs: one passes at 10; one ends at 20 without; one of the two left passes at 30, the other never.
    runs = {"a": [(10, True), (20, False), (30, True), (60, False)]}
    svg = survival(runs, styles=arm_styles(["a"], baseline=None), baseline=None, label="share")
    # The curve runs from share 1 at step 0 to share 0.375 at step 60.
    curve = re.search(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; [^"]*stroke: #332288;', svg)
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", curve[1])]  # type: ignore[index]
    height = (points[-1][1] - points[0][1]) / (1 - 0.375)
    width = (points[-1][0] - points[0][0]) / 60
    drawn = [((x - points[0][0]) / width, 1 - (y - points[0][1]) / height) for x, y in points]
    shares = {round(step): round(share, 4) for step, share in drawn}
    assert shares == {0: 1.0, 10: 0.75, 20: 0.75, 30: 0.375, 60: 0.375}


@pytest.mark.parametrize("passed", [True, False])
def test_survival_is_drawn_where_all_runs_pass_or_none(passed: bool) -> None:
    svg = survival({"a": [(5, passed)] * 2}, styles=arm_styles(["a"], baseline=None), baseline=None, label="share")
    assert "a, n = 2" in texts(svg)


def test_dollar_signs_in_names_are_no_formulas() -> None:
    name = r"$\foo$"
    svg = strip({name: [1.0, 2.0]}, styles=arm_styles([name], baseline=None), label="x")
    assert f"{name}, n = 2" in texts(svg)


def test_the_scale_is_that_of_single_runs_and_not_of_the_interval_of_two() -> None:
    # Of 0 and 1 at step 2 the 95% interval is 0.5 plus or minus 6.35.
    runs = {"a": [{1: 0.0, 2: 0.0}, {1: 0.5, 2: 1.0}]}
    svg = curves_with_bands(runs, styles=arm_styles(["a"], baseline=None), baseline=None, label="reward")
    numbers = [text.replace("\N{MINUS SIGN}", "-") for text in texts(svg)]
    labels = {float(number) for number in numbers if re.fullmatch(r"-?\d+\.\d+", number)}
    assert {0.0, 1.0} <= labels
    assert max(abs(label) for label in labels) < 2.5  # steps reach 2


def test_a_series_that_ended_keeps_its_last_value() -> None:
    series = {10: 0.5, 20: 0.1}
    hold_last(series, steps=[10, 20, 30, 40])
    assert series == {10: 0.5, 20: 0.1, 30: 0.1, 40: 0.1}
    empty: dict[int, float] = {}
    hold_last(empty, steps=[10])
    assert empty == {}


@pytest.mark.parametrize(("end", "seeds"), [("reward/exploit was above 0.9", "2"), ("steps", "1-2")])
def test_only_runs_that_a_condition_ended_are_continued(end: str, seeds: str) -> None:
    rows = (row("none", 1, 0.1, 0.9, 10, end=end), row("none", 2, 0.8, 0.0, None))
    table = SweepTable(header={}, columns=COLUMNS, rows=rows)
    points = [(1, 10, 0.5), (1, 20, 0.1), (2, 10, 0.6), (2, 20, 0.7), (2, 30, 0.8)]
    curves = SweepTable(
        header={},
        columns=("arm", "kl.coefficient", "seed", "step", "reward/gold"),
        rows=tuple(
            {"arm": "none", "kl.coefficient": 0.0, "seed": seed, "step": step, "reward/gold": value}
            for seed, step, value in points
        ),
    )
    drawn = draw_plots(compare(table), curves)
    assert f"none, n = {seeds}<" in drawn["curve_reward-gold.svg"]


def test_a_run_that_ended_keeps_its_value_at_the_steps_at_which_others_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        "flatpeak.experiments.comparison_report.curves_with_bands",
        lambda runs, label, **options: drawn.update({label: runs}),
    )
    rows = (row("none", 1, 0.1, 0.9, 10, end="reward/exploit was above 0.9"), row("none", 2, 0.8, 0.0, None))
    evaluations = {1: {10: 0.5}, 2: {10: 0.6, 20: 0.7}}
    curves = SweepTable(
        header={},
        columns=("arm", "kl.coefficient", "seed", "step", "eval/x", "reward/mean"),
        rows=tuple(
            {
                "arm": "none",
                "kl.coefficient": 0.0,
                "seed": seed,
                "step": step,
                "eval/x": own.get(step),
                "reward/mean": 1.0,
            }
            for seed, own in evaluations.items()
            for step in range(1, 11 if seed == 1 else 21)
        ),
    )
    draw_plots(compare(SweepTable(header={}, columns=COLUMNS, rows=rows)), curves)
    assert drawn["eval/x"] == {"none": [{10: 0.5, 20: 0.5}, {10: 0.6, 20: 0.7}]}
    assert [len(run) for run in drawn["reward/mean"]["none"]] == [20, 20]
