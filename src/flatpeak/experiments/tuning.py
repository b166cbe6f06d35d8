"""The choice of each arm's axes from the table of an earlier sweep, over seeds that this sweep does not report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatpeak.errors import UserError
from flatpeak.experiments.config import TunedOnConfig
from flatpeak.experiments.table import SweepTable, read_table


@dataclass(frozen=True, kw_only=True)
class TunedValues:
    """The values chosen for an arm's axes, and the evidence for them."""

    axes: Mapping[str, Any]
    mean: float
    """The mean of the metric over the tuning seeds."""
    seeds: tuple[int, ...]
    candidates: int
    """The number of combinations of values compared."""


def read_tuning(config: TunedOnConfig, seeds: Sequence[int]) -> SweepTable:
    """The table to tune on. Raises UserError if it lacks the metric, or shares a seed with this sweep."""
    table = read_table(config.table)
    for column in ("arm", "seed", config.metric):
        table.column(column)  # raises if it is missing, with the nearest name
    shared = sorted(set(seeds) & set(table.column("seed")))
    if shared:
        raise UserError(
            f"tuned_on: seed {shared[0]} is in {config.table} too, and values chosen on a seed cannot be reported on "
            "it: give the sweep other seeds"
        )
    return table


def best_values(
    config: TunedOnConfig, table: SweepTable, arm: str, candidates: Sequence[Mapping[str, Any]]
) -> TunedValues:
    """The candidate with the best mean over the table's seeds; the first of equal ones.

    Raises UserError if a candidate has no rows, if one of its runs is not done, or if candidates were run with
    different seeds.
    """
    scored = [_mean(config, table, arm, axes) for axes in candidates]
    if len({seeds for _, seeds in scored}) > 1:
        raise UserError(
            f"tuned_on: the values of arm {arm} were run with different seeds in {config.table}: finish that sweep"
        )
    sign = 1 if config.best == "max" else -1
    index = max(range(len(candidates)), key=lambda number: sign * scored[number][0])
    mean, seeds = scored[index]
    return TunedValues(axes=candidates[index], mean=mean, seeds=seeds, candidates=len(candidates))


def _mean(config: TunedOnConfig, table: SweepTable, arm: str, axes: Mapping[str, Any]) -> tuple[float, tuple[int, ...]]:
    """The mean of the metric over the runs of one combination, and their seeds."""
    values = ", ".join(f"{key}={value}" for key, value in axes.items())
    unknown = [key for key in axes if key not in table.columns]
    rows = [
        row
        for row in table.rows
        if row["arm"] == arm and not unknown and all(_equal(row[key], value) for key, value in axes.items())
    ]
    if not rows:
        raise UserError(
            f"tuned_on: {config.table} has no run of arm {arm} with {values}: add it to the tuning sweep and run that, "
            "or leave the value out here"
        )
    for row in rows:
        value = row[config.metric]
        usable = isinstance(value, int | float) and math.isfinite(value)
        # A table without the column contains only finished runs.
        status = row.get("status", "done")
        if status != "done" or not usable:
            problem = f"is {status}" if status != "done" else f"has no {config.metric}"
            raise UserError(
                f"tuned_on: the run of arm {arm} with {values}, seed {row['seed']}, {problem} in {config.table}: "
                f"run the tuning sweep again until {Path(config.table).name} is whole"
            )
    seeds = [row["seed"] for row in rows]
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise UserError(
            f"tuned_on: {config.table} has {seeds.count(twice)} runs of arm {arm} with {values}, seed {twice}, which "
            "differ in settings that are no axes here: give these as axes too, or tune on a table without them"
        )
    mean = math.fsum(row[config.metric] for row in rows) / len(rows)
    return mean, tuple(sorted(seeds))


def _equal(cell: Any, value: Any) -> bool:
    if isinstance(cell, bool) != isinstance(value, bool):
        return False
    return bool((list(value) if isinstance(value, tuple) else value) == cell)
