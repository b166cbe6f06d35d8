"""What one policy did on one fixed set of questions, and the figures that come of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from flatpeak.evaluation.config import ChoiceAnswers
from flatpeak.evaluation.estimates import Figure, figure
from flatpeak.evaluation.robustness import Robustness

Values = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class SubsetTable:
    """One column of `Example.subsets`: the figures of each of its values."""

    column: str
    sizes: Mapping[str, int]
    """Questions of each value, the values in order."""
    figures: Mapping[str, Mapping[str, Figure]]
    """[value][metric]."""
    micro: Mapping[str, Figure]
    """Over all questions that have the column: every question counts the same."""

    @property
    def macro(self) -> dict[str, float]:
        """The mean of the values' means: every value counts the same. NaN where no value has the metric."""
        found = {}
        for metric in self.micro:
            means = [row[metric].mean for row in self.figures.values() if row[metric].questions]
            found[metric] = float(np.mean(means)) if means else math.nan
        return found

    def as_dict(self) -> dict[str, Any]:
        """For summaries and `--json`."""
        return {
            "values": {
                value: {"size": size, **_plain(self.figures[value], size=size)} for value, size in self.sizes.items()
            },
            "micro": _plain(self.micro, size=sum(self.sizes.values())),
            "macro": self.macro,
        }


def subset_tables(subsets: Sequence[Mapping[str, str]], values: Values) -> dict[str, SubsetTable]:
    """A table for each column that any question has; `subsets` and every metric's values are by question."""
    columns = sorted({column for marks in subsets for column in marks})
    return {column: _table(column, [marks.get(column) for marks in subsets], values) for column in columns}


def natural(text: str) -> list[tuple[bool, int, str]]:
    """A sort key that puts `Level 10` after `Level 9`."""
    pieces = re.findall(r"[0-9]{1,18}|[^0-9]+|[0-9]+", text.lower())
    return [(not piece.isdecimal(), int(piece) if piece.isdecimal() else 0, piece) for piece in pieces]


def _table(column: str, marks: Sequence[str | None], values: Values) -> SubsetTable:
    places: dict[str, list[int]] = {}
    for index, mark in enumerate(marks):
        if mark is not None:
            places.setdefault(mark, []).append(index)
    ordered = {mark: places[mark] for mark in sorted(places, key=natural)}
    return SubsetTable(
        column=column,
        sizes={mark: len(indices) for mark, indices in ordered.items()},
        figures={mark: _figures(values, indices) for mark, indices in ordered.items()},
        # In the questions' own order, so that its bootstrap is that of the whole set.
        micro=_figures(values, sorted(index for indices in ordered.values() for index in indices)),
    )


def _figures(values: Values, indices: Sequence[int]) -> dict[str, Figure]:
    return {metric: figure([found[index] for index in indices], metric=metric) for metric, found in values.items()}


def _plain(figures: Mapping[str, Figure], *, size: int) -> dict[str, Any]:
    return {
        "metrics": {metric: found.mean for metric, found in figures.items()},
        "intervals": {metric: list(found.interval) for metric, found in figures.items() if found.interval},
        "methods": {metric: found.method for metric, found in figures.items() if found.method},
        "counted": {metric: found.questions for metric, found in figures.items() if found.questions < size},
    }


HEADLINES = ("accuracy", "sampled/accuracy", "reward", "sampled/reward")
"""What an evaluation is about: the first of these that it has."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one policy did on one fixed set of questions."""

    task: str
    size: int
    values: Mapping[str, Sequence[float | None]]
    """Per question, for each metric; None where a grader failed. The same questions in the same order every time."""
    ids: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    """Per question: id, gold, the greedy text and its finish reason, answer, scores, the samples' correctness."""
    subsets: Sequence[Mapping[str, str]] = ()
    """Per question, what tables are made by: {"subject": "algebra"}."""
    robustness: Mapping[str, Robustness] = field(default_factory=dict)
    """What perturbed questions did, by kind."""
    choices: ChoiceAnswers | None = None
    """How questions with lettered options were answered; None where there are no such questions."""

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """Every metric's mean with its interval, those of the perturbed questions included."""
        found = {metric: figure(values, metric=metric) for metric, values in self.values.items()}
        return found | {f"robustness/{kind}": one.figure for kind, one in self.robustness.items()}

    @cached_property
    def subset_tables(self) -> dict[str, SubsetTable]:
        """A table per column that the questions are marked with."""
        return subset_tables(self.subsets, self.values)

    @property
    def headline(self) -> str:
        """The metric that stands for the others."""
        return next(metric for metric in HEADLINES if metric in self.values)

    @property
    def pass_rate(self) -> float:
        """The accuracy of greedy answers, or of sampled ones where there are no others."""
        return self.mean("accuracy" if "accuracy" in self.values else "sampled/accuracy")

    def mean(self, metric: str) -> float:
        """The metric over the questions that have it; NaN if none does."""
        if metric not in self.values:
            return self.figures[metric].mean
        known = self.known(metric)
        return float(np.mean(known)) if known else math.nan

    def known(self, metric: str) -> list[float]:
        """The values that are not missing."""
        return [value for value in self.values[metric] if value is not None]

    def metrics(self) -> dict[str, float]:
        """Every metric's mean."""
        return {metric: found.mean for metric, found in self.figures.items()}

    def first(self, size: int | None) -> Evaluation:
        """The evaluation of only the first so many questions: what periodic evaluations see too."""
        return self if size is None or size >= self.size else self._at(range(size))

    def only(self, ids: set[str]) -> Evaluation:
        """The evaluation of only these questions."""
        return self if ids >= set(self.ids) else self._at([at for at, id in enumerate(self.ids) if id in ids])

    def _at(self, places: Sequence[int]) -> Evaluation:
        """Of the questions at these places. The perturbed ones are of the whole set and are left out."""
        return replace(
            self,
            size=len(places),
            values={metric: [values[at] for at in places] for metric, values in self.values.items()},
            ids=[self.ids[at] for at in places],
            rows=[self.rows[at] for at in places],
            subsets=[self.subsets[at] for at in places] if self.subsets else (),
            robustness={},
        )

    def as_dict(self) -> dict[str, Any]:
        """Means, 95% intervals and their methods, for summaries.

        `counted` says of how many questions a mean is, where it is not all of them.
        """
        plain = {metric: found for metric, found in self.figures.items() if metric in self.values}
        return {
            "task": self.task,
            "size": self.size,
            **({} if self.choices is None else {"choices": self.choices}),
            "metrics": self.metrics(),
            "intervals": {metric: list(found.interval) for metric, found in self.figures.items() if found.interval},
            "methods": {metric: found.method for metric, found in self.figures.items() if found.method},
            "counted": {metric: found.questions for metric, found in plain.items() if found.questions < self.size},
            "subsets": {column: table.as_dict() for column, table in self.subset_tables.items()},
            "robustness": {kind: one.as_dict() for kind, one in self.robustness.items()},
        }
