"""The precision in which a model computes."""

from __future__ import annotations

import torch
from torch import nn

COARSE_PRODUCTS = frozenset({"tf32", "bf16"})
"""Values of torch's `fp32_precision` that round the factors of a float32 product."""


def below_float32(model: nn.Module) -> bool:
    """Whether anything on the way through a model rounds more coarsely than float32.

    Weights in a lower precision do, those of a frozen or quantized base under float32 adapters included, and so do
    autocast and matrix products in TF32 or bfloat16 (`torch.set_float32_matmul_precision`).
    """
    kinds = {(p.dtype, p.device.type) for p in model.parameters()}
    buffers = {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()}
    coarse = any(not dtype.is_floating_point or _coarse(dtype) for dtype, _ in kinds) or any(map(_coarse, buffers))
    return coarse or any(_computes_below(device) for _, device in kinds)


def _coarse(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


def _computes_below(device: str) -> bool:
    # Asked of each backend: torch.get_float32_matmul_precision raises where somebody used this newer interface.
    backend = torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    products = {backend.fp32_precision, torch.backends.fp32_precision}  # type: ignore[attr-defined]
    return torch.is_autocast_enabled(device) or not COARSE_PRODUCTS.isdisjoint(products)
