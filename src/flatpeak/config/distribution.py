"""Settings that several processes do not serve: refused when a recipe is read, before a process is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def refuse_undistributable(config: Any) -> None:
    """Raise ValueError at the first setting of a RunConfig that its processes cannot serve."""
    if config.distributed.processes == 1:
        return
    for problem in _problems(config):
        raise ValueError(f"distributed.processes={config.distributed.processes}: {problem}")


def _problems(config: Any) -> Iterator[str]:
    regularization, training = config.gradient_regularization, config.training
    if not isinstance(config.rollout.engine, str):
        yield f"every rank would update the servers of rollout.engine.type={config.rollout.engine.type}; use native"
    if config.rollout.staleness:
        yield "rollout.staleness does not go with several ranks, each of which samples its share; set it to 0"
    if regularization.enabled and regularization.difference == "exact":
        yield "gradient_regularization.difference=exact does not average over ranks; use forward or central"
    if not config.distributed.sharded:
        return
    strategy = f"distributed.strategy={config.distributed.strategy}"
    if training.compile:
        yield f"{strategy} does not go with training.compile; set it to false"
    if config.evaluation.sharpness is not None:
        yield f"{strategy} does not go with evaluation.sharpness; measure it with flatpeak eval on one device"
