"""Medians with their ranges, ratios, and verdicts on ratios and their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Measurement = dict[str, float]
Verdict = Literal["aim reached", "must reached", "below must", "**loses**"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median, with the smallest and largest measurement."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Target:
    """The required ratio of flatpeak's number to another's."""

    must: float
    aim: float
    lower: bool = False
    """Whether less is better, as for time and memory."""

    def verdict(self, ratio: float) -> Verdict:
        """The verdict on a ratio, as in the tables; a ratio on the wrong side of 1 loses, whatever its target."""
        sign = -1 if self.lower else 1
        if sign * ratio >= sign * self.aim:
            return "aim reached"
        if sign * ratio < sign:
            return "**loses**"
        return "must reached" if sign * ratio >= sign * self.must else "below must"

    def verdict_on_share(self, share: float) -> Verdict:
        """The verdict on a share of a whole, which does not lose by being below 1."""
        if share >= self.aim:
            return "aim reached"
        return "must reached" if share >= self.must else "below must"


def spread(values: Sequence[float]) -> Spread:
    """Compute the median and the range."""
    return Spread(middle=median(values), low=min(values), high=max(values))


def rates(measurements: Sequence[Measurement], per: str) -> list[float]:
    """Tokens per second of each measurement; `per` is cpu or wall."""
    return [measured["tokens"] / measured[per] for measured in measurements]


def column(measurements: Sequence[Measurement], name: str) -> list[float]:
    """One named number of each measurement."""
    return [measured[name] for measured in measurements]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The ratio of the medians; its range is of the ratios within a round, for rounds with both."""
    within = [a / b for a, b in zip(ours, theirs, strict=False)]
    return Spread(middle=median(ours) / median(theirs), low=min(within), high=max(within))


def first_reaching(measurements: Sequence[Measurement], goal: float) -> Measurement | None:
    """The first measurement whose accuracy is at least `goal`."""
    return next((measured for measured in measurements if measured["accuracy"] >= goal), None)
