"""Run directory, checkpoints, metrics, rollout log."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.runs.directory import RunDirectory as RunDirectory
    from flatpeak.runs.metrics import read_metrics as read_metrics
    from flatpeak.runs.summary import RunSummary as RunSummary

__getattr__ = lazy_names(__name__, {"RunDirectory": "directory", "RunSummary": "summary", "read_metrics": "metrics"})
