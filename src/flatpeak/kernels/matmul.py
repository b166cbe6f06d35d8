"""Matrix products in float32 on a CPU, by the faster of torch's two libraries.

torch multiplies float32 matrices with MKL, which uses AVX2 at most on processors of vendors other than Intel. On such a
processor with AVX-512, oneDNN, another part of torch, is more than twice as fast (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatpeak.kernels.processor import vendor

SMALLEST = 1 << 13
"""Weights with fewer entries use MKL, because oneDNN's fixed cost per call outweighs its speed."""
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KERNELS = 192
"""The number of kernels that oneDNN caches: one per shape, half a MiB each; its default is 1024."""
SETTING = "FLATPEAK_MATMUL"
"""The environment variable that overrides the choice: mkl or onednn."""


def linear(input_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Multiply like torch's `linear`: input W^T + b, [..., N], differentiable any number of times.

    Input and weight may be transposed views, so this function can compute every product of a backward pass.
    """
    if torch.compiler.is_compiling():  # inductor takes oneDNN's operator for its own, which has packed weights
        return F.linear(input_MK, weight_NK, bias_N)
    if not (served(weight_NK) and input_MK.dtype == torch.float32 and input_MK.numel()):
        return F.linear(input_MK, weight_NK, bias_N)
    if torch.is_grad_enabled():
        output: Tensor = _Linear.apply(input_MK, weight_NK, bias_N)
        return output
    return multiply(input_MK, weight_NK, bias_N)


def add_linear(sum_MN: Tensor, input_MK: Tensor, weight_NK: Tensor) -> None:
    """Add input W^T to a sum outside autograd, without a temporary product if torch multiplies in one type.

    On a GPU, factors in half precision are multiplied and summed in float32 too.
    """
    if sum_MN.dtype == input_MK.dtype and not served(weight_NK):
        sum_MN.addmm_(input_MK, weight_NK.t())
    elif sum_MN.device.type == "cuda":
        torch.addmm(sum_MN, input_MK, weight_NK.t(), out_dtype=sum_MN.dtype, out=sum_MN)
    else:
        sum_MN.add_(linear(input_MK, weight_NK))


def served(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by this matrix, decided by the weight alone.

    If the number of input rows mattered too, a row's result would depend on how many rows are computed with it.
    """
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.numel() >= SMALLEST
        and onednn_is_faster()
        and not torch.is_autocast_enabled("cpu")
    )


def pack(weight_NK: Tensor) -> Tensor:
    """A copy of the weight in oneDNN's layout, for `multiply`; later updates of the weight do not change it."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach())
    return packed


def multiply(input_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """input W^T + b by oneDNN, outside autograd; the weight may be packed, and the result may be a transposed view.

    oneDNN's operator first copies a transposed input, slowly. The gradient of a weight, grad^T input, is a product of
    two transposed views: if it copies less, it is computed as (input^T grad)^T.
    """
    swapped = bias_N is None and _copies_less_swapped(input_MK, weight_NK)
    first, second = (weight_NK, input_MK) if swapped else (input_MK, weight_NK)
    output: Tensor = torch.ops.mkldnn._linear_pointwise(first, second, bias_N, "none", [], "")
    return output.t() if swapped else output


def _copies_less_swapped(input_MK: Tensor, weight_NK: Tensor) -> bool:
    if not _is_transposed(input_MK) or len(weight_NK) == 1:  # swapped products with a vector sum in another order
        return False
    (M, K), N = input_MK.shape, len(weight_NK)
    copied_swapped = M * N  # the transposed result needs another copy
    if _is_transposed(weight_NK):
        copied_swapped += N * K
    return copied_swapped < M * K


def _is_transposed(matrix: Tensor) -> bool:
    return matrix.ndim == 2 and matrix.stride(0) == 1 < matrix.stride(1)


@cache
def onednn_is_faster() -> bool:
    """Whether float32 products on this machine's CPU go through oneDNN."""
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(KERNELS))  # oneDNN reads it when it creates the first kernel
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    setting = os.environ.get(SETTING, "auto")
    if setting in ("mkl", "onednn"):
        return available and setting == "onednn"
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return available and torch.backends.mkl.is_available() and has_avx512 and not _is_intel()


def _is_intel() -> bool:
    return vendor() in ("GenuineIntel", "")  # unknown: leave everything to torch


class _Linear(torch.autograd.Function):
    """A linear layer whose backward pass uses itself, so that second derivatives exist."""

    @staticmethod
    def forward(ctx: Any, input_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(input_MK, weight_NK)
        return multiply(input_MK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input_MK, weight_NK = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows_MN, rows_MK = grad_MN.reshape(-1, grad_MN.shape[-1]), input_MK.reshape(-1, input_MK.shape[-1])
        return (
            linear(grad_MN, weight_NK.t()) if needs_input else None,
            linear(rows_MN.t(), rows_MK.t()) if needs_weight else None,
            rows_MN.sum(0) if needs_bias else None,
        )
