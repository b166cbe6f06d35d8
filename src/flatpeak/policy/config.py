"""Configuration of the model: an existing one, or a new one made from nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from flatpeak.schema import StrictConfig


class TokenizerConfig(StrictConfig):
    """A tokenizer built from the task's own text."""

    type: Literal["characters", "bpe"] = "characters"
    vocab_size: Annotated[int, Field(ge=16)] = 1000
    """Size of a BPE vocabulary (digits are always single tokens); characters take what the text has."""


class NewModelConfig(StrictConfig):
    """A model with random weights: any causal architecture transformers knows."""

    architecture: str = "qwen2"
    """The transformers model type: qwen2, llama, gpt2, ..."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of its transformers config (hidden_size, num_hidden_layers, ...); vocabulary and special ids are set."""
    tokenizer: TokenizerConfig = TokenizerConfig()


class ModelConfig(StrictConfig):
    """One of `path` (a directory or Hub name) and `new`; neither where the caller of flatpeak.train brings a model."""

    path: str | None = None
    revision: str | None = None
    new: NewModelConfig | None = None
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    dropout: bool = False
    """Keep the model's dropout while training. Off by default: dropout makes the policy differ from its sampler."""
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.path is not None and self.new is not None:
            raise ValueError("give one of model.path (a directory or Hub name) and model.new, not both")
        return self


class ReferenceConfig(StrictConfig):
    """The model that KL is measured against."""

    model: str | None = None
    """A directory or Hub name; null: the policy as it was when this training began."""
    keep: bool = False
    """Keep a reference, and log the KL to it, even at kl.coefficient 0."""
