"""Write what docs/results/ablations.md has between its marks, and its figure, from the committed tables.

    python docs/results/ablations/make_report.py [--check]

`--check` fails where the page or the figure is not what the tables give.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from flatpeak.experiments.statistics import Difference, holm, mean_over_seeds, scipy_stats
from flatpeak.experiments.table import SweepTable, read_table
from flatpeak.report.canvas import svg_canvas, tidy

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import real_model  # noqa: E402
from claims import ABLATIONS, BASE, BASES, Ablation, Comparison  # noqa: E402
from differences import Values, interval, mean, paired  # noqa: E402
from pages import filled, markdown, parser, update  # noqa: E402

FIGURE = HERE / "differences.svg"
PAGE = HERE.parent / "ablations.md"
SWEEPS = ("demo", "start")
ACCURACY = "eval/arithmetic/accuracy"
LATE = 3
"""The number of last evaluations whose mean is the late accuracy."""
MATTERS = 0.05
"""The smallest difference in accuracy that the project read as an effect, that of its off-policy runs."""
LEVEL = 0.05
FRAME = 0.25
"""The largest difference that the figure shows to scale."""
OTHERS = {"reward/mean.final": "{:.2f}", "policy/entropy.final": "{:.2f}", "rollout/length_mean.final": "{:.2f}"}
"""Further columns of an arm: a column of the table, and its format."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The finished runs of an arm."""

    start: Values
    """Held-out accuracy before RL, by seed."""
    late: Values
    """The mean of its last evaluations."""
    whole: Values
    """The mean over all steps."""
    rows: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A comparison with its differences on shared seeds."""

    comparison: Comparison
    late: Difference
    whole: Difference
    p: float
    """Of the late difference, by Holm over all comparisons."""


def main() -> int:
    """Write or check the page and the figure; the exit code."""
    check: bool = parser(__doc__).parse_args().check
    tables = {name: read_table(HERE / f"{name}.csv") for name in SWEEPS}
    arms: dict[str, Arm] = {}
    for name, table in tables.items():
        arms |= arms_of(table, read_table(HERE / f"{name}-curves.csv"))
    results = compared(arms)
    page = filled(PAGE.read_text(encoding="utf-8"), content(arms, results, provenance(tables)))
    page = filled(page, real_model.section(read_table(HERE / "real_model.csv")), name="real-model")
    return update({PAGE: page, FIGURE: picture(results)}, check=check)


def compared(arms: Mapping[str, Arm]) -> dict[str, Result]:
    """Every comparison whose arm has runs, by arm, in the order of the page."""
    done = [one for ablation in ABLATIONS for one in ablation.comparisons if one.arm in arms]
    pairs = {one.arm: (one, differences(arms[one.arm], arms[one.base])) for one in done}
    adjusted = holm([late.p for _, (late, _) in pairs.values()])
    return {
        arm: Result(comparison=one, late=late, whole=whole, p=p)
        for (arm, (one, (late, whole))), p in zip(pairs.items(), adjusted, strict=True)
    }


def content(arms: Mapping[str, Arm], results: Mapping[str, Result], source: str) -> list[str]:
    """Everything between the marks."""
    figure = "![Difference in late accuracy of every arm from its base](ablations/differences.svg)"
    sections = [section(ablation, arms, results) for ablation in ABLATIONS]
    return [spread(arms, results), figure, overview(results), *sections, source]


def arm_name(row: Mapping[str, Any]) -> str:
    """The name of a row's arm, with its learning rate where that is an axis of the arm."""
    name: str = row["arm"]
    return f"{name},learning_rate={row['optimizer.learning_rate']}" if name.endswith("rate") else name


