"""Numbers of one run for a table: the last, best and final values of its metrics, areas, and steps past thresholds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Literal

from flatpeak.experiments.config import CurvesConfig, TableConfig, ThresholdConfig
from flatpeak.runs.metrics import read_metrics

Series = list[tuple[int, float | None]]
"""(step, value) in the order of the steps; None where the run logged a number that is not finite."""
STATISTICS = ("last", "best", "final", "auc")
"""The statistics of every metric, in the order of their columns."""
_EVALUATION = "eval/"


def read_series(path: Path) -> dict[str, Series]:
    """The metrics of RL in a metrics.jsonl, by name.

    Evaluations before RL's first step count as step 0: where a run has SFT, that at its end.
    """
    series: dict[str, Series] = {}
    began = False
    for row in read_metrics(path):
        if row["stage"] == "train":
            began = True
        elif row["stage"] != "eval":
            continue
        step = row["step"] if began else 0
        for name, value in row.items():
            if name in ("step", "stage") or isinstance(value, str):
                continue
            points = series.setdefault(name, [])
            if points and points[-1][0] == step:
                points.pop()
            points.append((step, None if value is None else float(value)))
    return series


def chosen_names(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match a pattern: in the order of the patterns, then of the alphabet; a plain name even if absent.

    A name without `*` that no run has logged keeps its columns, which are empty.
    """
    known = sorted(set(names))
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matching = [name for name in known if fnmatchcase(name, pattern)]
        chosen |= dict.fromkeys(matching or ([] if "*" in pattern else [pattern]))
    return list(chosen)


def run_measures(series: Mapping[str, Series], names: Sequence[str], config: TableConfig) -> dict[str, float | None]:
    """The cells of one run: `NAME.last`, `.best`, `.final` and `.auc` of every name, `.first` of each threshold."""
    last_step = max((points[-1][0] for name, points in series.items() if not name.startswith(_EVALUATION)), default=0)
    cells: dict[str, float | None] = {}
    for name in names:
        points = series.get(name, [])
        cells[f"{name}.last"] = points[-1][1] if points else None
        cells[f"{name}.best"] = best_value(points, config.best.get(name, "max"))
        since = last_step - config.window
        cells[f"{name}.final"] = (
            cells[f"{name}.last"]
            if name.startswith(_EVALUATION)
            else mean_value(value for step, value in points if step > since)
        )
        cells[f"{name}.auc"] = mean_by_area(points)
    for name, threshold in config.first.items():
        cells[f"{name}.first"] = first_step_past(
            series.get(name, []), threshold, consecutive=not name.startswith(_EVALUATION)
        )
    return cells


def mean_value(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are there; None without any."""
    present = [value for value in values if value is not None]
    return math.fsum(present) / len(present) if present else None


def best_value(points: Series, best: Literal["max", "min"]) -> float | None:
    """The largest (or smallest) value; None without any."""
    present = [value for _, value in points if value is not None]
    return (max if best == "max" else min)(present) if present else None


def mean_by_area(points: Series) -> float | None:
    """The mean over steps by the trapezoidal rule: the area under the curve over the steps that it covers.

    Of a single value that value; steps without one are bridged by a straight line.
    """
    present = [(step, value) for step, value in points if value is not None]
    if len(present) < 2:
        return present[0][1] if present else None
    area = math.fsum((after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(present))
    return area / (present[-1][0] - present[0][0])


def first_step_past(points: Series, threshold: ThresholdConfig, *, consecutive: bool = True) -> int | None:
    """The first step at which the mean over the last `window` steps has passed the threshold; None where it never has.

    All of them must have a value. `consecutive` False counts only the steps that log it, as of evaluations.
    """
    window = threshold.window
    for end in range(window, len(points) + 1):
        inside = points[end - window : end]
        values = [value for _, value in inside if value is not None]
        if len(values) < window or (consecutive and inside[-1][0] - inside[0][0] != window - 1):
            continue
        mean = math.fsum(values) / window
        if (threshold.above is not None and mean > threshold.above) or (
            threshold.below is not None and mean < threshold.below
        ):
            return points[end - 1][0]
    return None


def curve_bins(series: Mapping[str, Series], config: CurvesConfig) -> list[dict[str, float | int | None]]:
    """Rows of means over bins of `every` steps (1 to every, and so on), named by the bin's last step.

    Evaluations of step 0 are a bin of their own.
    """
    names = chosen_names(series, config.metrics)
    every = config.every
    binned: dict[int, dict[str, list[float | None]]] = {}
    for name in names:
        for step, value in series.get(name, []):
            binned.setdefault(-(-step // every) * every, {}).setdefault(name, []).append(value)
    return [
        {"step": end, **{name: mean_value(values.get(name, [])) for name in names}}
        for end, values in sorted(binned.items())
    ]
