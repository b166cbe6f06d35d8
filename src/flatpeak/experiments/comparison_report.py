"""A comparison as Markdown and JSON, and its files next to the table: comparison.md, comparison.json and plots."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from flatpeak.errors import UserError
from flatpeak.experiments.comparison import (
    FIRST,
    ArmRuns,
    Comparison,
    MetricOfArm,
    OutcomeOfArm,
    compare,
    metric_value,
    never_passed,
    settings_key,
)
from flatpeak.experiments.mcnemar import McNemar
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
from flatpeak.experiments.statistics import Difference, MeanEstimate
from flatpeak.experiments.table import SweepTable, read_table
from flatpeak.runs.files import write_atomic

TABLE: Final = "table.csv"
CURVES: Final = "curves.csv"
GOLD: Final = "reward/gold"
PROXIES: Final = ("reward/proxy", "reward/mean")
"""The reward that training optimizes: a part with that name, else the total."""
KL: Final = "rollout/kl_sequence"
MOST_ARMS: Final = 12
"""The most arms for plots with a panel per arm; larger tables, such as of tuning sweeps, have strips only."""
_MEANINGS: Final = {
    ".final": "mean of the final steps",
    ".last": "last value",
    ".best": "best value",
    ".auc": "mean over all steps",
    FIRST: "first step past the threshold",
}
_NOTES: Final = """\
Intervals are 95%: t of means and of paired differences, BCa bootstrap, Wilson of shares, Tango of differences in
shares. p is that of the paired t test, or of McNemar's exact test; Holm adjusts it for the arms of one table here.
"in sd" is the difference in the baseline's standard deviations between seeds, d_z in those of the paired differences.
"seeds" is for the observed difference at p < {alpha:g} and power {power:g}: to plan the next experiment, not to judge
this one."""


def table_path(path: Path) -> Path | None:
    """The table that a path stands for: the file itself, or the table.csv in a sweep's directory; else None."""
    if path.is_dir():
        return path / TABLE if (path / TABLE).is_file() else None
    return path if path.suffix in (".csv", ".json") else None


def write_comparison(
    path: Path,
    *,
    baseline: str | None = None,
    metrics: Sequence[str] = (),
    at_least: Mapping[str, float] | None = None,
    alpha: float = 0.05,
) -> Comparison:
    """Compare the arms of the table at `path`; write comparison.md, comparison.json and plots/ next to it."""
    table = read_table(path)
    comparison = compare(table, baseline=baseline, metrics=metrics, at_least=at_least, alpha=alpha)
    curves = path.with_name(CURVES)
    try:
        plots = draw_plots(comparison, read_table(curves) if curves.is_file() else None)
        (path.parent / "plots").mkdir(exist_ok=True)
        for name, svg in plots.items():
            write_atomic(path.parent / "plots" / name, svg)
        write_atomic(path.with_name("comparison.json"), to_json(comparison))
        images = "".join(f"\n![{Path(name).stem}](plots/{name})\n" for name in plots)
        if len(comparison.arms) > MOST_ARMS:
            images = f"\nWith more than {MOST_ARMS} arms there are strips only.\n{images}"
        write_atomic(path.with_name("comparison.md"), f"{to_markdown(comparison)}{images}")
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be written ({error}); copy the table to a folder of yours") from None
    return comparison


def to_json(comparison: Comparison) -> str:
    """The whole comparison as a JSON object; undefined numbers are null."""
    content = _plain(comparison)
    # The rows themselves are in the table.
    content["arms"] = [{"name": arm.name, "seeds": sorted(arm.done)} for arm in comparison.arms]
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def to_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown tables, one per metric and outcome, preceded by the unfinished runs."""
    sections = ["# Arms compared", _runs_line(comparison), *_unfinished_lines(comparison)]
    for column, arms in comparison.metrics.items():
        sections += [f"## {column}", _metric_table(arms, comparison)]
        never = {arm.arm: arm.never for arm in arms if arm.never}
        if never:
            listed = ", ".join(f"{name} {count}" for name, count in never.items())
            sections.append(f"Never, and so counted at their last step: {listed}.")
    for text, outcomes in comparison.outcomes.items():
        sections += [f"## {text}", _outcome_table(outcomes, comparison)]
    sections.append(_NOTES.format(alpha=comparison.alpha, power=comparison.power))
    return "\n\n".join(sections) + "\n"


def format_number(value: float) -> str:
    """Three significant digits; a dash for an undefined number."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def format_p(p: float) -> str:
    """Two significant digits, down to .0001."""
    if math.isnan(p):
        return "-"
    return "< 1e-4" if p < 1e-4 else f"{p:.2g}"


def _runs_line(comparison: Comparison) -> str:
    done = comparison.runs - len(comparison.unfinished)
    facts = [f"{done} of {comparison.runs} runs done", f"baseline {comparison.baseline}"]
    facts += [f"{key} {comparison.header[key]}" for key in ("sweep", "flatpeak", "commit") if key in comparison.header]
    return "; ".join(facts) + "."


