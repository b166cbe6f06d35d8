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
