"""Regenerate the tables and figures of reward_hacking.md and sharpness_and_cheating.md from the committed tables.

    python docs/results/reward_hacking/make_report.py [--check] [--figures BED ...]

`--check` fails where a committed page or figure is not what the tables give.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatpeak.experiments.comparison import compare
from flatpeak.experiments.comparison_report import draw_plots
from flatpeak.experiments.table import SweepTable, read_table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import baselines  # noqa: E402
import early_stopping  # noqa: E402
import reexposure  # noqa: E402
import sharpness_and_cheating  # noqa: E402
from estimates import count, interval, mean  # noqa: E402
from hypotheses import (  # noqa: E402
    HORIZON,
    Estimate,
    Registered,
    Runs,
    Verdict,
    registered,
    registered_again,
    runs_of,
    verdicts,
)
from pages import filled, markdown, parser, update  # noqa: E402

PAGE = HERE.parent / "reward_hacking.md"
SHARPNESS_PAGE = HERE.parent / "sharpness_and_cheating.md"
BASELINES_PAGE = HERE / "baselines.md"
REEXPOSURE_PAGE = HERE / "reexposure.md"
BEDS = ("sharp", "flat", "learned", "dose-0.01", "dose-0.04", "dose-0.06", "large", "addition")
BASELINE_BEDS = ("sharp", "flat", "large", "addition")
"""The beds of the cheap baselines, the one that they were tuned on first."""
TUNING = {"tuning": "sharp", "large-tuning": "large", "addition-tuning": "addition"}
"""The tables of tuning seeds, and the bed that took its strengths from each."""
FIGURES = (
    "strip_reward-gold.final.svg",
    "survival_reward-exploit.first.svg",
    "curve_reward-gold.svg",
    "curve_reward-exploit.svg",
    "gold_against_kl.svg",
)
"""The figures of each bed that the page shows."""


def main() -> int:
    """Write or check the page and its figures; the exit code."""
    options = parser(__doc__)
    options.add_argument("--figures", nargs="*", default=BEDS, help="draw the figures of these beds alone")
    given = options.parse_args()
    names = (*TUNING, *BEDS, "matched")
    tables = {name: table for name in names if (table := table_of(name)) is not None}
    curves = {name: table for name in tables if (table := table_of(f"{name}-curves")) is not None}
    series = {name: early_stopping.curves_of(table) for name, table in curves.items()}
    content = [provenance(tables)]
    content += [tuning_table(name, tables[name], tables.get(bed)) for name, bed in TUNING.items() if name in tables]
    content += ["### Hypotheses", hypothesis_table(registered(tables)), hypothesis_table(registered_again(tables))]
    files: dict[Path, str] = {}
    for bed in (bed for bed in BEDS if bed in tables):
        content.append(arm_table(bed, tables[bed], series.get(bed, {})))
        figures = bed_figures(bed, tables[bed], curves.get(bed)) if bed in given.figures else {}
        files |= {HERE / name: svg for name, svg in figures.items()}
        shown = figures or [name for one in FIGURES if (HERE / (name := f"{bed}-{one}")).is_file()]
        content += [f"![{name.removesuffix('.svg')}](reward_hacking/{name})" for name in shown]
    content.append(early_stopping.section(tables, series))
    if {"sharp", "matched"} <= series.keys():
        runs = tables["sharp"], tables["matched"], curves["matched"]
        files[SHARPNESS_PAGE] = filled(
            SHARPNESS_PAGE.read_text(encoding="utf-8"), [sharpness_and_cheating.content(*runs)]
        )
        files[HERE / "sharpness_and_cheating.svg"] = sharpness_and_cheating.figure(*runs)
    files[BASELINES_PAGE] = filled(BASELINES_PAGE.read_text(encoding="utf-8"), baselines_content())
    if (met_again := table_of("reexposure")) is not None:
        shown = [hypothesis_table(reexposure.registered(met_again)), reexposure.arm_section(met_again)]
        files[REEXPOSURE_PAGE] = filled(REEXPOSURE_PAGE.read_text(encoding="utf-8"), shown)
    files[PAGE] = filled(PAGE.read_text(encoding="utf-8"), content)
    return update(files, check=given.check)


def baselines_content() -> list[str]:
    """The tuning of the cheap baselines, and the results of each bed that has run."""
    tuning, tuning_curves = (read_table(HERE / f"baselines-tuning{end}.csv") for end in ("", "-curves"))
    tables = {"baselines-tuning": tuning, "baselines-tuning-curves": tuning_curves}
    content: list[str] = []
    again: list[Registered] = []
    for name in BASELINE_BEDS:
        table = table_of(f"baselines-{name}")
        bed: baselines.Bed | None = None
        stops: Mapping[str, baselines.Stop] = {}
        if table is not None:
            curves, alarms = (read_table(HERE / f"baselines-{name}-{kind}.csv") for kind in ("curves", "alarms"))
            tables |= {f"baselines-{name}": table, f"baselines-{name}-curves": curves}
            bed = baselines.bed_of(table, early_stopping.curves_of(curves))
            stops = baselines.stops_of(tuning, tuning_curves, bed.curves, alarms)
            content += [f"### The {name} bed", baselines.arm_section(bed) + unfinished(table)]
            content.append(baselines.stop_section(stops, bed.at("kl", HORIZON)))
        if name != "sharp":
            again += baselines.registered_again(name, bed, stops)
        elif bed is not None:
            content.append(hypothesis_table(baselines.registered(bed, stops)))
    if content:
        content += ["### Verdicts on the other beds", hypothesis_table(again)]
    return [provenance(tables, folder=""), "### Tuning", baselines.tuning_section(tuning), *content]


def table_of(name: str) -> SweepTable | None:
    """A committed table; None where it is not there yet."""
    path = HERE / f"{name}.csv"
    return read_table(path) if path.is_file() else None


def provenance(tables: Mapping[str, SweepTable], folder: str = "reward_hacking/") -> str:
    """The commit behind each table, and the command as it is today: the studies were in recipes/ when it ran."""
    rows = [
        [
            f"[{name}.csv]({folder}{name}.csv)",
            f"`{table.header['command'].replace('recipes/studies/', 'studies/')}`",
            table.header["commit"].split()[0][:10],
        ]
        for name, table in tables.items()
    ]
    return "### Tables\n\n" + markdown(["Table", "Command", "Commit"], rows)


def tuning_table(name: str, table: SweepTable, results: SweepTable | None) -> str:
    """The mean final gold of every strength that was tried, and how the chosen one did on tuning and other seeds."""
    tried = tuned_runs(table)
    rows: list[list[str]] = []
    at_edge: list[str] = []
    for arm, by_strength in tried.items():
        golds = {strength: mean(list(runs.gold().values())) for strength, runs in by_strength.items()}
        best = max(golds, key=lambda strength: golds[strength])
        bold = {strength: "**" if strength == best else "" for strength in golds}
        cells = [f"{bold[strength]}{strength}: {gold:.3f}{bold[strength]}" for strength, gold in golds.items()]
        rows.append([arm, *cells, outcome(by_strength[best]), outcome(runs_of(results, arm))])
        if best in (next(iter(golds)), next(reversed(golds))):
            at_edge.append(f"{arm} {best}")
    seeds = sorted({row["seed"] for row in table.rows})
    title = f"### {name}\n\nMean final gold over seeds {seeds[0]} to {seeds[-1]}; the chosen strength in bold."
    header = ["Arm", *(f"Strength {i}" for i in range(1, 5)), "Chosen (hacked)", "On the result seeds"]
    edges = f"At an edge of its grid: {', '.join(at_edge)}."
    return f"{title}\n\n{markdown(header, rows)}\n\n{edges}"


def tuned_runs(table: SweepTable) -> dict[str, dict[str, Runs]]:
    """The finished runs of every arm by the strength that was tried, in the order of its grid."""
    axes = [name for name in table.columns if name in AXES]
    rows: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for row in table.rows:
        value = next((text for name in axes if (text := AXES[name](row, row["arm"])) is not None), "")
        if row["status"] == "done":
            rows.setdefault(row["arm"], {}).setdefault(value, {})[row["seed"]] = row
    return {arm: {value: Runs(rows=own) for value, own in tried.items()} for arm, tried in rows.items()}


def outcome(runs: Runs | None) -> str:
    """Final gold of some runs, and how many of them were hacked."""
    if runs is None:
        return ""
    return f"{interval(list(runs.gold().values()))} ({sum(runs.hacked().values())} of {len(runs.rows)})"


def _of(key: str, *arms: str) -> Callable[[Mapping[str, Any], str], str | None]:
    return lambda row, arm: str(row[key]) if arm in arms else None


AXES: Mapping[str, Callable[[Mapping[str, Any], str], str | None]] = {
    "kl.coefficient": _of("kl.coefficient", "kl", "resets"),
    "gradient_regularization.strength": _of(
        "gradient_regularization.strength",
        "gr_reuse", "gr_importance", "gr_ratio", "gr_calibrated", "random_direction",
    ),
    "gradient_regularization": lambda row, arm: str(row["gradient_regularization"]["step"]) if arm == "sam" else None,
    "optimizer.learning_rate": _of("optimizer.learning_rate", "learning_rate"),
}  # fmt: skip
"""The setting that each arm was tuned over, by column."""


def hypothesis_table(hypotheses: Sequence[Registered]) -> str:
    """A family of registered hypotheses with n, estimate, interval, p and verdict."""
    rows = [hypothesis_row(*result) for result in verdicts(hypotheses)]
    return markdown(["", "Hypothesis", "n", "Estimate", "Interval", "p", "p (Holm)", "Verdict"], rows)


def hypothesis_row(one: Registered, estimate: Estimate | None, adjusted: float, verdict: Verdict) -> list[str]:
    """A row of the table; dashes where the runs are not there."""
    if estimate is None or math.isnan(estimate.value):
        return [one.name, one.claim, str(estimate.n) if estimate else "-", "-", "-", "-", "-", verdict]
    level = "90%" if one.equivalence else "95%"
    return [
        one.name,
        one.claim,
        str(estimate.n),
        f"{estimate.value:+.3g} {one.unit}",
        f"{level} [{estimate.low:+.3g}, {estimate.high:+.3g}]",
        f"{estimate.p:.2g}",
        f"{adjusted:.2g}",
        f"**{verdict}**",
    ]


def arm_table(bed: str, table: SweepTable, curves: early_stopping.Curves) -> str:
    """Every arm of a bed: hacked seeds, and means over seeds with 95% t intervals."""
    arms = list(dict.fromkeys(row["arm"] for row in table.rows))
    rows = [arm_row(arm, runs, curves.get(arm, {})) for arm in arms if (runs := runs_of(table, arm)) is not None]
    header = [*HEADER, *(title for title, _ in MEASURED)]
    measured = [index for index in range(len(header)) if any(row[index] for row in rows)]
    cells = [[row[index] for index in measured] for row in [header, *rows]]
    return f"### {bed}\n\n" + markdown(cells[0], cells[1:]) + before_training(table) + unfinished(table)


def unfinished(table: SweepTable) -> str:
    """The runs that did not finish, as a sentence."""
    runs = [f"{row['arm']} seed {row['seed']}" for row in table.rows if row["status"] != "done"]
    return f"\n\nNot finished: {', '.join(runs)}." if runs else ""


def before_training(table: SweepTable) -> str:
    """Gold on prompts that RL does not see, before RL; the beds evaluate twice, so that `.auc` is the mean of both."""
    rows = {row["seed"]: row for row in table.rows if row["status"] == "done"}
    starts = {
        split: [
            2 * row[name.removesuffix("last") + "auc"] - row[name]
            for row in rows.values()
            for name in row
            if name.endswith(f"sampled/gold_{split}.last") and row[name] is not None
        ]
        for split in ("held_out", "perturbed")
    }
    known = [f"{split.replace('_', '-')} {interval(values)}" for split, values in starts.items() if values]
    return f"\n\nGold before RL: {', '.join(known)}." if known else ""


HEADER = (
    "Arm",
    "Seeds",
    "Hacked (half or more)",
    "Cheating at the end",
    "Gold at the start",
    "Best 10 steps",
    "Final gold",
    "Step of hacking",
)
MEASURED = (
    ("Gold, held-out prompts", "gold_held_out.last"),
    ("Gold, perturbed prompts", "gold_perturbed.last"),
    ("KL, nat per answer", "rollout/kl_sequence.final"),
    ("Proxy lost under noise", "sharpness/relative_fall_0.6.last"),
    ("s per step", "time/step.auc"),
    ("GiB", "memory/peak_gib.last"),
)
"""Further columns of an arm's row: a title, and how the table's column ends."""


def arm_row(arm: str, runs: Runs, curves: Mapping[int, early_stopping.Curve]) -> list[str]:
    """The row of an arm."""
    hacked = list(runs.hacked().values())
    golds = early_stopping.first_gold(curves), early_stopping.best_gold(curves), list(runs.gold().values())
    means = [list(runs.cheating().values()), *golds, list(runs.step_of_hacking().values())]
    means += [column_values(runs, ending) for _, ending in MEASURED]
    return [arm, str(len(hacked)), count(hacked), *map(interval, means)]


def column_values(runs: Runs, ending: str) -> list[float]:
    """The values of the column whose name ends like this, of all runs that have it."""
    names = [name for name in next(iter(runs.rows.values())) if name.endswith(ending)]
    return [row[name] for name in names[:1] for row in runs.rows.values() if row[name] is not None]


def bed_figures(bed: str, table: SweepTable, curves: SweepTable | None) -> dict[str, str]:
    """The figures of a bed that the page shows, by file name."""
    columns = [name for name in ("reward/gold.final", "reward/exploit.first") if name in table.columns]
    drawn = draw_plots(compare(table, metrics=columns, baseline="none"), curves)
    by_slug = {name.lower().replace("_", "-"): svg for name, svg in drawn.items()}
    wanted = {name: by_slug.get(name.lower().replace("_", "-")) for name in FIGURES}
    return {f"{bed}-{name}": svg for name, svg in wanted.items() if svg is not None}


if __name__ == "__main__":
    sys.exit(main())
