"""Comparison of models on the same questions, and the tables that `flatpeak eval` prints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flatpeak.evaluation.config import ChoiceAnswers
from flatpeak.evaluation.estimates import format_estimate, interval_of_differences, known_of, mean_of
from flatpeak.evaluation.result import Evaluation

METHODS: Final = (
    "95% intervals: Wilson's for shares of questions (every value 0 or 1), else a bootstrap of the questions; "
    "differences: a paired bootstrap, or Tango's interval of shares that all differ by as much."
)
COUNTED: Final = " 'of 98' marks a mean over another number of questions than the table's."

_COUNT: Final = re.compile(r"\d\]? of \d")
"""The end of a cell whose mean is over fewer questions than there are."""
_ANSWER_NOTES: Final[Mapping[ChoiceAnswers, str]] = {
    "generate": "answers generated",
    "rank": "letters ranked by log-probability",
}
"""The wording of `evaluation.choices` in the title."""


Change = Mapping[str, float]
"""A difference, the low and high end of its interval, and its number of questions."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Evaluations of several models on one fixed set of questions."""

    labels: Sequence[str]
    evaluations: Sequence[Evaluation]
    notices: Sequence[str] = ()
    """Remarks for readers of the results."""

    @cached_property
    def changes(self) -> list[dict[str, Change]]:
        """Each later model's paired differences from the first, by metric."""
        return [differences(self.evaluations[0], evaluation) for evaluation in self.evaluations[1:]]

    def as_dict(self) -> dict[str, Any]:
        """Every model's estimates, and each later model's paired differences from the first."""
        return {
            "models": [
                {"label": label, **evaluation.as_dict()}
                for label, evaluation in zip(self.labels, self.evaluations, strict=True)
            ],
            "differences": [
                {"label": label, "metrics": change} for label, change in zip(self.labels[1:], self.changes, strict=True)
            ],
            "notices": list(self.notices),
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every model's answer to every question: those of further sets, and then perturbed ones, after the others."""
        for label, evaluation in zip(self.labels, self.evaluations, strict=True):
            for row in chain(evaluation.rows, *(one.rows for one in evaluation.sets.values())):
                yield {"model": label, **row}
            for robustness in evaluation.robustness.values():
                for row in robustness.rows:
                    yield {"model": label, **row}

    def render(self, *, width: int | None = None) -> str:
        """The tables of metrics, of each subset column and of perturbed questions, then the notices.

        Cells are folded into `width` columns; None: as wide as they need.
        """
        return render(self.labels, self.evaluations, self.changes, self.notices, width=width)


def differences(before: Evaluation, after: Evaluation) -> dict[str, Change]:
    """after - before, with its interval, for every metric of both, over the questions that have both values."""
    if list(before.ids) != list(after.ids):
        raise ValueError("evaluations of different questions cannot be paired")
    changes: dict[str, Change] = {}
    befores, afters = before.by_question, after.by_question
    for metric in befores:
        pairs = list(zip(befores[metric], afters.get(metric, ()), strict=False))
        gains = [None if old is None or new is None else new - old for old, new in pairs]
        known, weights = known_of(gains, before.weights if gains and metric in before.values else None)
        if len(known) > 1:
            both = [(old, new) for old, new in pairs if old is not None and new is not None]
            low, high = interval_of_differences(both, metric=metric, weights=weights)
            difference = mean_of(known, weights)
            changes[metric] = {"difference": difference, "low": low, "high": high, "questions": len(known)}
    return changes


def render(
    labels: Sequence[str],
    evaluations: Sequence[Evaluation],
    changes: Sequence[Mapping[str, Mapping[str, float]]],
    notices: Sequence[str],
    *,
    width: int | None = None,
) -> str:
    """Render all tables as text. `changes` are the later models' differences from the first, by metric."""
    tables = [_metrics(labels, evaluations, changes)]
    if evaluations[0].apart:
        tables.append(_apart(labels, evaluations))
    tables += [_subsets(labels, evaluations, column) for column in evaluations[0].subset_tables]
    kinds = list(dict.fromkeys(kind for evaluation in evaluations for kind in evaluation.robustness))
    if kinds:
        tables.append(_robustness(labels, evaluations, kinds))
    # Without markup: names of subsets, rewards and runs may have brackets.
    widest = max(160 if kinds else 100, 40 + 30 * (2 * len(labels) - 1))
    console = Console(width=min(width or widest, widest), markup=False)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    cells = capture.get()
    with console.capture() as capture:
        console.print(METHODS + (COUNTED if _COUNT.search(cells) else ""), markup=False, highlight=False)
        for notice in notices:
            console.print(notice, markup=False, highlight=False)
    return (cells + capture.get()).rstrip()


def _metrics(
    labels: Sequence[str],
    evaluations: Sequence[Evaluation],
    changes: Sequence[Mapping[str, Mapping[str, float]]],
) -> Table:
    """One row per metric, one column per model; with two models also the change."""
    first = evaluations[0]
    answered = "" if first.choices is None else f", {_ANSWER_NOTES[first.choices]}"
    table = _table(f"{first.task}, {first.size} questions{answered}", "metric", labels)
    for label in labels[1:]:
        table.add_column(f"{label} - {labels[0]}", justify="right", overflow="fold")
    table.add_column("interval")
    by_question = {metric for evaluation in evaluations for metric in evaluation.by_question}
    for metric in dict.fromkeys(metric for evaluation in evaluations for metric in evaluation.tabled):
        estimates = [evaluation.estimates.get(metric) for evaluation in evaluations]
        of = first.size if metric in by_question else None
        methods = dict.fromkeys(one.method for one in estimates if one is not None and one.method is not None)
        table.add_row(
            metric,
            *(format_estimate(one, of=of) for one in estimates),
            *(_format_change(change.get(metric)) for change in changes),
            "/".join(methods),
        )
    return table


def _apart(labels: Sequence[str], evaluations: Sequence[Evaluation]) -> Table:
    """One row per task of a mixture and evaluation set: its questions, and each model's headline metric."""
    metric = evaluations[0].headline
    table = _table(f"{metric} by task", "task or evaluation set", labels)
    for name, first in evaluations[0].apart.items():
        estimates = [evaluation.apart[name].estimates.get(metric) for evaluation in evaluations]
        cells = [format_estimate(one, of=first.size) for one in estimates]
        table.add_row(f"{name}, {first.size} questions", *cells)
    return table


def _subsets(labels: Sequence[str], evaluations: Sequence[Evaluation], column: str) -> Table:
    """One row per value: its questions, each model's headline metric, and the share without an extracted answer."""
    first = evaluations[0]
    metric = first.headline
    failure_metric = "sampled/extraction_failed" if metric.startswith("sampled/") else "extraction_failed"
    tables = [evaluation.subset_tables[column] for evaluation in evaluations]
    rendered = Table(title=f"{metric} by {column}")
    rendered.add_column(column, overflow="fold")
    rendered.add_column("questions", justify="right")
    for label in labels:
        rendered.add_column(label, justify="right", overflow="fold")
    with_failures = all(failure_metric in table.micro for table in tables)
    for label in labels if with_failures else ():
        rendered.add_column(
            "no answer" if len(labels) == 1 else f"no answer, {label}", justify="right", overflow="fold"
        )
    for value, size in tables[0].sizes.items():
        rows = [table.estimates[value] for table in tables]
        cells = [format_estimate(row.get(metric), of=size) for row in rows]
        cells += [f"{row[failure_metric].mean:.3g}" for row in rows if with_failures]
        rendered.add_row(value, str(size), *cells)
    rendered.add_section()
    total = sum(tables[0].sizes.values())
    micro = [format_estimate(table.micro.get(metric), of=total) for table in tables]
    micro += [f"{table.micro[failure_metric].mean:.3g}" for table in tables if with_failures]
    rendered.add_row("all questions (micro)", str(total), *micro)
    macro = [_format_number(table.macro.get(metric)) for table in tables]
    macro += [_format_number(table.macro[failure_metric]) for table in tables if with_failures]
    rendered.add_row("mean of the rows (macro)", "", *macro)
    return rendered


def _robustness(labels: Sequence[str], evaluations: Sequence[Evaluation], kinds: Sequence[str]) -> Table:
    """One row per kind and model: coverage, accuracy on the clean and the perturbed questions, and the difference."""
    metric = evaluations[0].headline
    rendered = Table(title=f"{metric} on perturbed questions, beside the same questions as they were")
    for name in ("perturbation", "model", "covered", "clean", "perturbed", "difference", "no answer"):
        rendered.add_column(name, justify="left" if name in ("perturbation", "model") else "right", overflow="fold")
    for kind in kinds:
        for label, evaluation in zip(labels, evaluations, strict=True):
            robustness = evaluation.robustness[kind]
            change = None if robustness.difference is None else asdict(robustness.difference)
            rendered.add_row(
                kind,
                label,
                f"{len(robustness.clean)} of {robustness.asked}",
                format_estimate(robustness.clean_estimate, of=len(robustness.clean)),
                format_estimate(robustness.estimate, of=len(robustness.clean)),
                _format_change(change),
                _format_number(robustness.failed_share),
            )
    return rendered


def _table(title: str, first: str, labels: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column(first, overflow="fold")
    for label in labels:
        table.add_column(label, justify="right", overflow="fold")
    return table


def _format_number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


def _format_change(change: Mapping[str, float] | None) -> str:
    if change is None:
        return "-"
    return f"{change['difference']:+.4g} [{change['low']:+.4g}, {change['high']:+.4g}]"
