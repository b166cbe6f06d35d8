"""The plots of a comparison: a strip and paired dots per metric, survival per threshold, curves from curves.csv."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from flatpeak.errors import UserError
from flatpeak.experiments.comparison import FIRST, ArmRuns, Comparison, metric_value, never_passed, settings_key
from flatpeak.experiments.plots import (
    ArmStyle,
    PairedValues,
    arm_styles,
    curves_with_bands,
    gold_against_kl,
    paired_dots,
    strip,
    survival,
)
from flatpeak.experiments.table import SweepTable

GOLD: Final = "reward/gold"
PROXIES: Final = ("reward/proxy", "reward/mean")
"""The reward that training pays for: a part of that name, else the total."""
KL: Final = "rollout/kl_sequence"
MOST_ARMS: Final = 12
"""Arms in the plots that have a panel for each; a table of more, such as that of a tuning sweep, has strips only."""
_MEANINGS: Final = {
    ".final": "mean of the final steps",
    ".last": "last value",
    ".best": "best value",
    ".auc": "mean over all steps",
    FIRST: "first step past the threshold",
}


def draw_plots(comparison: Comparison, curves: SweepTable | None) -> dict[str, str]:
    """Draw every plot that the data has; SVG texts by file name."""
    styles = arm_styles([arm.name for arm in comparison.arms], baseline=comparison.baseline)
    drawn: dict[str, str] = {}
    slugs = _slugs(comparison.metrics)
    for column in comparison.metrics:
        values = {arm.name: _values(arm, column) for arm in comparison.arms}
        known = {arm: [value for value in own.values() if value is not None] for arm, own in values.items()}
        if any(known.values()):
            drawn[f"strip_{slugs[column]}.svg"] = strip(known, styles=styles, label=axis_label(column))
        if len(comparison.arms) > MOST_ARMS:
            continue
        pairs = _pairs(comparison, column, values)
        if pairs:
            drawn[f"paired_{slugs[column]}.svg"] = paired_dots(
                pairs, styles=styles, baseline=comparison.baseline, label=axis_label(column)
            )
        if column.endswith(FIRST) and any(known.values()):
            drawn[f"survival_{slugs[column]}.svg"] = survival(
                {arm.name: _ends(arm, column) for arm in comparison.arms if _ends(arm, column)},
                styles=styles,
                baseline=comparison.baseline,
                label=f"share of runs not past the threshold of {column.removesuffix(FIRST)}",
            )
    if curves is None or len(comparison.arms) > MOST_ARMS:
        return drawn
    return drawn | _draw_curves(curves, comparison, styles)


def axis_label(column: str) -> str:
    """The metric and its statistic in words."""
    for end, meaning in _MEANINGS.items():
        if column.endswith(end):
            return f"{column.removesuffix(end)}, {meaning}"
    return column


def _draw_curves(curves: SweepTable, comparison: Comparison, styles: dict[str, ArmStyle]) -> dict[str, str]:
    baseline = comparison.baseline
    # Only finished runs have curves: named by themselves, their arms might need fewer settings than those of the table.
    names = {(row["arm"], settings_key(curves, row)): arm.name for arm in comparison.arms for row in arm.done.values()}
    ended_early = {
        (arm.name, seed)
        for arm in comparison.arms
        for seed, row in arm.done.items()
        if row.get("end") not in (None, "steps")
    }
    metrics = curves.columns[curves.columns.index("step") + 1 :]
    runs: dict[str, dict[Any, dict[str, dict[int, float]]]] = {}
    for row in curves.rows:
        arm = names.get((row["arm"], settings_key(curves, row)))
        if arm is None:
            raise UserError(
                f"curves.csv has runs of arm {row['arm']} that table.csv lacks: write both again by flatpeak sweep"
            )
        run = runs.setdefault(arm, {}).setdefault(row["seed"], {metric: {} for metric in metrics})
        for metric in metrics:
            if row[metric] is not None:
                run[metric][row["step"]] = row[metric]
    steps = sorted({row["step"] for row in curves.rows})
    for arm, seed in ended_early:
        for series in runs.get(arm, {}).get(seed, {}).values():
            hold_last(series, steps=steps)
    ordered = {arm: list(runs[arm].values()) for arm in styles if arm in runs}
    drawn = {}
    slugs = _slugs(metrics)
    for metric in metrics:
        by_arm = {arm: [run[metric] for run in own if run[metric]] for arm, own in ordered.items()}
        by_arm = {arm: own for arm, own in by_arm.items() if own}
        if by_arm:
            drawn[f"curve_{slugs[metric]}.svg"] = curves_with_bands(
                by_arm, styles=styles, baseline=baseline, label=metric
            )
    proxy = next((name for name in PROXIES if name in metrics), None)
    if proxy is not None and {GOLD, KL} <= set(metrics):
        measured = {arm: [run for run in own if run[KL] and run[GOLD]] for arm, own in ordered.items()}
        measured = {arm: own for arm, own in measured.items() if own}
        if measured:
            drawn["gold_against_kl.svg"] = gold_against_kl(
                measured, styles=styles, baseline=baseline, gold=GOLD, proxy=proxy, kl=KL
            )
    return drawn


def hold_last(series: dict[int, float], *, steps: Sequence[int]) -> None:
    """Continue a series with its last value, as that of a run which a condition ended.

    Without it the mean over seeds would be that of the runs which are left: late in training, of those that never met
    the condition.
    """
    if series:
        last = max(series)
        series |= dict.fromkeys((step for step in steps if step > last), series[last])


def _values(arm: ArmRuns, column: str) -> dict[int, float | None]:
    return {seed: metric_value(row, column) for seed, row in sorted(arm.done.items())}


def _ends(arm: ArmRuns, column: str) -> list[tuple[int, bool]]:
    """(step, whether the threshold was passed there) of every run that logged the metric and its steps."""
    values = _values(arm, column)
    return [
        (int(value), not never_passed(arm.done[seed], column)) for seed, value in values.items() if value is not None
    ]


def _pairs(comparison: Comparison, column: str, values: dict[str, dict[int, float | None]]) -> dict[str, PairedValues]:
    pairs = {}
    baseline = values[comparison.baseline]
    for arm in comparison.metrics[column]:
        if arm.difference is None or not arm.difference.paired or not arm.difference.n:
            continue
        complete = [
            (before, after)
            for seed, after in values[arm.arm].items()
            if after is not None and (before := baseline.get(seed)) is not None
        ]
        pairs[arm.arm] = PairedValues(
            baseline=[before for before, _ in complete],
            arm=[after for _, after in complete],
            difference=arm.difference,
        )
    return pairs


def _slugs(columns: Iterable[str]) -> dict[str, str]:
    """Parts of file names for the columns, a number behind those that would be equal to an earlier one."""
    slugs: dict[str, str] = {}
    for column in columns:
        slug = plain = re.sub(r"[^\w.=-]+", "-", column)
        count = 1
        while slug in slugs.values():
            count += 1
            slug = f"{plain}-{count}"
        slugs[column] = slug
    return slugs
