"""Settings that do not work with several processes: refused when a recipe is read, before a process starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def refuse_undistributable(config: Any) -> None:
    """Raise ValueError at the first setting of a RunConfig that does not work with its processes."""
    if config.distributed.processes == 1:
        return
    for problem in _problems(config):
        raise ValueError(f"distributed.processes={config.distributed.processes}: {problem}")


def _problems(config: Any) -> Iterator[str]:
    regularization, training = config.gradient_regularization, config.training
    if config.rollout.staleness and isinstance(config.rollout.engine, str):
        yield (
            "rollout.staleness does not go with ranks that each sample their share; set it to 0, or let servers draw "
            "(rollout.engine.type=vllm)"
        )
    if not config.distributed.sharded:
        return
    strategy = f"distributed.strategy={config.distributed.strategy}"
    if regularization.enabled and regularization.difference == "exact":
        yield f"{strategy} does not go with gradient_regularization.difference=exact; use forward, central, or ddp"
    if training.compile:
        yield f"{strategy} does not go with training.compile; set it to false"
    if config.evaluation.sharpness is not None:
        yield f"{strategy} does not go with evaluation.sharpness; measure it with flatpeak eval on one device"
