"""Whole runs: from a configuration to its parts, its stages and its result."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.pipeline.rollout_engines import build_sampler as build_sampler
    from flatpeak.pipeline.run_result import RunResult as RunResult

__getattr__ = lazy_names(__name__, {"RunResult": "run_result", "build_sampler": "rollout_engines"})
