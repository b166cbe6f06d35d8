# mypy: disable-error-code="no-untyped-def,untyped-decorator,unused-ignore"
"""The elementwise operations of a decoding step in Triton, each as one launch where transformers needs three to ten.

They compute in float32 and round where transformers' modules round. R: slots; D: hidden or head dimension, H: heads.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]
from torch import Tensor


def add_and_normalize(update_RD: Tensor | None, residual_RD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Add the update to the residual in place, and return its RMS norm: w x / sqrt(mean(x^2) + epsilon), [R, D]."""
    rows, dim = residual_RD.shape
    output_RD = torch.empty_like(residual_RD)
    block = triton.next_power_of_2(dim)
    _add_and_normalize[(rows,)](
        *(residual_RD if update_RD is None else update_RD, residual_RD, weight_D, output_RD, dim, epsilon),
        ADDS=update_RD is not None,
        BLOCK=block,
        num_warps=8 if block > 2048 else 4,
    )
    return output_RD


def rotate_and_store(
    states_RF: Tensor,
    cosines_RD: Tensor,
    sines_RD: Tensor,
    keys_SHTD: Tensor,
    values_SHTD: Tensor,
    lengths_S: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    *,
    heads: int,
) -> Tensor:
    """Write each slot's new key, rotated, and value into column lengths_S[slot]; return the rotated queries [R, Hq, D].

    `states_RF`: queries, keys and values of all heads, concatenated. `norms`: weights of RMS norms of queries and keys
    within a head, and their epsilon.
    """
    rows = len(states_RF)
    kv_heads, columns, dim = keys_SHTD.shape[1:]
    query_RHD = states_RF.new_empty(rows, heads, dim)
    query_norm, key_norm, epsilon = norms or (cosines_RD, cosines_RD, 0.0)
    _rotate_and_store[(rows, heads + 2 * kv_heads)](
        *(states_RF, cosines_RD, sines_RD, query_RHD, keys_SHTD, values_SHTD, lengths_S, query_norm, key_norm),
        *(columns, epsilon),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2),
        NORMED=norms is not None,
        num_warps=1,
    )
    return query_RHD


def gated(gate_up_RF: Tensor) -> Tensor:
    """silu(gate) up: [R, 2 F] -> [R, F]."""
    rows, width = gate_up_RF.shape[0], gate_up_RF.shape[1] // 2
    output_RF = gate_up_RF.new_empty(rows, width)
    block = 1024
    _gated[(rows, triton.cdiv(width, block))](gate_up_RF, output_RF, width, BLOCK=block, num_warps=4)
    return output_RF


# fmt: off
@triton.jit
def _add_and_normalize(update, residual, weight, output, dim, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < dim
    x = tl.load(residual + row * dim + d, mask=inside, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(update + row * dim + d, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual + row * dim + d, x, mask=inside)
    wide = x.to(tl.float32)
    scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / dim + epsilon)).to(x.dtype)
    w = tl.load(weight + d, mask=inside, other=0.0)
    tl.store(output + row * dim + d, (w.to(tl.float32) * scaled.to(tl.float32)).to(x.dtype), mask=inside)


@triton.jit
def _normalized(first, second, weight, d, inside, epsilon, HALF: tl.constexpr):
    """The RMS norm of a head in halves, rounded as transformers rounds it."""
    scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + epsilon)
    kind = weight.dtype.element_ty
    low = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32) * (first * scale).to(kind).to(tl.float32)
    high = tl.load(weight + HALF + d, mask=inside, other=0.0).to(tl.float32) * (second * scale).to(kind).to(tl.float32)
    return low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)


@triton.jit
def _rotate_and_store(
    states, cosines, sines, query, keys, values, lengths, query_norm, key_norm, columns, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    source = states + (row * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + d
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = states.dtype.element_ty
    if head >= HEADS + KV_HEADS:
        column = tl.load(lengths + row)
        target = values + ((row * KV_HEADS + head - HEADS - KV_HEADS) * columns + column) * (2 * HALF) + d
        tl.store(target, first.to(kind), mask=inside)
        tl.store(target + HALF, second.to(kind), mask=inside)
    else:
        if NORMED:
            if head < HEADS:
                first, second = _normalized(first, second, query_norm, d, inside, epsilon, HALF)
            else:
                first, second = _normalized(first, second, key_norm, d, inside, epsilon, HALF)
        angle = row * (2 * HALF) + d
        cos_1 = tl.load(cosines + angle, mask=inside, other=0.0).to(tl.float32)
        cos_2 = tl.load(cosines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_1 = tl.load(sines + angle, mask=inside, other=0.0).to(tl.float32)
        sin_2 = tl.load(sines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        low = (first * cos_1 - second * sin_1).to(kind)
        high = (second * cos_2 + first * sin_2).to(kind)
        if head < HEADS:
            target = query + (row * HEADS + head) * (2 * HALF) + d
            tl.store(target, low, mask=inside)
            tl.store(target + HALF, high, mask=inside)
        else:
            column = tl.load(lengths + row)
            target = keys + ((row * KV_HEADS + head - HEADS) * columns + column) * (2 * HALF) + d
            tl.store(target, low, mask=inside)
            tl.store(target + HALF, high, mask=inside)


@triton.jit
def _gated(gate_up, output, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < width
    gate = tl.load(gate_up + row * 2 * width + f, mask=inside, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * width + f, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    act = (wide * tl.sigmoid(wide)).to(gate.dtype)
    tl.store(output + row * width + f, (act.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)
# fmt: on
