"""The results of a sweep: the tables of its runs and of their curves, computed from the files of the runs."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import flatpeak
from flatpeak.experiments.config import CurvesConfig, TableConfig, ThresholdConfig
from flatpeak.experiments.plan import PlannedRun, SweepPlan
from flatpeak.experiments.records import CellState, cell_state
from flatpeak.experiments.table import SweepTable, write_table
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.manifest import describe_start, read_starts
from flatpeak.runs.metrics import read_metrics
from flatpeak.utils.redaction import redact, redact_command

SECONDS_BETWEEN_TABLES = 30.0
Series = list[tuple[int, float | None]]
"""(step, value) in the order of the steps; None if the run logged a number that is not finite."""
STATISTICS = ("last", "best", "final", "auc")
"""The statistics of every metric, in the order of their columns."""
_EVALUATION = "eval/"


class TableWriter:
    """Writes table.csv, table.json and curves.csv, and reads every finished run only once."""

    def __init__(self, plan: SweepPlan, *, command: Sequence[str]) -> None:
        self.plan = plan
        self.command = list(command)
        self.path = plan.directory / "table.csv"
        self._series: dict[str, dict[str, Series]] = {}
        self._states: dict[str, CellState] = {}
        self._written = time.monotonic()

    def write_if_due(self) -> None:
        """Write the tables if the last ones are old enough."""
        if time.monotonic() - self._written >= SECONDS_BETWEEN_TABLES:
            self.write()

    def write(self) -> None:
        """Write all tables from the current state of the runs."""
        self._read()
        header = self._header()
        table = self._table(header)
        for path in (self.path, self.path.with_suffix(".json")):
            write_table(table, path)
        curves = self.path.with_name("curves.csv")
        if self.plan.config.curves is not None:
            write_table(self._curves(header), curves)
        else:
            curves.unlink(missing_ok=True)
        self._written = time.monotonic()

    def counts(self) -> Counter[str]:
        """The number of runs with each status, at the last write."""
        return Counter(state.status for state in self._states.values())

    def _read(self) -> None:
        for run in self.plan.runs:
            if run.label in self._series:
                continue
            self._states[run.label] = state = cell_state(run)
            if state.status == "done":
                self._series[run.label] = read_series(RunPaths(run.path).metrics)

    def _table(self, header: Mapping[str, str]) -> SweepTable:
        config = self.plan.config.table
        # Metrics with a threshold are included: an empty `.first` means never only if the run logged the metric.
        patterns = (*config.metrics, *config.first)
        names = chosen_names((name for series in self._series.values() for name in series), patterns)
        measured = [f"{name}.{statistic}" for name in names for statistic in STATISTICS]
        measured += [f"{name}.first" for name in config.first]
        columns = ("arm", *self.plan.columns, "seed", "status", "reason", "steps", "end", *measured, "seconds")
        rows = []
        for run in self.plan.runs:
            series = self._series.get(run.label)
            cells = run_measures(series, names, config) if series is not None else {}
            rows.append(dict.fromkeys(columns) | self._facts(run) | cells)
        return SweepTable(header=header, columns=columns, rows=tuple(rows))

    def _facts(self, run: PlannedRun) -> dict[str, Any]:
        state = self._states[run.label]
        summary = state.summary
        steps = summary.last_step if summary else None
        return {
            "arm": run.arm,
            **run.settings,
            "seed": run.seed,
            "status": state.status,
            "reason": state.reason if state.status == "failed" else None,
            "steps": steps,
            "end": (summary.ended_by or "steps") if summary and state.status == "done" else None,
            "seconds": summary.wall_seconds if summary and state.status == "done" else None,
        }

    def _curves(self, header: Mapping[str, str]) -> SweepTable:
        config = self.plan.config.curves
        assert config is not None
        names = chosen_names((name for series in self._series.values() for name in series), config.metrics)
        columns = ("arm", *self.plan.columns, "seed", "step", *names)
        rows = [
            dict.fromkeys(columns) | {"arm": run.arm, **run.settings, "seed": run.seed} | bin_
            for run in self.plan.runs
            for bin_ in curve_bins(self._series.get(run.label, {}), config)
        ]
        return SweepTable(header=header, columns=columns, rows=tuple(rows))

    def _header(self) -> dict[str, str]:
        """The facts of the runs' starts, each listed once per distinct value; of this process before the first run."""
        starts = [start for run in self.plan.runs for start in read_starts(RunPaths(run.path).manifest)]
        starts = starts or [describe_start(self.command)]
        config = self.plan.config
        facts = {
            "sweep": f"{config.name}, {len(self.plan.runs)} runs",
            "flatpeak": _distinct(start["versions"].get("flatpeak", flatpeak.__version__) for start in starts),
            "commit": _distinct(_commit(start["commit"]["flatpeak"]) for start in starts),
            "command": shlex.join(redact_command(self.command)),
            "hardware": _distinct(_hardware(start["hardware"]) for start in starts),
            "torch": _distinct(str(start["versions"].get("torch")) for start in starts),
            "seeds": _ranges(config.seeds),
        }
        redacted: dict[str, str] = redact(facts)
        return redacted


def _distinct(texts: Any) -> str:
    return "; ".join(sorted(set(texts)))


def _commit(commit: str | None) -> str:
    if commit is None:
        return "unknown (flatpeak is not in a git repository)"
    return f"{commit.removesuffix('-dirty')} ({'changed files' if commit.endswith('-dirty') else 'clean'})"


def _hardware(hardware: Mapping[str, Any]) -> str:
    gpus = ", ".join(hardware["cuda"]) or "no GPU"
    return f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB, {gpus}"


def _ranges(seeds: Sequence[int]) -> str:
    """Seeds as `100-119` or `1-3,7`."""
    texts: list[str] = []
    ordered = sorted(seeds)
    start = ordered[0]
    for seed, following in zip(ordered, [*ordered[1:], None], strict=True):
        if following != seed + 1:
            texts.append(f"{start}-{seed}" if seed > start else str(seed))
            start = following if following is not None else seed
    return ",".join(texts)


def read_series(path: Path) -> dict[str, Series]:
    """The metrics of RL in a metrics.jsonl, by name.

    Evaluations before RL's first step count as step 0: if a run has SFT, the evaluation at its end.
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
    """The names that match a pattern, by pattern and then alphabetically; a name without `*` even if absent.

    If no run has logged a name without `*`, its columns exist and are empty.
    """
    known = sorted(set(names))
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matching = [pattern] if pattern in known else [name for name in known if fnmatchcase(name, pattern)]
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
    """The mean of the values that are not missing; None if all are."""
    present = [value for value in values if value is not None]
    return math.fsum(present) / len(present) if present else None


def best_value(points: Series, best: Literal["max", "min"]) -> float | None:
    """The largest (or smallest) value; None without any."""
    present = [value for _, value in points if value is not None]
    return (max if best == "max" else min)(present) if present else None


def mean_by_area(points: Series) -> float | None:
    """The mean over steps by the trapezoidal rule: the area under the curve, divided by the steps that it covers.

    For a single value, that value. A straight line bridges steps without a value.
    """
    present = [(step, value) for step, value in points if value is not None]
    if len(present) < 2:
        return present[0][1] if present else None
    area = math.fsum((after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(present))
    return area / (present[-1][0] - present[0][0])


def first_step_past(points: Series, threshold: ThresholdConfig, *, consecutive: bool = True) -> int | None:
    """The first step at which the mean over the last `window` steps has passed the threshold; None if it never has.

    All of these steps must have a value. `consecutive` False counts only steps that log it, as for evaluations.
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

    Evaluations at step 0 have their own bin.
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
