"""The results of a sweep: the tables of its runs and of their curves, from the files that the runs have left."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flatpeak
from flatpeak.experiments.measures import STATISTICS, Series, chosen_names, curve_bins, read_series, run_measures
from flatpeak.experiments.plan import PlannedRun, SweepPlan
from flatpeak.experiments.records import CellState, cell_state
from flatpeak.experiments.table import SweepTable, write_table
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.manifest import describe_start, read_starts
from flatpeak.utils.redaction import redact, redact_command

SECONDS_BETWEEN_TABLES = 30.0


class TableWriter:
    """A writer of table.csv, table.json and curves.csv, which reads every finished run once."""

    def __init__(self, plan: SweepPlan, *, command: Sequence[str], notice: Callable[[str], None]) -> None:
        self.plan = plan
        self.command = list(command)
        self.path = plan.directory / "table.csv"
        self._notice = notice
        self._series: dict[str, dict[str, Series]] = {}
        self._states: dict[str, CellState] = {}
        self._written = time.monotonic()

    def write_if_due(self) -> None:
        """Write the tables where the last ones are old enough."""
        if time.monotonic() - self._written >= SECONDS_BETWEEN_TABLES:
            self.write()

    def write(self) -> None:
        """Write all tables from the present state of the runs."""
        self._read()
        header = self._header()
        table = self._table(header)
        for path in (self.path, self.path.with_suffix(".json")):
            write_table(table, path)
        if self.plan.config.curves is not None:
            write_table(self._curves(header), self.path.with_name("curves.csv"))
        self._written = time.monotonic()

    def counts(self) -> Counter[str]:
        """The number of runs of each status, at the last write."""
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
        # Metrics with a threshold are there too: an empty `.first` means never only where the run logged the metric.
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
        """The facts of the runs' starts, each listed as often as it differs; of this process before the first run."""
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
