"""The precision of a model: what rounds more coarsely than float32, and the precise values behind such weights."""

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
"""If a CPU's bfloat16 product takes more than this times as long as a float32 one, it has no bfloat16 instructions."""
_TRIALS: Final = 4


def below_float32(model: nn.Module) -> bool:
    """Whether any computation in a model rounds more coarsely than float32.

    Lower-precision weights do, including those of a frozen or quantized base under float32 adapters, and so do autocast
    and matrix products in TF32 or bfloat16 (`torch.set_float32_matmul_precision`).
    """
    kinds = {(p.dtype, p.device.type) for p in model.parameters()}
    buffers = {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()}
    coarse = any(not dtype.is_floating_point or _coarse(dtype) for dtype, _ in kinds) or any(map(_coarse, buffers))
    return coarse or any(_computes_below(device) for _, device in kinds)


def _coarse(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


def _computes_below(device: str) -> bool:
    # Read from each backend: torch.get_float32_matmul_precision raises if this newer interface has been used.
    backend = torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    precisions = {backend.fp32_precision, torch.backends.fp32_precision}  # type: ignore[attr-defined]
    return torch.is_autocast_enabled(device) or not COARSE_PRECISIONS.isdisjoint(precisions)


def bfloat16_slowdown() -> float:
    """The time of a matrix product in bfloat16 over that in float32 on this machine's CPU, measured in 20 to 60 ms."""
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
    """The notice about a bfloat16 model on a CPU that computes faster in float32."""
    if not any(p.dtype == torch.bfloat16 and p.device.type == "cpu" for p in model.parameters()):
        return []
    if bfloat16_slowdown() < SLOW_BFLOAT16:
        return []
    return [  # without the measured ratio, which differs at each start: a resumed run would log the notice again
        f"bfloat16 products take over {SLOW_BFLOAT16:g} times as long as float32 ones on this CPU: give the model in "
        "float32, as model.dtype=float32 does"
    ]


def check_trainable(parameters: Sequence[nn.Parameter]) -> None:
    """UserError if there are no trainable weights, or if some are in float16."""
    if not parameters:
        raise UserError("no parameter of the model has requires_grad: unfreeze what is to be trained")
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise UserError(
            "the model has trainable weights in float16, whose small gradients underflow, and flatpeak scales no loss: "
            "give it in bfloat16 or float32, as model.to(torch.bfloat16) does"
        )


def master_weight(parameter: nn.Parameter) -> Tensor:
    """The precise value of a weight: a float32 copy if it is stored in less, else itself; UserError for float16."""
    check_trainable([parameter])
    precise = torch.promote_types(parameter.dtype, torch.float32)
    return parameter if parameter.dtype == precise else parameter.detach().to(precise)
