"""Several models on the same questions, side by side, with intervals and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from flatpeak.evaluation.evaluate import Evaluation
from flatpeak.functional.estimators import bootstrap_interval, paired_bootstrap


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Evaluations of several models on one fixed set of questions."""

    labels: Sequence[str]
    evaluations: Sequence[Evaluation]

    def as_dict(self) -> dict[str, Any]:
        """Every model's figures, and each later model's paired difference from the first."""
        return {
            "models": [
                {"label": label, **evaluation.as_dict()}
                for label, evaluation in zip(self.labels, self.evaluations, strict=True)
            ],
            "differences": [
                {"label": label, "metrics": differences(self.evaluations[0], evaluation)}
                for label, evaluation in zip(self.labels[1:], self.evaluations[1:], strict=True)
            ],
        }

    def render(self) -> str:
        """A table: one row per metric, one column per model, and the change since the first where there are two."""
        task = self.evaluations[0]
        table = Table(title=f"{task.task}, {task.size} questions, 95% bootstrap intervals")
        table.add_column("metric")
        for label in self.labels:
            table.add_column(label, justify="right", overflow="fold")
        changes = [differences(task, evaluation) for evaluation in self.evaluations[1:]]
        for label in self.labels[1:]:
            table.add_column(f"{label} - {self.labels[0]}", justify="right", overflow="fold")
        for metric in task.values:
            figures = [_figure(evaluation, metric) for evaluation in self.evaluations]
            table.add_row(metric, *figures, *(_change(change.get(metric)) for change in changes))
        console = Console(width=max(100, 24 + 26 * (2 * len(self.labels) - 1)))
        with console.capture() as capture:
            console.print(table)
        return capture.get().rstrip()


def differences(before: Evaluation, after: Evaluation) -> dict[str, dict[str, float]]:
    """after - before for every metric both have, over the questions where neither is missing, with its interval."""
    if list(before.ids) != list(after.ids):
        raise ValueError("evaluations of different questions cannot be paired")
    found: dict[str, dict[str, float]] = {}
    for metric in before.values:
        pairs = [
            (old, new)
            for old, new in zip(before.values[metric], after.values.get(metric, ()), strict=False)
            if old is not None and new is not None
        ]
        if len(pairs) > 1:
            paired = paired_bootstrap([old for old, _ in pairs], [new for _, new in pairs])
            found[metric] = {"difference": paired.difference, "low": paired.low, "high": paired.high}
    return found


def _figure(evaluation: Evaluation, metric: str) -> str:
    known = evaluation.known(metric) if metric in evaluation.values else []
    if len(known) < 2:
        return "-"
    low, high = bootstrap_interval(known)
    return f"{evaluation.mean(metric):.4g} [{low:.4g}, {high:.4g}]"


def _change(change: dict[str, float] | None) -> str:
    if change is None:
        return "-"
    return f"{change['difference']:+.4g} [{change['low']:+.4g}, {change['high']:+.4g}]"
