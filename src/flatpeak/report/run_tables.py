"""Tables of several runs: CSV for spreadsheets, and columns for a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flatpeak.report.evaluations import best_evaluation, headline_metric
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.summary import RunSummary, StageEvaluation, read_summary

COLUMNS: Final = (
    "run",
    "status",
    "task",
    "questions",
    "start_accuracy",
    "sft_accuracy",
    "final_accuracy",
    "final_low",
    "final_high",
    "extraction_failed",
    "metric",
    "best_step",
    "best_value",
    "last_step",
    "wall_seconds",
)
"""The columns of the run-summary table."""


def run_table(runs: Sequence[Path]) -> str:
    """The run-summary table as CSV; missing values are empty cells. UserError if a directory is not a run's."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in runs:
        writer.writerow({"run": run.as_posix()} | _summary_row(read_summary(RunPaths(run).summary)))
    return text.getvalue()


def compared_runs(runs: Sequence[Path]) -> str:
    """A table of runs for a terminal: the held-out metric at every stage, its last interval, best and last step, time.

    The metric is accuracy if the run has it, else the metric that chose its checkpoints. A dash marks a missing value.
    """
    rows: list[tuple[str, ...]] = [("run", "metric", "start", "SFT", "final", "95% interval", "best", "last", "time")]
    rows += [_comparison_row(run, RunPaths(run).summary) for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        # Words are aligned to the left, numbers to the right.
        padded = [text.ljust(width) for text, width in zip(row[:2], widths[:2], strict=True)]
        padded += [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _comparison_row(run: Path, path: Path) -> tuple[str, ...]:
    if not path.exists():
        return (f"{run.as_posix()} (no summary)", *("-" for _ in range(8)))
    summary = read_summary(path)
    final = summary.evaluations[-1] if summary.evaluations else None
    metric = (headline_metric(final, metric=summary.metric) if final else None) or summary.metric
    interval = final.intervals.get(metric) if final else None
    stages = (summary.evaluation("start"), summary.evaluation("sft"), final)
    return (
        run.as_posix() if summary.status == "done" else f"{run.as_posix()} ({summary.status})",
        metric,
        *(_short(None if evaluation is None else evaluation.metrics.get(metric)) for evaluation in stages),
        "-" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]",
        "-" if summary.best_step is None else str(summary.best_step),
        str(summary.last_step),
        f"{summary.wall_seconds:.0f} s",
    )


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _summary_row(summary: RunSummary) -> dict[str, Any]:
    final = summary.evaluations[-1] if summary.evaluations else None
    low, high = _interval(final)
    best = best_evaluation(summary)
    return {
        "status": summary.status,
        "task": final.task if final else None,
        "questions": final.size if final else None,
        "start_accuracy": _accuracy(summary.evaluation("start")),
        "sft_accuracy": _accuracy(summary.evaluation("sft")),
        "final_accuracy": _accuracy(final),
        "final_low": low,
        "final_high": high,
        "extraction_failed": _metric_value(final, "extraction_failed"),
        "metric": summary.metric,
        "best_step": summary.best_step,
        "best_value": best.metrics.get(summary.metric) if best else None,
        "last_step": summary.last_step,
        "wall_seconds": round(summary.wall_seconds, 1),
    }


def _accuracy(evaluation: StageEvaluation | None) -> float | None:
    """The accuracy of greedy answers; of samples if there are no greedy answers."""
    return _metric_value(evaluation, "accuracy")


def _metric_value(evaluation: StageEvaluation | None, metric: str) -> float | None:
    metrics = {} if evaluation is None else evaluation.metrics
    return metrics.get(metric, metrics.get(f"sampled/{metric}"))


def _interval(evaluation: StageEvaluation | None) -> tuple[float | None, float | None]:
    intervals = {} if evaluation is None else evaluation.intervals
    return intervals.get("accuracy", intervals.get("sampled/accuracy", (None, None)))
