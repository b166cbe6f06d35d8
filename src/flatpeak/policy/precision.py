"""The precision of a model: what rounds more coarsely than float32, and the precise values of such weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from flatpeak.errors import UserError

COARSE_PRECISIONS = frozenset({"tf32", "bf16"})
"""Values of torch's `fp32_precision` that round the factors of a float32 product."""
SLOW_BFLOAT16: Final = 2.0
"""If bfloat16 products take this many times as long as float32 products, the CPU has no bfloat16 instructions."""
_TRIALS: Final = 4


def below_float32(model: nn.Module) -> bool:
    """Whether any computation in a model rounds more coarsely than float32.

    This includes weights of lower precision, such as a frozen or quantized base under float32 adapters, autocast, and
    matrix products in TF32 or bfloat16 (`torch.set_float32_matmul_precision`).
    """
    kinds = {(p.dtype, p.device.type) for p in model.parameters()}
    buffers = {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()}
    coarse = any(not dtype.is_floating_point or _coarse(dtype) for dtype, _ in kinds) or any(map(_coarse, buffers))
    return coarse or any(_computes_below(device) for _, device in kinds)


def _coarse(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


def _computes_below(device: str) -> bool:
    # Read the setting of each backend: torch.get_float32_matmul_precision raises after use of this newer interface.
    backend = torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    precisions = {backend.fp32_precision, torch.backends.fp32_precision}  # type: ignore[attr-defined]
    return torch.is_autocast_enabled(device) or not COARSE_PRECISIONS.isdisjoint(precisions)


def bfloat16_slowdown() -> float:
    """The time of a bfloat16 matrix product on this CPU, relative to float32; measured in 20 to 60 ms."""
    return _product_seconds(torch.bfloat16) / _product_seconds(torch.float32)


@torch.no_grad()
def _product_seconds(dtype: torch.dtype) -> float:
    rows, weight = torch.ones(128, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    seconds = []
    for _ in range(_TRIALS):
        started = time.thread_time()
        nn.functional.linear(rows, weight)
        seconds.append(time.thread_time() - started)
    return min(seconds)


def slow_dtype_notices(model: nn.Module) -> list[str]:
    """The notice that a bfloat16 model on this CPU would be faster in float32, if so."""
    if not any(p.dtype == torch.bfloat16 and p.device.type == "cpu" for p in model.parameters()):
        return []
    if bfloat16_slowdown() < SLOW_BFLOAT16:
        return []
    return [  # without the measured ratio, which varies, so that a resumed run does not log the notice again
        f"bfloat16 products take over {SLOW_BFLOAT16:g} times as long as float32 products on this CPU: use float32, "
        "as with model.dtype=float32"
    ]


def check_trainable(parameters: Sequence[nn.Parameter]) -> None:
    """UserError if there are no trainable weights, or if some are in float16."""
    if not parameters:
        raise UserError("no parameter of the model has requires_grad: unfreeze the parameters to train")
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise UserError(
            "the model has trainable float16 weights: small gradients underflow, and flatpeak does not scale losses; "
            "use bfloat16 or float32, as with model.to(torch.bfloat16)"
        )


def master_weight(parameter: nn.Parameter) -> Tensor:
    """The precise value of a weight: a float32 copy if its type is less precise, else itself; UserError for float16."""
    check_trainable([parameter])
    precise = torch.promote_types(parameter.dtype, torch.float32)
    return parameter if parameter.dtype == precise else parameter.detach().to(precise)
