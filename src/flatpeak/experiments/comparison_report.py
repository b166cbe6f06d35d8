"""A comparison as Markdown and JSON, and its files beside the table: comparison.md, comparison.json and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from flatpeak.errors import UserError
from flatpeak.experiments.comparison import Comparison, MetricOfArm, OutcomeOfArm, compare
from flatpeak.experiments.statistics import Difference, MeanEstimate
from flatpeak.experiments.table import read_table
from flatpeak.runs.files import write_atomic

TABLE: Final = "table.csv"
CURVES: Final = "curves.csv"
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
    """Compare the arms of the table at `path`; write comparison.md, comparison.json and plots/ beside it."""
    from flatpeak.experiments.comparison_plots import MOST_ARMS, draw_plots

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
    """The whole comparison as a JSON object; numbers that do not exist are null."""
    content = _plain(comparison)
    # The rows themselves are in the table.
    content["arms"] = [{"name": arm.name, "seeds": sorted(arm.done)} for arm in comparison.arms]
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def to_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown tables, one per metric and outcome, after the runs that none of them contains."""
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
    """Three significant digits; a dash for a number that does not exist."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def format_p(p: float) -> str:
    """Two significant digits, down to .0001."""
    return "-" if math.isnan(p) else "< 1e-4" if p < 1e-4 else f"{p:.2g}"


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
    lines = [
        f"- {arm}, seed{'s' * (len(own) > 1)} {', '.join(own)}: {status}" + (f" ({reason})" if reason else "")
        for (arm, status, reason), own in seeds.items()
    ]
    return ["Not done, and in no figure below:", "\n".join(lines), *_lost_baseline(comparison)]


def _lost_baseline(comparison: Comparison) -> list[str]:
    name = comparison.baseline
    if any(arm.done for arm in comparison.arms if arm.name == name):
        return []
    return [f"The baseline {name} has no finished run: no arm is compared with it; `--baseline ARM` takes another."]


def _metric_table(arms: Sequence[MetricOfArm], comparison: Comparison) -> str:
    minus = f"minus {comparison.baseline}"
    header = ["arm", "n", "mean", "sd", "pairs", minus, "BCa", "p", "p Holm", "in sd", "d_z", "seeds"]
    planned = {arm.name: arm.planned for arm in comparison.arms}
    rows = []
    for arm in arms:
        cells = [arm.arm, _of(arm.mean.n, planned[arm.arm]), _with_interval(arm.mean), format_number(arm.mean.sd)]
        difference = arm.difference
        if difference is None:
            rows.append(cells + [""] * (len(header) - len(cells)))
            continue
        bootstrap = arm.bootstrap
        rows.append(
            [
                *cells,
                str(difference.n) if difference.paired else "none (Welch)",
                _with_interval(difference),
                "-" if bootstrap is None else _interval(bootstrap.low, bootstrap.high),
                format_p(difference.p),
                format_p(arm.p_holm),
                format_number(difference.effect),
                format_number(difference.d_z),
                "-" if arm.seeds_needed is None else str(arm.seeds_needed),
            ]
        )
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
        if test is None:
            rows.append(cells + [""] * (len(header) - len(cells)))
            continue
        difference = f"{format_number(test.estimate)} {_interval(test.low, test.high)}"
        counts = [str(test.n), str(test.only_a), str(test.only_baseline), difference]
        needed = "-" if arm.seeds_needed is None else str(arm.seeds_needed)
        rows.append([*cells, *counts, format_p(test.p), format_p(arm.p_holm), needed])
    return markdown_table(header, rows)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned also as plain text."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[index]) for row in escaped) for index in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in escaped
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _of(n: int, planned: int) -> str:
    return str(n) if n == planned else f"{n} ({planned - n} missing)"


def _with_interval(value: MeanEstimate | Difference) -> str:
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
