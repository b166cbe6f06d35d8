"""The comparison of a sweep's arms with a baseline: means, paired differences and shares over seeds, from its table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from flatpeak.errors import UserError, nearest
from flatpeak.experiments.mcnemar import McNemar, mcnemar_exact, seeds_needed_mcnemar
from flatpeak.experiments.statistics import (
    Difference,
    MeanEstimate,
    holm,
    mean_over_seeds,
    paired_bca,
    paired_t,
    seeds_needed,
    welch,
)
from flatpeak.experiments.table import SweepTable

Row = Mapping[str, Any]
FIRST: Final = ".first"
"""The end of columns with the first step past a threshold; empty if the run never passed it."""
FINAL: Final = ".final"
_FACTS: Final = frozenset({"arm", "seed", "status", "reason", "steps", "end", "seconds"})
"""Columns that are neither settings nor metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedRun:
    """A run without results: failed, stopped or missing."""

    arm: str
    seed: int
    status: str
    reason: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRuns:
    """The runs of one arm by seed."""

    name: str
    done: Mapping[int, Row]
    unfinished: tuple[UnfinishedRun, ...]

    @property
    def planned(self) -> int:
        """The number of rows in the table, finished or not."""
        return len(self.done) + len(self.unfinished)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricOfArm:
    """One metric of an arm: its mean over seeds and the difference from the baseline."""

    arm: str
    mean: MeanEstimate
    never: int
    """Runs that never passed the threshold of a `.first` column; their value is their last step."""
    difference: Difference | None
    """By paired t on the shared seeds, or by Welch's t if no seed is shared; None for the baseline."""
    bootstrap: Difference | None
    """The BCa interval of the paired difference; None if no seed is shared."""
    p_holm: float = math.nan
    """Adjusted for the arms of this metric."""
    seeds_needed: int | None
    """For the observed paired difference, at the comparison's level and power; None if it cannot be computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeOfArm:
    """One outcome of an arm: the share of runs with a yes, and McNemar's test against the baseline."""

    arm: str
    yes: int
    n: int
    left_out: int
    """Runs without a value."""
    low: float
    high: float
    """Wilson's 95% interval of the share."""
    mcnemar: McNemar | None
    """On the shared seeds; None for the baseline and if no seed is shared."""
    p_holm: float = math.nan
    seeds_needed: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Every arm of a table compared with the baseline."""

    baseline: str
    header: Mapping[str, str]
    """Version, commit and command of the runs, from the table."""
    runs: int
    alpha: float
    power: float
    arms: tuple[ArmRuns, ...]
    metrics: Mapping[str, tuple[MetricOfArm, ...]]
    """By column, arms in the order of the table."""
    outcomes: Mapping[str, tuple[OutcomeOfArm, ...]]
    """By description, such as `reward/exploit.final >= 0.5`."""

    @property
    def unfinished(self) -> tuple[UnfinishedRun, ...]:
        """The runs that are left out of all statistics."""
        return tuple(run for arm in self.arms for run in arm.unfinished)


def compare(
    table: SweepTable,
    *,
    baseline: str | None = None,
    metrics: Sequence[str] = (),
    at_least: Mapping[str, float] | None = None,
    alpha: float = 0.05,
    power: float = 0.9,
) -> Comparison:
    """Compare every arm of the table with the baseline, by default the table's first arm.

    `metrics` are columns, patterns with `*`, or names of metrics, which mean their `.final`; by default all `.final`
    and `.first` columns. `at_least` adds outcomes: whether a column is at least a value. Columns of true and false are
    outcomes, and so is whether a `.first` column has a step. An arm with several settings counts as several arms.
    """
    arms = read_arms(table)
    names = [arm.name for arm in arms]
    chosen = names[0] if baseline is None else baseline
    if chosen not in names:
        values = [name for name in names if name.startswith(f"{chosen},")]
        if values:
            raise UserError(f"baseline {chosen!r} has several values, each an arm: choose one of {', '.join(values)}")
        raise UserError(f"baseline {chosen!r} is not an arm of the table, which has {', '.join(names)}")
    if not (0 < alpha < 1 and 0 < power < 1):
        raise UserError(f"alpha={alpha}, power={power}: give shares between 0 and 1, such as 0.05 and 0.9")
    done = [row for arm in arms for row in arm.done.values()]
    columns = metric_columns(table, done, metrics)
    reference = arms[names.index(chosen)]
    return Comparison(
        baseline=chosen,
        header=table.header,
        runs=len(table.rows),
        alpha=alpha,
        power=power,
        arms=tuple(arms),
        metrics={
            column: _compare_metric(column, arms, reference, alpha=alpha, power=power)
            for column in columns
            if not _is_boolean(column, done)
        },
        outcomes={
            str(outcome): _compare_outcome(outcome, arms, reference, alpha=alpha, power=power)
            for outcome in _outcomes(columns, done, at_least or {}, table.columns)
        },
    )


def read_arms(table: SweepTable) -> list[ArmRuns]:
    """The arms of a table in its order; an arm with several settings becomes several, named `arm,key=value`."""
    for column in ("arm", "seed"):
        if column not in table.columns:
            raise UserError(f"the table has no column {column!r}: give the table.csv of a sweep")
    if not table.rows:
        raise UserError("the table has no rows: run the sweep first")
    names = arm_names(table)
    rows: dict[str, list[Row]] = {}
    for name, row in zip(names, table.rows, strict=True):
        rows.setdefault(name, []).append(row)
    arms = []
    for name, own in rows.items():
        seeds = [row["seed"] for row in own]
        odd = [seed for seed in seeds if type(seed) is not int]
        if odd:
            raise UserError(f"arm {name} has a row of seed {odd[0]!r}: give every row its seed as a whole number")
        twice = [seed for seed in seeds if seeds.count(seed) > 1]
        if twice:
            raise UserError(f"arm {name} has {seeds.count(twice[0])} rows of seed {twice[0]}: leave one in the table")
        # A table without the column contains only finished runs.
        done = {row["seed"]: row for row in own if row.get("status", "done") == "done"}
        unfinished = tuple(
            UnfinishedRun(arm=name, seed=row["seed"], status=str(row["status"]), reason=row.get("reason"))
            for row in own
            if row["seed"] not in done
        )
        arms.append(ArmRuns(name=name, done=done, unfinished=unfinished))
    return arms


def arm_names(table: SweepTable) -> list[str]:
    """The name of each row's arm, with the settings that distinguish it from other arms of that name."""
    variants: dict[str, dict[tuple[str, ...], None]] = {}
    for row in table.rows:
        variants.setdefault(row["arm"], {})[settings_key(table, row)] = None
    keys = _settings(table)
    needed = {arm: _distinguishing(list(combinations)) for arm, combinations in variants.items()}
    names = []
    for row in table.rows:
        own = [keys[index] for index in needed[row["arm"]]]
        ends = [key.rpartition(".")[2] for key in own]
        short = {key: end if ends.count(end) == 1 else key for key, end in zip(own, ends, strict=True)}
        names.append(",".join([str(row["arm"]), *(f"{short[key]}={row[key]}" for key in own)]))
    return names


