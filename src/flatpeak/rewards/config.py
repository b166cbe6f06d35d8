"""Configuration of rewards: a mapping from the part's name to one of these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from flatpeak.schema import StrictConfig

Extraction = Literal["whole", "answer_tag", "gsm8k_strict", "gsm8k_flexible", "last_number", "boxed"]


class NumberConfig(StrictConfig):
    """1 if the number found in the completion equals the gold number, else 0."""

    type: Literal["number"] = "number"
    weight: float = 1.0
    extraction: Extraction = "whole"


class FormatConfig(StrictConfig):
    """The r1_zero layout, its parts scored apart: think closed, one answer block, nothing around them."""

    type: Literal["format"] = "format"
    weight: float = 1.0


class LengthConfig(StrictConfig):
    """1 up to `target` tokens, falling linearly to 0 at `limit`."""

    type: Literal["length"] = "length"
    weight: float = 1.0
    target: Annotated[int, Field(ge=0)]
    limit: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _limit_beyond_target(self) -> LengthConfig:
        if self.limit <= self.target:
            raise ValueError(f"limit={self.limit} must be greater than target={self.target}")
        return self


class CountdownConfig(StrictConfig):
    """1 if the arithmetic in the answer block uses each of the row's `nums` once and makes its `target`."""

    type: Literal["countdown"] = "countdown"
    weight: float = 1.0


class FunctionConfig(StrictConfig):
    """A function of yours, module:name or file.py:name; its parameter names say how it is called."""

    type: Literal["function"] = "function"
    weight: float = 1.0
    function: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments, the same at every call."""


RewardConfig = Annotated[
    NumberConfig | FormatConfig | LengthConfig | CountdownConfig | FunctionConfig, Field(discriminator="type")
]
