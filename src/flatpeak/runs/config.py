"""Configuration of the run directory."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from flatpeak.schema import StrictConfig


class RunSectionConfig(StrictConfig):
    """Where a run lives, what it keeps, and the seed everything random derives from."""

    name: str = "run"
    directory: str = "runs"
    seed: int = 0
    checkpoint_every: Annotated[int, Field(ge=0)] = 50
    """0: only at the start and the end."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """How many periodic checkpoints stay beside the first, the best and the last."""
    log_rollouts_every: Annotated[int, Field(ge=0)] = 1
    """0: never."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """torch threads; null leaves torch's choice."""
    grading_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that grade groups while others are sampled: the built-in rewards, and functions with an attribute
    `by_group = True`. 0: this process grades, after sampling. The scores are the same."""
    grading_timeout: Annotated[float, Field(ge=0.1, allow_inf_nan=False)] = 60.0
    """Seconds that a worker may take for one group; then it is killed and the group's scores are missing."""
