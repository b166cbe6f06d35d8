"""The result of evaluating one policy on one fixed set of questions, with estimates overall and by subset."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from flatpeak.evaluation.config import ChoiceAnswers, is_verdict
from flatpeak.evaluation.estimates import Estimate, estimate, mean_of
from flatpeak.evaluation.robustness import Robustness
from flatpeak.evaluation.sharpness import Sharpness

Values = Mapping[str, Sequence[float | None]]
"""By metric, the value of each question."""

HEADLINES: Final = ("accuracy", "sampled/accuracy", "reward", "sampled/reward")
"""The headline of an evaluation is the first of these metrics that it has."""


@dataclass(frozen=True, kw_only=True)
class SubsetTable:
    """The estimates for each value of one column of `Example.subsets`."""

    column: str
    sizes: Mapping[str, int]
    """The number of questions for each value, in the order of the values."""
    estimates: Mapping[str, Mapping[str, Estimate]]
    """By value, then by metric."""
    micro: Mapping[str, Estimate]
    """Over all questions that have the column, each with the same weight."""

    @property
    def macro(self) -> dict[str, float]:
        """The mean of the values' means, each with the same weight. NaN if no value has the metric."""
        macro = {}
        for metric in self.micro:
            means = [row[metric].mean for row in self.estimates.values() if row[metric].questions]
            macro[metric] = float(np.mean(means)) if means else math.nan
        return macro

    def as_dict(self) -> dict[str, Any]:
        """The table, for summaries and `--json`."""
        return {
            "values": {
                value: {"size": size, **_as_dict(self.estimates[value], size=size)}
                for value, size in self.sizes.items()
            },
            "micro": _as_dict(self.micro, size=sum(self.sizes.values())),
            "macro": self.macro,
        }


def subset_tables(subsets: Sequence[Mapping[str, str]], values: Values) -> dict[str, SubsetTable]:
    """A table for each column that any question has; `subsets` and every metric's values are by question."""
    columns = sorted({column for question in subsets for column in question})
    return {column: _table(column, [question.get(column) for question in subsets], values) for column in columns}


def first_of_each(tasks: Sequence[str], size: int | None) -> list[int]:
    """The indices of the first `size` questions of each task, by the questions' tasks; None: of all."""
    counts = Counter[str]()
    chosen = []
    for index, task in enumerate(tasks):
        counts[task] += 1
        if size is None or counts[task] <= size:
            chosen.append(index)
    return chosen


