"""What one policy did on one fixed set of questions, and the figures that come of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from flatpeak.evaluation.config import ChoiceAnswers
from flatpeak.evaluation.figures import Figure, figure
from flatpeak.evaluation.robustness import Robustness
from flatpeak.evaluation.subsets import SubsetTable, subset_tables

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
