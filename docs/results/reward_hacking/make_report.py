"""Regenerate the tables and figures of docs/results/reward_hacking.md from the committed tables of its sweeps.

    python docs/results/reward_hacking/make_report.py [--check] [--figures BED ...]

`--check` fails where a committed page or figure is not what the tables give.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatpeak.experiments.comparison import compare
from flatpeak.experiments.comparison_report import draw_plots
from flatpeak.experiments.statistics import mean_over_seeds
from flatpeak.experiments.table import SweepTable, read_table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from hypotheses import (  # noqa: E402
    Estimate,
    Registered,
    Runs,
    Verdict,
    registered,
    registered_again,
    runs_of,
    verdicts,
)
from matched_sharpness import LEVELS, falls_at_levels, paired_differences  # noqa: E402

PAGE = HERE.parent / "reward_hacking.md"
BEGIN, END = "<!-- study:begin -->", "<!-- study:end -->"
BEDS = ("sharp", "flat", "learned", "dose-0.01", "dose-0.04", "dose-0.06", "large", "addition")
TUNING = ("tuning", "large-tuning", "addition-tuning")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something would change")
    parser.add_argument("--figures", nargs="*", default=BEDS, help="draw the figures of these beds alone")
    given = parser.parse_args()
    check: bool = given.check
    names = (*TUNING, *BEDS, "matched")
    tables = {name: read_table(HERE / f"{name}.csv") for name in names if (HERE / f"{name}.csv").is_file()}
    files: dict[Path, str] = {}
    content = [provenance(tables), *(tuning_table(name, tables[name]) for name in TUNING if name in tables)]
    content += ["### Hypotheses", hypothesis_table(registered(tables)), hypothesis_table(registered_again(tables))]
    for bed in BEDS:
        if bed in tables:
            content.append(arm_table(bed, tables[bed]))
            figures = bed_figures(bed, tables[bed]) if bed in given.figures else {}
            files |= {HERE / name: svg for name, svg in figures.items()}
            shown = figures or [name for one in FIGURES if (HERE / (name := f"{bed}-{one}")).is_file()]
            content += [f"![{name.removesuffix('.svg')}](reward_hacking/{name})" for name in shown]
    matched = HERE / "matched-curves.csv"
    content.append(matched_section(read_table(matched)) if matched.is_file() else "")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    files[PAGE] = f"{before}{BEGIN}\n\n" + "\n\n".join(part for part in content if part) + f"\n\n{END}{after}"
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(("stale: " if check else "written: ") + path.relative_to(HERE.parents[2]).as_posix())
        if not check:
            path.write_text(files[path], encoding="utf-8")
    return int(check and bool(stale))


def provenance(tables: Mapping[str, SweepTable]) -> str:
    """The commit and command behind each table."""
    rows = [
        [
            f"[{name}.csv](reward_hacking/{name}.csv)",
            f"`{table.header['command']}`",
            table.header["commit"].split()[0][:10],
        ]
        for name, table in tables.items()
    ]
    return "### Tables\n\n" + markdown(["Table", "Command", "Commit"], rows)


def tuning_table(name: str, table: SweepTable) -> str:
    """The mean final gold of every strength that was tried."""
    axes = [name for name in table.columns if name in AXES]
    golds: dict[tuple[str, str], list[float]] = {}
    for row in table.rows:
        value = next((text for name in axes if (text := AXES[name](row, row["arm"])) is not None), "")
        if row["status"] == "done":
            golds.setdefault((row["arm"], value), []).append(row["reward/gold.final"])
    best = {arm: max((mean(v), value) for (a, value), v in golds.items() if a == arm)[1] for arm, _ in golds}
    rows: list[list[str]] = []
    for arm in dict.fromkeys(arm for arm, _ in golds):
        tried = [(value, own) for (tuned, value), own in golds.items() if tuned == arm]
        cells = [f"{'**' if value == best[arm] else ''}{value}: {mean(own):.3f}{'**' if value == best[arm] else ''}"
                 for value, own in tried]  # fmt: skip
        rows.append([arm, *cells])
    seeds = sorted({row["seed"] for row in table.rows})
    title = f"### {name}\n\nMean final gold over seeds {seeds[0]} to {seeds[-1]}; the chosen strength in bold."
    return f"{title}\n\n" + markdown(["Arm", *(f"Strength {i}" for i in range(1, 5))], rows)


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
    if estimate is None:
        return [one.name, one.claim, "-", "-", "-", "-", "-", verdict]
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


def arm_table(bed: str, table: SweepTable) -> str:
    """Every arm of a bed: hacked seeds, and means over seeds with 95% t intervals."""
    arms = list(dict.fromkeys(row["arm"] for row in table.rows))
    rows = [arm_row(arm, runs) for arm in arms if (runs := runs_of(table, arm)) is not None]
    unfinished = [f"{row['arm']} seed {row['seed']}" for row in table.rows if row["status"] != "done"]
    note = f"\n\nNot finished: {', '.join(unfinished)}." if unfinished else ""
    header = ["Arm", "Seeds", "Hacked", "Final gold", "Step of hacking", *(title for title, _ in MEASURED)]
    measured = [index for index in range(len(header)) if any(row[index] for row in rows)]
    table_of = [[row[index] for index in measured] for row in [header, *rows]]
    return f"### {bed}\n\n" + markdown(table_of[0], table_of[1:]) + note


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


MEASURED = (
    ("Gold, held-out prompts", "gold_held_out.last"),
    ("Gold, perturbed prompts", "gold_perturbed.last"),
    ("KL, nat per answer", "rollout/kl_sequence.final"),
    ("Proxy lost under noise", "sharpness/relative_fall_0.6.last"),
    ("s per step", "time/step.auc"),
    ("GiB", "memory/peak_gib.last"),
)
"""Further columns of an arm's row: a title, and how the table's column ends."""


def arm_row(arm: str, runs: Runs) -> list[str]:
    """One arm's row."""
    hacked = list(runs.hacked().values())
    steps = list(runs.step_of_hacking().values())
    further = [interval(column_values(runs, ending)) for _, ending in MEASURED]
    return [arm, str(len(hacked)), str(sum(hacked)), interval(list(runs.gold().values())), interval(steps), *further]


def column_values(runs: Runs, ending: str) -> list[float]:
    """The values of the column whose name ends like this, of all runs that have it."""
    names = [name for name in next(iter(runs.rows.values())) if name.endswith(ending)]
    return [row[name] for name in names[:1] for row in runs.rows.values() if row[name] is not None]


def bed_figures(bed: str, table: SweepTable) -> dict[str, str]:
    """The figures of a bed that the page shows, by file name."""
    curves = HERE / f"{bed}-curves.csv"
    columns = [name for name in ("reward/gold.final", "reward/exploit.first") if name in table.columns]
    drawn = draw_plots(
        compare(table, metrics=columns, baseline="none"), read_table(curves) if curves.is_file() else None
    )
    by_slug = {name.lower().replace("_", "-"): svg for name, svg in drawn.items()}
    wanted = {name: by_slug.get(name.lower().replace("_", "-")) for name in FIGURES}
    return {f"{bed}-{name}": svg for name, svg in wanted.items() if svg is not None}


def interval(values: Sequence[float]) -> str:
    """Mean and half of its 95% t interval; empty without values."""
    if not values:
        return ""
    one = mean_over_seeds(list(values))
    half = one.high - one.estimate
    return f"{one.estimate:.3g}" if math.isnan(half) else f"{one.estimate:.3g} ± {half:.2g}"


def mean(values: Sequence[float]) -> float:
    """The mean of some values."""
    return sum(values) / len(values)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
