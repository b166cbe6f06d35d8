"""The model of a planned run: its modules without weights.

Modules are made on torch's `meta` device from config.json alone, so that numbers of parameters are exact although no
weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flatpeak.errors import UserError, brief
from flatpeak.policy.compatibility import unsupported
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import adapter_source, check_source, is_quantized, new_shape
from flatpeak.utils.adapters import LoraConfig, add_adapters
from flatpeak.utils.huggingface import load_errors, local_or_hub


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A causal language model as a recipe would load it, without weights."""

    config: ModelConfig
    """The source; if `model.path` names an adapter, its base with the adapter on it."""
    shape: Any
    """The transformers configuration."""
    measured: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    """Results of dry runs, by what they depend on: plans with other settings share most of them."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    @property
    def layers(self) -> int:
        """The number of repeated layers."""
        count: int = self.shape.num_hidden_layers
        return count

    @property
    def vocabulary(self) -> int:
        """The number of tokens for which the output layer computes logits."""
        return len(causal_of(self.modules).get_output_embeddings().weight)

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and completion together; None if the model names no limit."""
        length: int | None = getattr(self.shape, "max_position_embeddings", None)
        return length

    @cached_property
    def modules(self) -> Any:
        """All modules, including adapters, on the meta device."""
        return self.build(self.layers)

    @cached_property
    def fallback(self) -> str | None:
        """The reason why the native engine does not support the model; None if, as far as is known, it does."""
        return unsupported(causal_of(self.modules))

    @property
    def below_float32(self) -> bool:
        """Whether weights are stored in less than float32."""
        return self.dtype != torch.float32 or self.config.quantization is not None

    def build(self, layers: int) -> Any:
        """The modules of the same model with this many layers, on the meta device."""
        shape = self.shape if layers == self.layers else with_layers(self.shape, layers)
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    shape, dtype=self.dtype, trust_remote_code=self.config.trust_remote_code
                )
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise UserError(f"model: {type(shape).__name__} describes no causal model: {brief(error)}") from error
        if self.config.lora is None:
            return model
        with torch.device("meta"):
            return _with_adapters(model, self.config.lora)


def read_model(config: ModelConfig) -> PlannedModel:
    """The model of `model.path`, from its config.json alone; UserError if there is none.

    For a model on the Hub, only that file is fetched, or taken from the cache.
    """
    check_source(config, tokenizer=False)
    config = adapter_source(config)
    assert config.path is not None
    with load_errors(config.path, where="model.path"):
        shape = AutoConfig.from_pretrained(
            local_or_hub(config.path, revision=config.revision),
            revision=config.revision or "main",
            trust_remote_code=config.trust_remote_code,
        )
    is_quantized(shape, config)
    if not hasattr(shape, "num_hidden_layers"):
        raise UserError(
            f"model.path={config.path}: its config.json has no num_hidden_layers, as that of a causal language model "
            "has; name such a model"
        )
    return PlannedModel(config=config, shape=shape)


def new_model(config: ModelConfig, tokenizer: Any) -> PlannedModel:
    """The model of `model.new` for its tokenizer; UserError if its settings fit no architecture."""
    assert config.new is not None
    return PlannedModel(config=config, shape=new_shape(config.new, tokenizer))


def _with_adapters(model: Any, config: LoraConfig) -> Any:
    """A peft model with the adapters that a recipe requests; of saved adapters only the settings are read."""
    if config.adapter is None:
        return add_adapters(model, config, seed=0)
    import peft  # imported here because it is an extra

    with load_errors(config.adapter, where="model.lora.adapter", kind="an adapter"):
        settings = peft.PeftConfig.from_pretrained(local_or_hub(config.adapter))
        settings.inference_mode, settings.lora_dropout = False, config.dropout
        return peft.get_peft_model(model, settings)


def causal_of(modules: Any) -> Any:
    """The transformers model inside a peft model, or the model itself."""
    return modules.get_base_model() if hasattr(modules, "get_base_model") else modules


def with_layers(shape: Any, layers: int) -> Any:
    """The configuration of the same model with this many layers: lists by layer are cut."""
    count = shape.num_hidden_layers
    settings = {
        key: value[:layers] if isinstance(value, list) and len(value) == count else value
        for key, value in shape.to_dict().items()
    }
    settings[shape.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = layers
    return type(shape).from_dict(settings)
