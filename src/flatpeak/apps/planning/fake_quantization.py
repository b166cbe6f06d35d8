"""Layers in 4 bits on tensors without data, whose weights are expanded for each product as bitsandbytes expands them.

Weights themselves are counted by the inventory; these layers take what their passes take.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is expanded from 4 bits for each product, and again in the backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input W^T + b."""
        output: Tensor = _Expanded.apply(input, self.weight, self.bias)
        return output


class QuantizedConv1D(Conv1D):
    """GPT-2's linear layer likewise, whose weight is transposed."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        output: Tensor = _Expanded.apply(x, self.weight.t(), self.bias)
        return output


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(input, torch.empty_like(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ torch.empty_like(weight), None, None


def quantize(layers: Iterable[nn.Module]) -> None:
    """Exchange the classes of these linear layers."""
    for layer in layers:
        layer.__class__ = QuantizedLinear if isinstance(layer, nn.Linear) else QuantizedConv1D


def expand_adapted(modules: nn.Module) -> None:
    """Compute layers in 4 bits and their adapters as one product, as policy.adapted_layers does on a CPU."""
    from flatpeak.policy.adapted_layers import AdaptedLinear  # here, because it loads peft

    class ExpandedLinear(AdaptedLinear):
        """A layer with an adapter whose base is expanded in each pass."""

        def knows(self, base: nn.Module) -> bool:
            return True

        def matrix(self) -> Tensor:
            return torch.empty_like(self.base_layer.weight)

    for module in modules.modules():
        if type(module) is AdaptedLinear and isinstance(module.base_layer, QuantizedLinear):
            module.__class__ = ExpandedLinear
