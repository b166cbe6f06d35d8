"""Attention, RMSNorm, SwiGLU and GELU of training passes by the native kernels, as functions of autograd.

float32 on a CPU, differentiable once. kernels.matmul has the products of linear layers.

Shape letters: S tokens of a packed row, Hq query heads, Hkv key heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatpeak.kernels.native.build import call, library, record


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Prompts of a packed row with their responses. A segment of rows attends to itself and its group's prompt."""

    bounds: Tensor
    """int64 [groups + 1]: the index of each group's first segment, its prompt; then the number of segments."""
    segments: Tensor
    """int64 [segments, 2]: first row and number of rows."""


def attention(states: Sequence[Tensor], groups: Groups, scale: float) -> Tensor:
    """softmax(scale q k) v within groups, [S, Hq, D], for q [S, Hq, D] and k, v [S, Hkv, D]; 0 in other rows."""
    output: Tensor = _PackedAttention.apply(*states, groups, scale)
    return output


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: Groups, scale: float) -> Tensor:
        q, k, v = states = [_whole_halves(each) for each in (query, key, value)]
        output, log_sums = q.new_zeros(q.shape), q.new_empty(q.shape[:2])
        call("attention", _described(states, groups, scale), output, log_sums, torch.get_num_threads())
        ctx.save_for_backward(q, k, v, output, log_sums, groups.bounds, groups.segments)
        ctx.scale, ctx.dim = scale, query.shape[-1]
        return output[..., : ctx.dim]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_sums, bounds, segments = ctx.saved_tensors
        grad_output = _whole_halves(grad_output).contiguous()
        grads = [each.new_zeros(each.shape) for each in (q, k, v)]
        grad_q, grad_k, grad_v = grads
        gradients = record(output=output, sums=log_sums, of_output=grad_output, q=grad_q, k=grad_k, v=grad_v)
        described = _described([q, k, v], Groups(bounds=bounds, segments=segments), ctx.scale)
        call("attention_backward", described, gradients, torch.get_num_threads())
        return *(grad[..., : ctx.dim] for grad in grads), None, None


def _whole_halves(states: Tensor) -> Tensor:
    """States [S, H, D] with contiguous heads, and D padded with zeros to a multiple of half a vector."""
    missing = -states.shape[-1] % (library().vector_width() // 2)
    if missing:
        return F.pad(states, (0, missing))
    return states if states.stride()[1:] == (states.shape[2], 1) else states.contiguous()


def _described(states: Sequence[Tensor], groups: Groups, scale: float) -> Any:
    query, key, value = states
    return record(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        dim=query.shape[2],
        groups=len(groups.bounds) - 1,
        bounds=groups.bounds,
        segments=groups.segments,
        q=query,
        k=key,
        v=value,
        q_row=query.stride(0),
        k_row=key.stride(0),
        v_row=value.stride(0),
        scale=scale,
    )


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """w x / sqrt(mean(x^2) + epsilon) over the last dimension, which must be a multiple of the vector width."""
    output: Tensor = _RMSNorm.apply(states, weight, epsilon)
    return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        states, weight = states.contiguous(), weight.contiguous()
        rows, size = states.numel() // len(weight), len(weight)
        output, inverse = torch.empty_like(states), states.new_empty(rows)
        call("rms_norm", states, weight, rows, size, float(epsilon), output, inverse, torch.get_num_threads())
        ctx.save_for_backward(states, weight, inverse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, inverse = ctx.saved_tensors
        rows, size = len(inverse), len(weight)
        grad, partial = torch.empty_like(states), states.new_zeros(-(-rows // library().norm_rows()), size)
        given = (states, weight, inverse, grad_output.contiguous(), rows, size)
        call("rms_norm_backward", *given, grad, partial, torch.get_num_threads())
        return grad, partial.sum(0), None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up; the number of elements must be a multiple of the vector width."""
    output: Tensor = _Activation.apply(gate, up)
    return output


def gelu(states: Tensor) -> Tensor:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2; the number of elements as in `swiglu`."""
    output: Tensor = _Activation.apply(states, None)
    return output


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, up: Tensor | None) -> Tensor:
        states, up = states.contiguous(), None if up is None else up.contiguous()
        output = torch.empty_like(states)
        call("activation", states, up, states.numel(), output, torch.get_num_threads())
        ctx.save_for_backward(states, up)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor | None]:
        states, up = ctx.saved_tensors
        grads = torch.empty_like(states), None if up is None else torch.empty_like(up)
        given = (states, up, grad_output.contiguous(), states.numel())
        call("activation_backward", *given, *grads, torch.get_num_threads())
        return grads