def _unfinished_lines(comparison: Comparison) -> list[str]:
    if not comparison.unfinished:
        return []
    seeds: dict[tuple[str, str, str | None], list[str]] = {}
    for run in comparison.unfinished:
        seeds.setdefault((run.arm, run.status, run.reason), []).append(str(run.seed))
    lines = []
    for (arm, status, reason), own in seeds.items():
        word = "seed" if len(own) == 1 else "seeds"
        lines.append(f"- {arm}, {word} {', '.join(own)}: {status}" + (f" ({reason})" if reason else ""))
    paragraphs = ["Not done, and in no figure below:", "\n".join(lines)]
    name = comparison.baseline
    if not any(arm.done for arm in comparison.arms if arm.name == name):
        paragraphs.append(
            f"The baseline {name} has no finished run: no arm is compared with it; `--baseline ARM` takes another."
        )
    return paragraphs


def _metric_table(arms: Sequence[MetricOfArm], comparison: Comparison) -> str:
    minus = f"minus {comparison.baseline}"
    header = ["arm", "n", "mean", "sd", "pairs", minus, "BCa", "p", "p Holm", "in sd", "d_z", "seeds"]
    planned = {arm.name: arm.planned for arm in comparison.arms}
    rows = []
    for arm in arms:
        cells = [arm.arm, _of(arm.mean.n, planned[arm.arm]), _with_interval(arm.mean), format_number(arm.mean.sd)]
        difference, bootstrap = arm.difference, arm.bootstrap
        if difference is not None:
            cells += [
                str(difference.n) if difference.paired else "none (Welch)",
                _with_interval(difference),
                "-" if bootstrap is None else _interval(bootstrap.low, bootstrap.high),
                format_p(difference.p),
                format_p(arm.p_holm),
                format_number(difference.effect),
                format_number(difference.d_z),
                "-" if arm.seeds_needed is None else str(arm.seeds_needed),
            ]
        rows.append(cells)
    return markdown_table(header, rows)


def _outcome_table(arms: Sequence[OutcomeOfArm], comparison: Comparison) -> str:
    baseline = comparison.baseline
    header = ["arm", "yes", "share", "pairs", "only here", f"only {baseline}", f"minus {baseline}"]
    header += ["p", "p Holm", "seeds"]
    planned = {arm.name: arm.planned for arm in comparison.arms}
    rows = []
    for arm in arms:
        share = arm.yes / arm.n if arm.n else math.nan
        cells = [arm.arm, f"{arm.yes} of {_of(arm.n, planned[arm.arm])}"]
        cells.append(f"{format_number(share)} {_interval(arm.low, arm.high)}")
        test = arm.mcnemar
        if test is not None:
            cells += [str(test.n), str(test.only_a), str(test.only_baseline), _with_interval(test)]
            cells += [format_p(test.p), format_p(arm.p_holm)]
            cells.append("-" if arm.seeds_needed is None else str(arm.seeds_needed))
        rows.append(cells)
    return markdown_table(header, rows)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are also aligned as plain text; cells that a row lacks are empty."""
    whole = [[*row, *[""] * (len(header) - len(row))] for row in (header, *rows)]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in whole]
    widths = [max(len(row[index]) for row in escaped) for index in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in escaped
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _of(n: int, planned: int) -> str:
    return str(n) if n == planned else f"{n} ({planned - n} missing)"


def _with_interval(value: MeanEstimate | Difference | McNemar) -> str:
    return f"{format_number(value.estimate)} {_interval(value.low, value.high)}"


def _interval(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"[{format_number(low)}, {format_number(high)}]"


def _plain(value: Any) -> Any:
    """Dataclasses as mappings of their fields and properties, for JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw_plots(comparison: Comparison, curves: SweepTable | None) -> dict[str, str]:
    """Draw every plot for which there is data; SVG texts by file name."""
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
    # Only finished runs have curves, so names from them alone might need fewer settings than those of the table.
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
    # At the steps at which runs that went on have the metric: evaluations are at some steps only.
    steps: dict[str, set[int]] = {metric: set() for metric in metrics}
    for arm, own in runs.items():
        for seed, run in own.items():
            for metric, series in run.items() if (arm, seed) not in ended_early else ():
                steps[metric] |= series.keys()
    for arm, seed in ended_early:
        for metric, series in runs.get(arm, {}).get(seed, {}).items():
            hold_last(series, steps=sorted(steps[metric]))
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
    """Continue a series with its last value, for a run that ended early by a condition.

    Otherwise the mean over seeds would cover only the remaining runs: late in training, those that never met the
    condition.
    """
    if series:
        last = max(series)
        series |= dict.fromkeys((step for step in steps if step > last), series[last])


def _values(arm: ArmRuns, column: str) -> dict[int, float | None]:
    return {seed: metric_value(row, column) for seed, row in sorted(arm.done.items())}


def _ends(arm: ArmRuns, column: str) -> list[tuple[int, bool]]:
    """(step, whether the threshold was passed there) for every run that logged the metric and its steps."""
    ends = [
        (row.get("steps") if never_passed(row, column) else row[column], not never_passed(row, column))
        for _, row in sorted(arm.done.items())
    ]
    return [(int(step), passed) for step, passed in ends if step is not None]


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
    """Parts of file names for the columns, with a number if they would equal an earlier one."""
    slugs: dict[str, str] = {}
    for column in columns:
        slug = plain = re.sub(r"[^\w.=-]+", "-", column)
        count = 1
        while slug in slugs.values():
            count += 1
            slug = f"{plain}-{count}"
        slugs[column] = slug
    return slugs
