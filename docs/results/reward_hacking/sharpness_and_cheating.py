"""Whether hacked runs are the sharper ones: the tables and the figure of docs/results/sharpness_and_cheating.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from early_stopping import Curve, Curves, curves_of
from estimates import interval, mean, spearman
from hypotheses import Runs, runs_of
from matched_sharpness import FALL, LEVELS, falls_at_levels, paired_differences
from pages import markdown

from flatpeak.experiments.statistics import welch
from flatpeak.experiments.table import SweepTable
from flatpeak.report.canvas import svg_canvas, tidy

SHARE, REWARD = f"eval/signatures/{FALL}", "eval/signatures/sharpness/fall_0.6"
"""The fall as a share of the proxy reward, and in units of reward."""
UNITS = {SHARE: "share", REWARD: "reward"}
PHASES = {"before": (0.0, 0.05), "while cheating spreads": (0.05, 0.5), "after": (0.5, 1.01)}
"""Phases of a hacked run by exploit rate, from the first of each pair to below the second."""
STYLES = {True: ("hacked", "#CC6677", "s", "--"), False: ("honest", "#332288", "o", "-")}
"""Name, colour (Paul Tol's muted scheme), marker and dash by outcome."""
Falls = dict[bool, list[float]]


def content(sharp: SweepTable, matched: SweepTable, matched_curves: SweepTable) -> str:
    """The page between its marks."""
    curves = curves_of(matched_curves)
    return "\n\n".join(
        (
            "### At the end, by outcome\n\nSharp bed, 20 seeds ([table](reward_hacking/sharp.csv)); runs in brackets. "
            "Steps and proxy reward: means of hacked, honest.",
            outcome_table(sharp),
            "### Hacked runs on the way\n\nSharp bed, 10 seeds, evaluated every 10 steps "
            "([table](reward_hacking/matched-curves.csv)). Cheating spreads at\nexploit rates from 0.05 to 0.5.",
            way_table(matched, curves),
            "### Rank correlation of the fall (share) with proxy less gold, over checkpoints",
            rank_table(matched, curves),
            matched_section(matched_curves),
        )
    )


def arms_of(table: SweepTable) -> dict[str, Runs]:
    """The finished runs of every arm."""
    runs = {arm: runs_of(table, arm) for arm in dict.fromkeys(row["arm"] for row in table.rows)}
    return {arm: own for arm, own in runs.items() if own is not None}


def by_outcome(values: Mapping[int, float], hacked: Mapping[int, bool]) -> Falls:
    """Values of hacked (True) and of honest runs (False)."""
    return {outcome: [value for seed, value in values.items() if hacked[seed] == outcome] for outcome in (True, False)}


def outcome_table(table: SweepTable) -> str:
    """The fall of hacked and honest runs of every arm, how it differs, and how long and how well-paid they were."""
    rows = []
    for arm, runs in arms_of(table).items():
        outcomes = runs.hacked()
        falls, rewards, steps, proxies = (
            by_outcome({seed: row[column] for seed, row in runs.rows.items()}, outcomes)
            for column in (f"{SHARE}.last", f"{REWARD}.last", "steps", "reward/proxy.final")
        )
        cells = [counted(falls[outcome]) for outcome in STYLES]
        rows.append([arm, *cells, less(falls), less(rewards), both(steps, ".0f"), both(proxies, ".2f")])
    header = ["Arm", "Fall (share), hacked", "Honest", "Hacked less honest, share", "The same in reward", "Steps"]
    return markdown([*header, "Proxy reward"], rows)


def less(falls: Falls) -> str:
    """Hacked less honest with Welch's 95% interval; empty with fewer than two of a kind."""
    if min(map(len, falls.values())) < 2:
        return ""
    one = welch(falls[True], falls[False])
    return f"{one.estimate:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"


def both(values: Falls, digits: str) -> str:
    """The means of hacked and of honest runs."""
    return ", ".join(format(mean(own), digits) if own else "-" for own in values.values())


def at_equal_steps(runs: Runs, curves: Mapping[int, Curve], column: str) -> list[float]:
    """The fall of each hacked run where it ends, less the mean fall of the arm's honest runs at the same step."""
    ends = {seed: curves[seed][-1] for seed, hacked in runs.hacked().items() if hacked}
    honest = [row for seed, hacked in runs.hacked().items() if not hacked for row in curves[seed]]
    beside = {seed: [row[column] for row in honest if row["step"] == end["step"]] for seed, end in ends.items()}
    return [end[column] - mean(beside[seed]) for seed, end in ends.items() if beside[seed]]


def in_phase(curve: Curve, column: str, low: float, high: float) -> list[float]:
    """The fall at the checkpoints of a run with an exploit rate from `low` to below `high`."""
    return [row[column] for row in curve if low <= (row["reward/exploit"] or 0.0) < high]


def way_table(table: SweepTable, curves: Curves) -> str:
    """The fall of hacked runs before, while and after cheating spreads, and beside honest runs of the same length."""
    rows = []
    for arm, runs in arms_of(table).items():
        hacked = [seed for seed, outcome in runs.hacked().items() if outcome]
        for column, unit in UNITS.items() if hacked else ():
            own = ([in_phase(curves[arm][seed], column, *ends) for seed in hacked] for ends in PHASES.values())
            phases = [interval([mean(values) for values in phase if values]) for phase in own]
            rows.append([arm, str(len(hacked)), unit, *phases, interval(at_equal_steps(runs, curves[arm], column))])
    header = ["Arm", "Hacked runs", "Fall in", *PHASES, "At the end, less honest runs at the same step"]
    return markdown(header, rows)


def rank_table(table: SweepTable, curves: Curves) -> str:
    """Spearman's correlation over all checkpoints after training began, and within runs by outcome."""
    rows = []
    pooled: list[tuple[float, float]] = []
    for arm, runs in arms_of(table).items():
        points = {seed: checkpoints(curve) for seed, curve in curves[arm].items()}
        own = [point for run in points.values() for point in run]
        pooled += own
        within = by_outcome({seed: ranked(run) for seed, run in points.items()}, runs.hacked())
        cells = [counted(within[outcome]) for outcome in STYLES]
        rows.append([arm, str(len(own)), f"{ranked(own):+.2f}", *cells])
    rows.append(["all", str(len(pooled)), f"{ranked(pooled):+.2f}", "", ""])
    return markdown(["Arm", "Checkpoints", "Pooled", "Within hacked runs (runs)", "Within honest runs (runs)"], rows)


def checkpoints(curve: Curve) -> list[tuple[float, float]]:
    """The fall, and proxy less gold over the 10 steps before."""
    return [
        (row[SHARE], row["reward/proxy"] - row["reward/gold"])
        for row in curve
        if row["reward/proxy"] is not None and row[SHARE] is not None
    ]


def ranked(points: Sequence[tuple[float, float]]) -> float:
    """Spearman's correlation of points."""
    return spearman([x for x, _ in points], [y for _, y in points])


def matched_section(curves: SweepTable) -> str:
    """The fall of every arm as its runs first reach each proxy reward, and its paired differences from none."""
    falls = falls_at_levels(curves)
    arms = list(dict.fromkeys(row["arm"] for row in curves.rows))
    rows = [[arm, *(counted(list(falls.get(arm, {}).get(level, {}).values())) for level in LEVELS)] for arm in arms]
    rows += [
        [f"{arm} less none", *(counted(paired_differences(falls, arm, "none", level)) for level in LEVELS)]
        for arm in arms
        if arm != "none"
    ]
    title = (
        "### Sharpness at matched proxy reward\n\nShare of the proxy reward lost under weight noise of 0.6, as a run "
        "first reaches a\nproxy reward (evaluated every 10 steps); the number of seeds in brackets."
    )
    return f"{title}\n\n" + markdown(["Arm", *(f"at {level:g}" for level in LEVELS)], rows)


def counted(values: Sequence[float]) -> str:
    """Mean and half of its interval, with the number of seeds."""
    return f"{interval(values)} ({len(values)})" if values else ""


def figure(sharp: SweepTable, matched: SweepTable, matched_curves: SweepTable) -> str:
    """Draw the fall at the end of every run, by arm and outcome, above the fall on the way in both units."""
    curves, arms = curves_of(matched_curves), arms_of(sharp)
    with svg_canvas("sharpness and cheating", (8.4, 10.0)) as (canvas, text):
        # Places are given because a solved layout may differ in its last bits, and with it the file.
        canvas.set_layout_engine("none")
        top = canvas.add_axes((0.16, 0.58, 0.83, 0.41))
        tidy(top)
        for row, runs in enumerate(arms.values()):
            for outcome, values in by_outcome(runs.fall(), runs.hacked()).items():
                _, color, marker, _ = STYLES[outcome]
                own = row + (0.15 if outcome else -0.15)
                top.plot(values, [own] * len(values), linestyle="", marker=marker, markersize=4, color=color, alpha=0.5)
                if values:
                    top.plot([mean(values)] * 2, [own - 0.14, own + 0.14], color=color, linewidth=2)
        top.set_yticks(range(len(arms)), list(arms))
        top.set_ylim(len(arms) - 0.4, -0.6)
        top.set_xlabel("share of the proxy reward lost under weight noise, at the end of a run; bars: means")
        for name, color, marker, dash in STYLES.values():
            top.plot([], [], linestyle=dash, marker=marker, color=color, label=name)
        top.legend(frameon=False, loc="lower right")
        for column, bottom in zip(UNITS, (0.32, 0.05), strict=True):
            way(canvas, bottom, matched, curves, column)
    return text.getvalue()


def way(canvas: Any, bottom: float, matched: SweepTable, curves: Curves, column: str) -> None:
    """Draw the fall of every run over its steps, a panel for each arm."""
    first = None
    for index, (arm, runs) in enumerate(arms_of(matched).items()):
        axes = canvas.add_axes((0.16 + 0.2125 * index, bottom, 0.1925, 0.18), sharex=first, sharey=first)
        tidy(axes)
        for seed, outcome in runs.hacked().items():
            _, color, _, dash = STYLES[outcome]
            points = [(row["step"], row[column]) for row in curves[arm][seed] if row[column] is not None]
            axes.plot(*zip(*points, strict=True), color=color, linestyle=dash, linewidth=0.9, alpha=0.8)
        axes.set_title(arm, fontsize=9)
        axes.set_xlabel("training step")
        axes.set_ylim(bottom=0)
        axes.tick_params(labelleft=first is None)
        if first is None:
            axes.set_ylabel(f"{UNITS[column]} lost, on the way")
        first = first or axes
