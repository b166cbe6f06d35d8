"""Sharpness where the proxy reward is equal: the fall under weight noise as a run first reaches a level of reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from flatpeak.experiments.table import SweepTable

CLEAN = "sharpness/clean"
FALL = "sharpness/relative_fall_0.6"
LEVELS = (0.7, 0.8, 0.9, 1.2, 1.5, 1.8)
"""Proxy rewards: an answer without a cheat has 1 at most, a cheat with the right letters 2.2."""


def falls_at_levels(curves: SweepTable) -> dict[str, dict[float, dict[int, float]]]:
    """By arm and level, the fall of every seed that reached it."""
    clean, fall = (next(name for name in curves.columns if name.endswith(ending)) for ending in (CLEAN, FALL))
    runs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in sorted(curves.rows, key=lambda row: row["step"]):
        if row[clean] is not None and row[fall] is not None:
            runs.setdefault((row["arm"], row["seed"]), []).append((row[clean], row[fall]))
    falls: dict[str, dict[float, dict[int, float]]] = {}
    for (arm, seed), points in runs.items():
        for level in LEVELS:
            value = at_level(points, level)
            if value is not None:
                falls.setdefault(arm, {}).setdefault(level, {})[seed] = value
    return falls


def at_level(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """The fall at the first crossing of the level from below, linear between evaluations; None where there is none."""
    for (below, before), (above, after) in pairwise(points):
        if below < level <= above:
            return before + (level - below) / (above - below) * (after - before)
    return None


def paired_differences(
    falls: Mapping[str, Mapping[float, Mapping[int, float]]], arm: str, baseline: str, level: float
) -> list[float]:
    """The arm's fall less the baseline's at a level, over the seeds in which both reached it."""
    a, b = (falls.get(name, {}).get(level, {}) for name in (arm, baseline))
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
