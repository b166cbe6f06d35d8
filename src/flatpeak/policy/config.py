"""The configuration of the model, existing or new, and of the reference model of the KL terms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from flatpeak.utils.adapters import LoraConfig
from flatpeak.utils.schema import StrictConfig


class TokenizerConfig(StrictConfig):
    """A tokenizer built from the task's text."""

    type: Literal["characters", "bpe"] = "characters"
    """characters: one token per character of the text. bpe: a byte-level BPE trained on the text."""
    vocab_size: Annotated[int, Field(ge=16)] = 1000
    """Size of a BPE vocabulary (digits are always single tokens); no effect with `characters`."""


class NewModelConfig(StrictConfig):
    """A model with random weights, of any causal architecture that transformers knows."""

    architecture: str = "llama"
    """The transformers model type: llama, gpt2, qwen2, ... transformers' AutoTokenizer misreads the saved tokenizer of
    a new qwen2 model; flatpeak loads it correctly."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of its transformers config (hidden_size, num_hidden_layers, ...); flatpeak sets the vocabulary and the
    special ids."""
    tokenizer: TokenizerConfig = TokenizerConfig()


class ModelConfig(StrictConfig):
    """Set `path` or `new`, but not both; neither if you pass a model to flatpeak.train."""

    path: str | None = None
    """A directory or Hub name of a model, a checkpoint or an adapter, or a GGUF file; null: use `new`, or the model
    that you pass."""
    revision: str | None = None
    """A branch, tag or commit of a Hub name; null: main."""
    new: NewModelConfig | None = None
    """A model with random weights, of any causal architecture that transformers knows. null: none."""
    device: str = "auto"
    """auto: cuda if available, else cpu."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the weights. bfloat16: the optimizer keeps a float32 master of each trainable weight, and saved
    models are in bfloat16. A model that you pass keeps its type."""
    dropout: bool = False
    """Keep the model's dropout in training. Off by default, because dropout makes the policy differ from its
    sampler."""
    trust_remote_code: bool = False
    """Allow code that comes with the model or its tokenizer to run on this machine."""
    lora: LoraConfig | None = None
    """Train adapters in float32 and freeze the model's weights; `{}` uses the defaults. null: train the weights."""
    quantization: Literal["nf4"] | None = None
    """nf4: store the linear layers in 4 bits, under adapters (QLoRA: Dettmers et al. 2023, arXiv 2305.14314). null: all
    weights are in `dtype`."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _no_float16(cls, value: object) -> object:
        if value in ("float16", "fp16", "half"):
            raise ValueError(
                f"model.dtype={value}: small gradients underflow in float16, and flatpeak does not scale "
                "losses; use bfloat16 or float32"
            )
        return value

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.path is not None and self.new is not None:
            raise ValueError("give model.path (a directory or Hub name) or model.new, not both")
        return self

    @model_validator(mode="after")
    def _four_bits_need_adapters(self) -> ModelConfig:
        if self.quantization is not None and self.lora is None:
            raise ValueError(
                f"model.quantization={self.quantization} without model.lora: weights in 4 bits cannot be trained; add "
                "adapters with model.lora={}, or set model.quantization to null"
            )
        return self

    @model_validator(mode="after")
    def _adapters_need_a_saved_model(self) -> ModelConfig:
        if self.new is not None and (self.lora is not None or self.quantization is not None):
            key = "lora" if self.lora is not None else "quantization"
            raise ValueError(
                f"model.{key} with model.new: adapters need their base model, but new random weights are not saved; "
                "first train the new model without it (flatpeak sft), then give its checkpoint as model.path"
            )
        return self


class ReferenceConfig(StrictConfig):
    """The reference model of the KL terms."""

    model: str | None = None
    """A directory or Hub name; null: the policy at the start of RL, after SFT."""
    keep: bool = False
    """Keep a reference and log its KL even if kl.coefficient is 0."""
    reset_every: Annotated[int, Field(ge=1)] | None = None
    """Steps of RL between resets, at which the current policy becomes the reference; null: no resets."""
    reset_at_kl: Annotated[float, Field(gt=0)] | None = None
    """A limit of policy/kl_reference: after a step above it, the current policy becomes the reference; null: no limit.
    This and `reset_every` imply `keep`."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The reference is an average of the policy's weights: after each step, this share of the old average and 1 - ema
    of the policy. Implies `keep`. null: it is not."""
    reset_optimizer: bool = False
    """At a reset, also clear the optimizer's moments and step counts; the learning rate's schedule continues."""
    offload: bool = False
    """Keep the reference's weights in host memory and move them to the CUDA device only for scoring; scores stay
    bit-identical. Weights shared with the policy, as under adapters, stay on the device. No effect on a CPU."""

    @property
    def resets(self) -> bool:
        """Whether there is a rule that resets the reference."""
        return self.reset_every is not None or self.reset_at_kl is not None

    @property
    def moves(self) -> bool:
        """Whether the reference changes in the course of a run."""
        return self.resets or self.ema is not None

    @model_validator(mode="after")
    def _averages_the_policy(self) -> ReferenceConfig:
        if self.ema is not None and (self.model is not None or self.resets):
            other = "reference.model" if self.model is not None else "resets"
            raise ValueError(f"reference.ema={self.ema:g} with {other}: the average begins at the policy; choose one")
        return self

    @model_validator(mode="after")
    def _optimizer_is_reset_with_the_reference(self) -> ReferenceConfig:
        if self.reset_optimizer and not self.resets:
            raise ValueError(
                "reference.reset_optimizer=true has no effect without resets: set reference.reset_every or "
                "reference.reset_at_kl, or set reference.reset_optimizer=false"
            )
        return self
