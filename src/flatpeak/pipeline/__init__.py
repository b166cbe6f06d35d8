"""Whole runs: from a configuration to its parts, its stages and its result."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.pipeline.components import build_sampler as build_sampler
    from flatpeak.pipeline.request import RunResult as RunResult

__getattr__ = lazy_names(__name__, {"RunResult": "request", "build_sampler": "components"})
