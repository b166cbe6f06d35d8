"""From hidden states to logits, read off a transformers model once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatpeak.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """logits = softcap * tanh(logit_scale * (hidden W^T + b) / softcap)."""

    linear: nn.Linear
    softcap: float | None
    logit_scale: float

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """float32 [R, V]."""
        logits = self.linear(hidden_RD).float()
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def read_head(model: PreTrainedModel) -> Head:
    """Find the output layer and what the architecture does to its result. The start-up probe checks the outcome."""
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear:
        raise UserError(
            f"the output layer of {type(model).__name__} is {type(linear).__name__}, not a plain linear layer: "
            "leave lm_head out of adapters and quantization"
        )
    config = model.config
    scale = getattr(config, "logit_scale", None)  # cohere multiplies
    divisor = getattr(config, "logits_scaling", None)  # granite divides
    return Head(
        linear=linear,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=float(scale) if scale is not None else 1.0 / divisor if divisor else 1.0,
    )
