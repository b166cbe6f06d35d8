"""Configuration of training in several processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flatpeak.utils.schema import StrictConfig


class DistributedConfig(StrictConfig):
    """The processes of a run, one per device, and how they divide the model."""

    processes: Annotated[int, Field(ge=1)] = 1
    """The number of processes on all nodes. `flatpeak train` starts them on one node, torchrun on any number."""
    strategy: Literal["ddp", "fsdp2", "hsdp"] = "ddp"
    """ddp: each process holds the whole model. fsdp2: each holds a share of weights, gradients and optimizer states,
    and gathers one layer at a time. hsdp: groups of `shard_size` processes share a copy of the model."""
    shard_size: Annotated[int, Field(ge=2)] | None = None
    """The number of processes that share one model under hsdp, usually those of a node. null: for the other
    strategies."""

    @model_validator(mode="after")
    def _consistent(self) -> DistributedConfig:
        if (self.strategy == "hsdp") != (self.shard_size is not None):
            raise ValueError(
                "distributed.shard_size and distributed.strategy=hsdp need each other: set both or neither"
            )
        if self.shard_size is not None and (self.processes % self.shard_size or self.shard_size == self.processes):
            raise ValueError(
                f"distributed.shard_size={self.shard_size} must divide distributed.processes={self.processes} and be "
                "smaller; strategy=fsdp2 shards over all processes"
            )
        return self

    @property
    def sharded(self) -> bool:
        """Whether each process holds only a share of the model."""
        return self.strategy != "ddp"

    @property
    def divides_model(self) -> bool:
        """Whether several processes each hold only a share of the model."""
        return self.sharded and self.processes > 1
