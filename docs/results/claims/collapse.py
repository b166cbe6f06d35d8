"""Early signs of a collapse: the first step at which a metric leaves the range of all steps of healthy runs."""

from __future__ import annotations

import math
from typing import Final

from tables import mean, steps

SIGNS: Final = {
    "rollout/kl_reference": "KL",
    "policy/grad_norm": "gradient norm",
    "policy/entropy": "entropy",
    "rollout/length_mean": "length",
    "groups/informative_fraction": "informative groups",
}
HEALTHY: Final = "grpo"
TESTED: Final = "high_rate"
STEPS: Final = 30
"""Steps of the tested arm; healthy runs count as far."""
COLLAPSED: Final = 0.5
"""A run has collapsed where the mean reward of three steps is below this share of its first one."""


def collapses() -> dict[int, int]:
    """The step of the collapse, by the seeds that have one."""
    collapsed = {}
    for seed, rewards in steps(TESTED, "reward/mean").items():
        lows = [n for n in range(3, len(rewards) + 1) if mean(rewards[n - 3 : n]) < COLLAPSED * rewards[0]]
        if lows:
            collapsed[seed] = lows[0]
    return collapsed


def healthy_range(metric: str) -> tuple[float, float]:
    """The least and the largest value of a metric in any step of any healthy run."""
    values = [value for run in steps(HEALTHY, metric).values() for value in run[:STEPS] if not math.isnan(value)]
    return min(values), max(values)


def onsets(seed: int) -> dict[str, int]:
    """The first step at which each sign is out of range, for the signs that are at some step."""
    first = {}
    for metric in SIGNS:
        low, high = healthy_range(metric)
        values = steps(TESTED, metric)[seed]
        outside = [n for n, value in enumerate(values, 1) if value < low or value > high]
        if outside:
            first[metric] = outside[0]
    return first


def leads(sign: str) -> list[float]:
    """The steps from a sign's onset to the collapse, negative where it comes after, of the seeds that collapse."""
    return [float(end - first[sign]) for seed, end in collapses().items() if sign in (first := onsets(seed))]