def without_verdicts(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results by metric, nested as in `Evaluation.as_dict` or flat, without the metrics that count right answers."""
    return {
        key: without_verdicts(value) if isinstance(value, Mapping) else value
        for key, value in results.items()
        if not is_verdict(key)
    }


def no_accuracy(reward: str) -> str:
    """The notice that accuracy is not measured, because this function's scores are not only 0 and 1."""
    return (
        f"reward {reward!r} gives scores other than 0 and 1: there is no accuracy (evaluation.accuracy={reward} counts "
        "scores of at least 1 as right)"
    )


def natural_order(text: str) -> list[tuple[bool, int, str]]:
    """A sort key that places `Level 10` after `Level 9`."""
    pieces = re.findall(r"[0-9]{1,18}|[^0-9]+|[0-9]+", text.lower())
    return [(not piece.isdecimal(), int(piece) if piece.isdecimal() else 0, piece) for piece in pieces]


def _table(column: str, subset_values: Sequence[str | None], values: Values) -> SubsetTable:
    indices_by_value: dict[str, list[int]] = {}
    for index, value in enumerate(subset_values):
        if value is not None:
            indices_by_value.setdefault(value, []).append(index)
    ordered = {value: indices_by_value[value] for value in sorted(indices_by_value, key=natural_order)}
    return SubsetTable(
        column=column,
        sizes={value: len(indices) for value, indices in ordered.items()},
        estimates={value: _estimates(values, indices) for value, indices in ordered.items()},
        # In the original order of questions, so that the bootstrap equals that of the whole set.
        micro=_estimates(values, sorted(index for indices in ordered.values() for index in indices)),
    )


def _estimates(values: Values, indices: Sequence[int]) -> dict[str, Estimate]:
    return {
        metric: estimate([by_question[index] for index in indices], metric=metric)
        for metric, by_question in values.items()
    }


def _as_dict(estimates: Mapping[str, Estimate], *, size: int) -> dict[str, Any]:
    return {
        "metrics": {metric: one.mean for metric, one in estimates.items()},
        "intervals": {metric: list(one.interval) for metric, one in estimates.items() if one.interval},
        "methods": {metric: one.method for metric, one in estimates.items() if one.method},
        "counted": {metric: one.questions for metric, one in estimates.items() if one.questions < size},
    }


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The answers of one policy to one fixed set of questions, graded."""

    task: str
    size: int
    values: Mapping[str, Sequence[float | None]]
    """By metric, the value of each question; None if a grader failed."""
    ids: Sequence[str]
    """The ids of the questions: always the same questions in the same order."""
    rows: Sequence[Mapping[str, Any]]
    """Per question: id, gold, the greedy text and its finish reason, answer, scores, the samples' correctness."""
    tasks: Sequence[str] = ()
    """Per question, the task of a mixture that it belongs to; empty without a mixture."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """By task of a mixture, its share in every mean; empty without a mixture."""
    sets: Mapping[str, Evaluation] = field(default_factory=dict)
    """The evaluations on further sets, by name."""
    subsets: Sequence[Mapping[str, str]] = ()
    """Per question, the subsets it belongs to: {"subject": "algebra"}."""
    robustness: Mapping[str, Robustness] = field(default_factory=dict)
    """The results on perturbed questions, by kind."""
    sharpness: Sharpness | None = None
    """The reward under perturbed weights, on the first questions of the task."""
    choices: ChoiceAnswers | None = None
    """The kind of answers to questions with lettered options; None if there are no such questions."""
    graded_by: str | None = None
    """The reward part for accuracy by default, if it gives scores other than 0 and 1; else None."""

    @cached_property
    def weights(self) -> list[float] | None:
        """The weight of each question, by which a task of a mixture counts by its share; None if all count the same."""
        counts = Counter(self.tasks)
        return [self.shares[task] / counts[task] for task in self.tasks] if self.shares else None

    @cached_property
    def apart(self) -> dict[str, Evaluation]:
        """The evaluations of each task of a mixture and of each further set, by name."""
        by_task = {
            name: self._select([index for index, task in enumerate(self.tasks) if task == name]) for name in self.shares
        }
        alone = {name: replace(one, task=name, tasks=(), shares={}, sets={}) for name, one in by_task.items()}
        return {**alone, **self.sets}

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """The estimate of every metric, including accuracy on the perturbed questions and under perturbed weights."""
        estimates = {
            metric: estimate(values, metric=metric, weights=self.weights) for metric, values in self.values.items()
        }
        estimates |= {f"robustness/{kind}": one.estimate for kind, one in self.robustness.items()}
        return estimates | (self.sharpness.estimates if self.sharpness is not None else {})

    @property
    def by_question(self) -> dict[str, Sequence[float | None]]:
        """By metric, the value of each question; sharpness has its own questions, the first of the task."""
        return {**self.values, **(self.sharpness.values if self.sharpness is not None else {})}

    @property
    def tabled(self) -> list[str]:
        """The metrics of the main table: all except those on perturbed questions, which have a separate table."""
        return [*self.values, *(self.sharpness.estimates if self.sharpness is not None else ())]

    @cached_property
    def subset_tables(self) -> dict[str, SubsetTable]:
        """A table for each column of the questions' subsets."""
        return subset_tables(self.subsets, self.values)

    @property
    def headline(self) -> str:
        """The metric that represents the evaluation."""
        return next(metric for metric in HEADLINES if metric in self.values)

    @property
    def pass_rate(self) -> float:
        """The accuracy of greedy answers; of sampled answers if there are no greedy ones."""
        return self.mean("accuracy" if "accuracy" in self.values else "sampled/accuracy")

    def mean(self, metric: str) -> float:
        """The mean of a metric over the questions that have it; NaN if none does."""
        if metric not in self.values:
            return self.estimates[metric].mean
        return mean_of(self.values[metric], self.weights)

    def known(self, metric: str) -> list[float]:
        """The values of a metric that are not missing."""
        return [value for value in self.values[metric] if value is not None]

    def metrics(self) -> dict[str, float]:
        """The mean of every metric, by its name."""
        return {metric: one.mean for metric, one in self.estimates.items()}

    @property
    def logged(self) -> dict[str, float]:
        """The mean of every metric, of each task of a mixture and of each further set, as `eval/TASK/METRIC`."""
        evaluations = (self, *self.apart.values())
        return {f"eval/{one.task}/{name}": value for one in evaluations for name, value in one.metrics().items()}

    @property
    def answers(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        """The rows by the end of their file's name: the questions', those on perturbed ones, each further set's."""
        perturbed = [row for one in self.robustness.values() for row in one.rows]
        sets = {f".{name}": one.rows for name, one in self.sets.items()}
        return {"": self.rows, **({"_perturbed": perturbed} if perturbed else {}), **sets}

    def first(self, size: int | None) -> Evaluation:
        """The evaluation of only the first `size` questions of each task, as in periodic evaluations."""
        chosen = first_of_each(self.tasks or [""] * self.size, size)
        return self if len(chosen) == self.size else self._select(chosen)

    @property
    def all_ids(self) -> set[str]:
        """The ids of the questions, those of the further sets included."""
        return {*self.ids, *(id for one in self.sets.values() for id in one.ids)}

    def only(self, ids: set[str]) -> Evaluation:
        """The evaluation of only the questions with these ids."""
        if ids >= self.all_ids:
            return self
        sets = {name: one.only(ids) for name, one in self.sets.items()}
        return replace(self._select([i for i, id in enumerate(self.ids) if id in ids]), sets=sets)

    def without_verdicts(self) -> Evaluation:
        """The evaluation without the metrics that count right answers."""
        rows = [{key: value for key, value in row.items() if key != "samples_correct"} for row in self.rows]
        sets = {name: one.without_verdicts() for name, one in self.sets.items()}
        return replace(self, values=without_verdicts(self.values), rows=rows, sets=sets)

    def _select(self, indices: Sequence[int]) -> Evaluation:
        """The evaluation of some questions, without results on perturbed questions and sharpness, which are for the
        whole set."""
        return replace(
            self,
            size=len(indices),
            values={metric: [values[index] for index in indices] for metric, values in self.values.items()},
            ids=[self.ids[index] for index in indices],
            rows=[self.rows[index] for index in indices],
            subsets=[self.subsets[index] for index in indices] if self.subsets else (),
            tasks=[self.tasks[index] for index in indices] if self.tasks else (),
            robustness={},
            sharpness=None,
        )

    def as_dict(self) -> dict[str, Any]:
        """The means, their 95% intervals and methods, for summaries.

        `counted` is the number of questions in a mean, if that is not all of them.
        """
        counts = {metric: self.estimates[metric].questions for metric in self.by_question}
        return {
            "task": self.task,
            "size": self.size,
            **({} if self.choices is None else {"choices": self.choices}),
            "metrics": self.metrics(),
            "intervals": {metric: list(one.interval) for metric, one in self.estimates.items() if one.interval},
            "methods": {metric: one.method for metric, one in self.estimates.items() if one.method},
            "counted": {metric: count for metric, count in counts.items() if count != self.size},
            "subsets": {column: table.as_dict() for column, table in self.subset_tables.items()},
            "robustness": {kind: one.as_dict() for kind, one in self.robustness.items()},
            **({"sets": {name: one.as_dict() for name, one in self.apart.items()}} if self.apart else {}),
        }