def arms_of(table: SweepTable, curves: SweepTable) -> dict[str, Arm]:
    """The finished runs of a sweep by arm."""
    series: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for row in curves.rows:
        if row[ACCURACY] is not None:
            series[arm_name(row), row["seed"]][row["step"]] = row[ACCURACY]
    rows: dict[str, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for row in table.rows:
        if row["status"] == "done":
            rows[arm_name(row)][row["seed"]] = row
    return {name: _arm(own, {seed: series[name, seed] for seed in own}) for name, own in rows.items()}


def _arm(rows: Mapping[int, Mapping[str, Any]], series: Mapping[int, Mapping[int, float]]) -> Arm:
    ordered = {seed: [value for _, value in sorted(points.items())] for seed, points in series.items()}
    return Arm(
        start={seed: values[0] for seed, values in ordered.items()},
        late={seed: mean(values[-LATE:]) for seed, values in ordered.items()},
        whole={seed: row[f"{ACCURACY}.auc"] for seed, row in rows.items()},
        rows=rows,
    )


def differences(arm: Arm, base: Arm) -> tuple[Difference, Difference]:
    """The paired differences of an arm from its base: late, and over the whole run."""
    return paired(arm.late, base.late), paired(arm.whole, base.whole)


def verdict(result: Result) -> str:
    """What the late accuracy says of the claim."""
    late, expected = result.late, result.comparison.expected
    if late.n > 1 and late.sd == 0 == late.estimate:
        return f"{'agrees: ' if expected == 0 else 'disagrees: ' if expected else ''}the same"
    bound = max(abs(late.low), abs(late.high))
    if math.isnan(bound):
        return "undecided"
    if late.low <= 0 <= late.high:
        if bound > MATTERS:
            return "undecided"
        far = abs(result.comparison.published_difference or 0) > bound
        agrees = "agrees: " if expected == 0 else "disagrees: " if expected and far else ""
        return f"{agrees}no difference larger than {bound:.3f}"
    sign = 1 if late.estimate > 0 else -1
    words = "better" if sign > 0 else "worse"
    if expected is None:
        return words
    return f"{'agrees' if sign == expected else 'disagrees'}: {words}"


def spread(arms: Mapping[str, Arm], results: Mapping[str, Result]) -> str:
    """The base arm, and how far seeds differ."""
    base = arms[BASE]
    late, start = (mean_over_seeds(list(values.values())) for values in (base.late, base.start))
    middle = median(result.late.sd for result in results.values() if result.late.sd > 0)
    return wrapped(
        f"The base arm goes from {start.estimate:.3f} to {late.estimate:.3f} [{late.low:.3f}, {late.high:.3f}] over "
        f"{late.n} seeds, whose late accuracies have a standard deviation of {late.sd:.3f}. The paired differences of "
        f"an arm from its base have one of {middle:.3f} (the median arm). The mean difference of such an arm over "
        f"{late.n} seeds is known within about {t_half_width(middle, late.n):.3f}."
    )


def t_half_width(sd: float, n: int) -> float:
    """Half of the 95% interval of a mean of n values with this standard deviation."""
    return float(scipy_stats().t.ppf(0.975, n - 1)) * sd / math.sqrt(n)


def overview(results: Mapping[str, Result]) -> str:
    """A line for every comparison that the project made too."""
    rows = [
        [ablation.title, one.label, one.published, interval(result.late), verdict(result)]
        for ablation in ABLATIONS
        for one in ablation.comparisons
        if one.published and (result := results.get(one.arm))
    ]
    header = ["Ablation", "Arm", "Published, one run each", "Here: late accuracy, less the base", "Verdict"]
    return f"### The published comparisons\n\n{markdown(header, rows)}"


def section(ablation: Ablation, arms: Mapping[str, Arm], results: Mapping[str, Result]) -> str:
    """An ablation: the published claim, and the lines of each base and of the arms compared with it."""
    shown = [one for one in ablation.comparisons if one.arm in results]
    rows: list[list[str]] = []
    for base in dict.fromkeys(one.base for one in shown):
        own = [one for one in shown if one.base == base]
        seeds = {seed for one in own for seed in arms[one.arm].late}
        rows.append([BASES[base], *measures(arms[base], seeds), "", "", ""])
        rows += [arm_row(one, arms[one.arm], results[one.arm]) for one in own]
    header = ["Arm", "Seeds", "Start", "Late", "Reward", "Entropy", "Tokens", "Late, difference"]
    header += ["Whole run, difference", "Verdict"]
    missing = [one.label for one in ablation.comparisons if one not in shown]
    note = f"\n\nNot run: {', '.join(missing)}." if missing else ""
    return f"### {ablation.title}\n\n{wrapped(ablation.claim)}\n\n{markdown(header, rows)}{note}"


def arm_row(one: Comparison, arm: Arm, result: Result) -> list[str]:
    """The line of an arm."""
    bold = "**" if result.p < LEVEL else ""
    cells = [f"{bold}{interval(result.late)}{bold}", interval(result.whole), verdict(result)]
    return [one.label, *measures(arm, arm.late), *cells]


def measures(arm: Arm, seeds: Collection[int]) -> list[str]:
    """The number of these seeds that the arm has, and its means over them: accuracies and further columns."""
    known = [seed for seed in arm.late if seed in seeds]
    accuracies = [f"{mean(values[seed] for seed in known):.3f}" for values in (arm.start, arm.late)]
    others = []
    for column, form in OTHERS.items():
        values = [arm.rows[seed][column] for seed in known if arm.rows[seed][column] is not None]
        others.append(form.format(mean(values)) if values else "")
    return [str(len(known)), *accuracies, *others]


def picture(results: Mapping[str, Result]) -> str:
    """The late difference of every arm with its interval, by ablation; one beyond the frame is an arrow."""
    lines = [(ablation, one) for ablation in ABLATIONS for one in ablation.comparisons if one.arm in results]
    with svg_canvas("ablations", (7.5, 0.21 * len(lines) + 0.6)) as (figure, text):
        axes = figure.subplots()
        for place, (ablation, one) in enumerate(lines):
            late = results[one.arm].late
            color = f"C{ABLATIONS.index(ablation)}"
            if abs(late.estimate) > FRAME:
                end = math.copysign(0.98 * FRAME, late.estimate)
                axes.plot(end, place, marker="<" if end < 0 else ">", color=color)
            else:
                axes.plot([late.low, late.high], [place, place], color=color)
                axes.plot(late.estimate, place, marker="o", markersize=4, color=color)
        axes.axvline(0, color="0.4", linewidth=0.8)
        tidy(axes)
        axes.set_xlim(-FRAME, FRAME)
        axes.set_yticks(range(len(lines)), [f"{ablation.title}: {one.label}" for ablation, one in lines])
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.set_xlabel("difference in late accuracy, 95% interval")
    return text.getvalue()


CHANGED = " (while files of this page were being written, none of the package)"


def provenance(tables: Mapping[str, SweepTable]) -> str:
    """The commits, the machine and the time of the runs."""
    headers = [table.header for table in tables.values()]
    commits = list(dict.fromkeys(one.split()[0][:10] for header in headers for one in header["commit"].split("; ")))
    changed = any("changed files" in header["commit"] for header in headers)
    rows = [row for table in tables.values() for row in table.rows if row["status"] == "done"]
    failed = sum(row["status"] == "failed" for table in tables.values() for row in table.rows)
    minutes = sum(row["seconds"] for row in rows) / 60
    seeds = ", ".join(f"{name}.csv seeds {table.header['seeds']}" for name, table in tables.items())
    return wrapped(
        f"Tables: {seeds}. {len(rows)} runs of {minutes:.0f} minutes in all without their SFT, one at a time beside "
        f"other work, and {failed} failed, at commits {', '.join(commits)}{CHANGED if changed else ''}, on "
        f"{headers[0]['hardware']}, torch {headers[0]['torch']}."
    )


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
