"""The configuration of rollouts (the recipe's section `rollout`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flatpeak.types import SamplingParams
from flatpeak.utils.schema import StrictConfig


class RolloutConfig(StrictConfig):
    """The number of completions that a step draws, their distribution and their engine."""

    prompts_per_step: Annotated[int, Field(ge=1)] = 32
    group_size: Annotated[int, Field(ge=1)] = 8
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    stop: tuple[str, ...] = ()
    engine: Literal["auto", "native", "generate"] = "auto"
    """auto: native where the architecture is proven, else transformers' generate, with a notice."""
    max_rows: Annotated[int, Field(ge=1)] = 512
    """Most completions decoded side by side."""
    batch_invariant: bool = True
    """On a CPU, pad slots and keys so that no bit of a completion depends on what else is decoded. What it costs
    is within the spread of measurements (benchmarks/RESULTS.md), but for very small heads: with those of 8 dimensions
    rollouts of short answers take nearly three times as long."""

    @model_validator(mode="after")
    def _minimum_is_below_maximum(self) -> RolloutConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"rollout.min_new_tokens={self.min_new_tokens} exceeds rollout.max_new_tokens={self.max_new_tokens}, "
                "so that every completion would be cut off: lower one or raise the other"
            )
        return self

    def sampling(self) -> SamplingParams:
        """The sampling parameters of training rollouts."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop=self.stop,
        )
