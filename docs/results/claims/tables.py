"""Committed tables of the study of claims, and estimates of them as the page shows them."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from flatpeak.experiments.statistics import Difference, mean_over_seeds, paired_t
from flatpeak.experiments.table import SweepTable, read_table

HERE: Final = Path(__file__).resolve().parent


@cache
def rows_of(name: str) -> tuple[dict[str, Any], ...]:
    """The rows of a script's CSV file; numbers are floats."""
    with (HERE / f"{name}.csv").open(encoding="utf-8") as file:
        return tuple({key: number(text) for key, text in row.items()} for row in csv.DictReader(file))


@cache
def sweep(name: str) -> SweepTable:
    """The table of a sweep."""
    return read_table(HERE / f"{name}.csv")


def number(text: str) -> float | str:
    """A number where the text is one."""
    try:
        return float(text)
    except ValueError:
        return text


def where(name: str, column: str, **fixed: float | str) -> list[float]:
    """The values of a column in the rows that have the fixed values, in order."""
    return [row[column] for row in rows_of(name) if all(row[key] == value for key, value in fixed.items())]


def finals(arm: str, column: str, *, of: str = "arms") -> dict[int, float]:
    """A column of an arm in a sweep's table, by seed."""
    rows = [row for row in sweep(of).rows if row["arm"] == arm and row["status"] == "done"]
    return {row["seed"]: math.nan if row[column] is None else row[column] for row in rows}


@cache
def curves(arm: str) -> Mapping[int, Sequence[Mapping[str, Any]]]:
    """The rows of an arm's steps by seed, in order."""
    by_seed: dict[int, list[Mapping[str, Any]]] = {}
    for row in sweep("arms-curves").rows:
        if row["arm"] == arm:
            by_seed.setdefault(row["seed"], []).append(row)
    return by_seed


def steps(arm: str, metric: str) -> dict[int, list[float]]:
    """A metric by seed and step; NaN in a step without it."""
    return {
        seed: [math.nan if row[metric] is None else float(row[metric]) for row in rows]
        for seed, rows in curves(arm).items()
    }


def difference(arm: str, column: str, *, of: str) -> Difference:
    """An arm minus GRPO on shared seeds."""
    ours, theirs = finals(arm, column, of=of), finals("grpo", column, of=of)
    shared = sorted(ours.keys() & theirs.keys())
    return paired_t([ours[seed] for seed in shared], [theirs[seed] for seed in shared])


def signed(one: Difference) -> str:
    """A difference with its 95% interval."""
    return f"{one.estimate:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"


def mean(values: Sequence[float]) -> float:
    """The mean of the values that are there."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Mean with its 95% t interval over seeds; the mean alone where all are equal."""
    one = mean_over_seeds(list(values))
    if math.isnan(one.low):
        return f"{one.estimate:.{digits}f}"
    return f"{one.estimate:.{digits}f} [{one.low:.{digits}f}, {one.high:.{digits}f}]"
