"""Processes that run reward functions under limits of time and memory."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.rewards.workers.pool import WorkerPool as WorkerPool

__getattr__ = lazy_names(__name__, {"WorkerPool": "pool"})