def settings_key(table: SweepTable, row: Row) -> tuple[str, ...]:
    """The settings of a row, which together with the arm's name identify its arm."""
    return tuple(repr(row[key]) for key in _settings(table))


def _settings(table: SweepTable) -> tuple[str, ...]:
    return table.columns[table.columns.index("arm") + 1 : table.columns.index("seed")]


def _distinguishing(combinations: Sequence[tuple[str, ...]]) -> list[int]:
    """The positions that distinguish the combinations, without those that add nothing to earlier ones."""
    chosen: list[int] = []
    distinct = 1
    for index in range(len(combinations[0])):
        split = len({tuple(one[place] for place in (*chosen, index)) for one in combinations})
        if split > distinct:
            chosen, distinct = [*chosen, index], split
    return chosen


def metric_columns(table: SweepTable, rows: Sequence[Row], patterns: Sequence[str] = ()) -> list[str]:
    """The columns of metrics that the patterns choose; without patterns, `.final` and `.first`."""
    start = table.columns.index("seed") + 1
    known = [column for column in table.columns[start:] if column not in _FACTS]
    if not patterns:
        ends = [column for column in known if column.endswith((FINAL, FIRST))] or known
        return [
            column
            for column in ends
            if column.endswith(FIRST) or any(isinstance(row[column], int | float) for row in rows)
        ]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matching = [pattern] if pattern in known else [column for column in known if fnmatchcase(column, pattern)]
        matching = matching or [column for column in known if fnmatchcase(column, pattern + FINAL)]
        if not matching:
            raise UserError(_unknown_metric(pattern, known))
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def never_passed(row: Row, column: str) -> bool:
    """Whether a run logged the metric of a `.first` column and never passed its threshold."""
    # The best value is missing only if the run never logged the metric.
    return (
        column.endswith(FIRST) and row[column] is None and row.get(f"{column.removesuffix(FIRST)}.best", 0) is not None
    )


def metric_value(row: Row, column: str) -> float | None:
    """The value of a finished run, None if it is missing; the last step of a run that never passed a threshold.

    Missing too if another condition ended such a run early, since it might have passed the threshold at any later step.
    """
    if never_passed(row, column):
        return row.get("steps") if row.get("end") in (None, "steps") else None
    value = row[column]
    if isinstance(value, str | list | Mapping):
        raise UserError(f"column {column} has {value!r}: choose a column of numbers by --metric")
    return None if value is None or math.isnan(value) else float(value)


