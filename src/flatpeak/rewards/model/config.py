"""Configuration of a reward model's scores as a reward part."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flatpeak.utils.schema import StrictConfig


class SequenceClassifierConfig(StrictConfig):
    """The score that a sequence-classification model gives to question and completion."""

    type: Literal["reward_model"] = "reward_model"
    weight: float = 1.0
    path: str
    """A run of `flatpeak reward-model`, a checkpoint's directory, or a Hub name."""
    revision: str | None = None
    """Of a Hub name: a branch, tag or commit."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    template: str = "auto"
    """auto: the template the model was trained with, where it is recorded, else its tokenizer's chat template. chat;
    plain: question and completion with an empty line between; or a text file with {prompt} and {completion} in it."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """Longest text. Of a longer one the beginning of the question is left out, never a part of the completion; one that
    does not fit without its question either has no score. null: what the model was trained with, else its context."""
    batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of one forward pass, padding included. null: 4096 on a CPU, else 32768."""
    label: Annotated[int, Field(ge=0)] | None = None
    """Which output is the score, where the model has several."""
    normalization: Literal["none", "standardize"] = "none"
    """standardize: (score - mean) / std, of the scores recorded with the model unless `mean` and `std` are given."""
    mean: float | None = None
    std: Annotated[float, Field(gt=0)] | None = None
    clip: tuple[float, float] | None = None
    """The smallest and the largest score, after normalization."""

    @model_validator(mode="after")
    def _consistent(self) -> SequenceClassifierConfig:
        if (self.mean is None) != (self.std is None):
            raise ValueError("a reward model's mean and std belong together: give both, or neither")
        if self.mean is not None and self.normalization == "none":
            raise ValueError("a reward model's mean and std do nothing without normalization=standardize: set it")
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip={list(self.clip)}: give the smallest score first, then a larger one")
        return self
