"""How sure a figure is: the interval of a mean over questions, and the method it comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flatpeak.functional.estimators import bootstrap_interval, wilson_interval

Method = Literal["wilson", "bootstrap"]
COUNTS = frozenset({"length", "sampled/length"})
"""Metrics that may happen to be 0 or 1 everywhere without being shares of anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A metric's mean over the questions that have it."""

    mean: float
    """NaN where no question has it."""
    questions: int
    """How many questions the mean is of."""
    interval: tuple[float, float] | None
    """At 95%; None for fewer than two questions."""
    method: Method | None
    """`wilson` where every value is 0 or 1, `bootstrap` (of questions) elsewhere."""


def figure(values: Sequence[float | None], *, metric: str) -> Figure:
    """The figure of one metric; None is missing and left out."""
    known = [value for value in values if value is not None]
    mean = float(np.mean(known)) if known else math.nan
    if len(known) < 2:
        return Figure(mean=mean, questions=len(known), interval=None, method=None)
    if metric not in COUNTS and all(value in (0.0, 1.0) for value in known):
        interval = wilson_interval(int(sum(known)), len(known))
        return Figure(mean=mean, questions=len(known), interval=interval, method="wilson")
    return Figure(mean=mean, questions=len(known), interval=bootstrap_interval(known), method="bootstrap")


def shown(found: Figure | None, *, of: int | None = None) -> str:
    """`0.25 [0.21, 0.29]`, with ` of 98` where the mean is of fewer questions than `of`."""
    if found is None or not found.questions:
        return "-"
    text = f"{found.mean:.4g}"
    if found.interval is not None:
        text += f" [{found.interval[0]:.4g}, {found.interval[1]:.4g}]"
    return text if of is None or found.questions == of else f"{text} of {found.questions}"
