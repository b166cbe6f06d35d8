"""A frozen linear layer with a low-rank adapter as one product, x W^T + b + s (x A^T) B^T (arXiv 2106.09685).

peft composes it from layers, which allocates three more tensors of the output's size (the adapter's product, its scaled
copy and the sum), and as many in the backward pass. Here both products are added in place to the base layer's output.
The backward pass keeps only x A^T and the input, which layers with the same input share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatpeak.kernels.matmul import linear


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The change s B A of a weight."""

    down_RK: Tensor
    """A."""
    up_NR: Tensor
    """B."""
    scaling: float


def adapted_linear(input_MK: Tensor, weight: Callable[[], Tensor], bias_N: Tensor | None, adapter: Adapter) -> Tensor:
    """Multiply by a frozen layer and its adapter: [..., N] in the input's dtype, differentiable any number of times.

    Gradients reach the input, A and B. `weight` returns W as [N, K] in the input's dtype. Each pass calls it, so that
    4-bit weights are dequantized only during use. The adapter's products are computed in its own dtype.
    """
    down_RK, up_NR = adapter.down_RK, adapter.up_NR
    if torch.is_grad_enabled():
        output: Tensor = _AdaptedLinear.apply(input_MK, weight, bias_N, down_RK, up_NR, adapter.scaling)
        return output
    return _forward(input_MK, weight, bias_N, down_RK, up_NR, adapter.scaling)[0]


def add_product(output_MN: Tensor, low_MR: Tensor, up_NR: Tensor, scaling: float = 1.0) -> Tensor:
    """Add scaling * low up^T; in place if both have the same dtype and autograd is not recording."""
    if torch.is_grad_enabled() or output_MN.dtype != low_MR.dtype:
        return torch.addmm(output_MN.to(low_MR.dtype), low_MR, up_NR.t(), alpha=scaling).to(output_MN.dtype)
    return output_MN.addmm_(low_MR, up_NR.t(), alpha=scaling)


def _forward(
    input_MK: Tensor,
    weight: Callable[[], Tensor],
    bias_N: Tensor | None,
    down_RK: Tensor,
    up_NR: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """The output, and x A^T."""
    output_MN = linear(input_MK, weight(), bias_N)
    low_MR = linear(_rows(input_MK).to(down_RK.dtype), down_RK)
    return add_product(_rows(output_MN), low_MR, up_NR, scaling).view(output_MN.shape), low_MR


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_MK: Tensor,
        weight: Callable[[], Tensor],
        bias_N: Tensor | None,
        down_RK: Tensor,
        up_NR: Tensor,
        scaling: float,
    ) -> Tensor:
        output_MN, low_MR = _forward(input_MK, weight, bias_N, down_RK, up_NR, scaling)
        ctx.save_for_backward(input_MK, low_MR, down_RK, up_NR)
        ctx.weight, ctx.scaling = weight, scaling
        return output_MN

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
        input_MK, low_MR, down_RK, up_NR = ctx.saved_tensors
        needs_input, _, _, needs_down, needs_up, _ = ctx.needs_input_grad
        precise_MN = _rows(grad_MN).to(up_NR.dtype)
        precise_MK = _rows(input_MK).to(down_RK.dtype)
        if torch.is_grad_enabled():  # recompute x A^T from input and A, for second derivatives
            low_MR = linear(precise_MK, down_RK)
        grad_low_MR = linear(precise_MN, up_NR.t()) * ctx.scaling
        # For few rows and many columns: this order of the products reads memory contiguously.
        grad_down_RK = linear(grad_low_MR.t(), precise_MK.t()) if needs_down else None
        grad_up_RN = linear((low_MR * ctx.scaling).t(), precise_MN.t()) if needs_up else None
        grad_input = None
        if needs_input:
            grad_MK = linear(grad_MN, ctx.weight().t())
            grad_input = add_product(_rows(grad_MK), grad_low_MR, down_RK.t()).view(grad_MK.shape)
        return grad_input, None, None, grad_down_RK, None if grad_up_RN is None else grad_up_RN.t(), None
