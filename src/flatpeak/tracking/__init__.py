"""Trackers: Weights & Biases, TensorBoard, trackio and MLflow, written to by one thread."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.tracking.config import TrackingConfig as TrackingConfig
    from flatpeak.tracking.trackers import Trackers as Trackers
    from flatpeak.tracking.trackers import open_trackers as open_trackers

__getattr__ = lazy_names(__name__, {"TrackingConfig": "config", "Trackers": "trackers", "open_trackers": "trackers"})
