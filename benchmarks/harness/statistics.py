"""From rounds to figures: medians with their spread, and ratios beside what is wanted of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Round = dict[str, float]
Verdict = Literal["aim reached", "must reached", "below must", "**loses**"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure, and the smallest and largest that single rounds gave."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is wanted of a ratio of flatpeak's figure to another's."""

    must: float
    aim: float
    lower: bool = False
    """Whether less is better: time and memory, not speed."""

    def verdict(self, ratio: float) -> Verdict:
        """In the words of the tables; a ratio on the wrong side of 1 loses, whatever was wanted."""
        sign = -1 if self.lower else 1
        if sign * ratio >= sign * self.aim:
            return "aim reached"
        if sign * ratio < sign:
            return "**loses**"
        return "must reached" if sign * ratio >= sign * self.must else "below must"


def spread(values: Sequence[float]) -> Spread:
    """The median of the rounds and their range."""
    return Spread(middle=median(values), low=min(values), high=max(values))


def rates(rounds: Sequence[Round], per: str) -> list[float]:
    """Tokens per second of each round; `per` is cpu or wall."""
    return [found["tokens"] / found[per] for found in rounds]


def column(rounds: Sequence[Round], name: str) -> list[float]:
    """One figure of each round."""
    return [found[name] for found in rounds]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The ratio of the medians; its range is that of the ratios within one round, as far as both have rounds."""
    within = [a / b for a, b in zip(ours, theirs, strict=False)]
    return Spread(middle=median(ours) / median(theirs), low=min(within), high=max(within))


def first_reaching(rounds: Sequence[Round], goal: float) -> Round | None:
    """The first round whose accuracy is at least `goal`."""
    return next((found for found in rounds if found["accuracy"] >= goal), None)
