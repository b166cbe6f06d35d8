"""Summaries of runs that never were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatpeak.runs.summary import EvaluationStage, RunSummary, StageEvaluation


def evaluation(
    stage: EvaluationStage, step: int, *, task: str = "t", size: int = 9, intervals: Any = None, **metrics: float | None
) -> StageEvaluation:
    """An evaluation with these metrics."""
    return StageEvaluation(
        stage=stage, step=step, task=task, size=size, metrics=dict(metrics), intervals=dict(intervals or {})
    )


def summary(*evaluations: StageEvaluation, **changes: Any) -> RunSummary:
    """The summary of a run that is done, stopped where `signal` is given; with these changes."""
    fields: Mapping[str, Any] = {
        "name": "demo",
        "status": "done" if changes.get("signal") is None else "stopped",
        "metric": "accuracy",
        "best_step": 40,
        "last_step": 40,
        "checkpoints": ("step_000000", "step_000040"),
        "wall_seconds": 117.6,
    }
    return RunSummary(**{**fields, **changes}, evaluations=evaluations)