def _compare_metric(
    column: str, arms: Sequence[ArmRuns], reference: ArmRuns, *, alpha: float, power: float
) -> tuple[MetricOfArm, ...]:
    values = {arm.name: {seed: metric_value(row, column) for seed, row in arm.done.items()} for arm in arms}
    baseline = values[reference.name]
    results = []
    for arm in arms:
        own = values[arm.name]
        shared = sorted(own.keys() & baseline.keys())
        difference = bootstrap = needed = None
        if arm is not reference and shared:
            pair = [own[seed] for seed in shared], [baseline[seed] for seed in shared]
            difference, bootstrap = paired_t(*pair), paired_bca(*pair)
        elif arm is not reference and own and baseline:
            difference = welch(list(own.values()), list(baseline.values()))
        if difference is not None and difference.sd > 0 and difference.estimate:
            needed = seeds_needed(sd=difference.sd, difference=difference.estimate, alpha=alpha, power=power)
        results.append(
            MetricOfArm(
                arm=arm.name,
                mean=mean_over_seeds(list(own.values())),
                never=sum(never_passed(row, column) for row in arm.done.values()),
                difference=difference,
                bootstrap=bootstrap,
                seeds_needed=needed,
            )
        )
    adjusted = _holm([result.difference for result in results])
    return tuple(replace(result, p_holm=p) for result, p in zip(results, adjusted, strict=True))


def _holm(tests: Sequence[Difference | McNemar | None]) -> list[float]:
    """The adjusted p-value of each test; NaN without a test."""
    planned = [test for test in tests if test is not None]
    return holm([math.nan if test is None else test.p for test in tests], hypotheses=len(planned))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A yes-or-no question about every finished run."""

    column: str
    at_least: float | None = None
    """The value from which the answer is yes; None for columns of true and false, and for `.first` (any step)."""

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"{self.column} >= {self.at_least:g}"
        return f"{self.column} reached" if self.column.endswith(FIRST) else self.column

    def of(self, row: Row) -> bool | None:
        """The answer for one run; None if its value is missing."""
        value = row[self.column]
        if self.at_least is not None:
            number = metric_value(row, self.column)
            return None if number is None else number >= self.at_least
        if self.column.endswith(FIRST):
            if never_passed(row, self.column):
                return False
            return None if value is None else True
        return None if value is None else bool(value)


def _outcomes(
    columns: Sequence[str], rows: Sequence[Row], at_least: Mapping[str, float], known: Sequence[str]
) -> list[Outcome]:
    outcomes = [Outcome(column=column) for column in columns if column.endswith(FIRST) or _is_boolean(column, rows)]
    for name, threshold in at_least.items():
        column = name if name in known else name + FINAL
        if column not in known:
            raise UserError(_unknown_metric(name, known))
        outcomes.append(Outcome(column=column, at_least=threshold))
    return outcomes


def _unknown_metric(name: str, known: Sequence[str]) -> str:
    ends = [column for column in known if column.removesuffix(FINAL).endswith(f"/{name}") and column.endswith(FINAL)]
    near = ends or nearest(name, known)
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?"
        if near
        else "give a column, or a pattern such as " + repr("reward/*.final")
    )
    return f"no metric {name!r} in the table: {hint}"


def _is_boolean(column: str, rows: Sequence[Row]) -> bool:
    values = [row[column] for row in rows if row[column] is not None]
    return bool(values) and all(isinstance(value, bool) for value in values)


def _compare_outcome(
    outcome: Outcome, arms: Sequence[ArmRuns], reference: ArmRuns, *, alpha: float, power: float
) -> tuple[OutcomeOfArm, ...]:
    from flatpeak.functional.estimators import wilson_interval  # imported here because its package loads torch

    values = {arm.name: {seed: outcome.of(row) for seed, row in arm.done.items()} for arm in arms}
    baseline = values[reference.name]
    results = []
    for arm in arms:
        own = values[arm.name]
        shared = sorted(own.keys() & baseline.keys())
        test = needed = None
        if arm is not reference and shared:
            test = mcnemar_exact([own[seed] for seed in shared], [baseline[seed] for seed in shared])
        if test is not None and test.only_a + test.only_baseline:
            shares = {"only_a": test.only_a / test.n, "only_baseline": test.only_baseline / test.n}
            needed = seeds_needed_mcnemar(**shares, alpha=alpha, power=power)
        known = [value for value in own.values() if value is not None]
        low, high = wilson_interval(sum(known), len(known)) if known else (math.nan, math.nan)
        results.append(
            OutcomeOfArm(
                arm=arm.name,
                yes=sum(known),
                n=len(known),
                left_out=len(own) - len(known),
                low=low,
                high=high,
                mcnemar=test,
                seeds_needed=needed,
            )
        )
    adjusted = _holm([result.mcnemar for result in results])
    return tuple(replace(result, p_holm=p) for result, p in zip(results, adjusted, strict=True))
