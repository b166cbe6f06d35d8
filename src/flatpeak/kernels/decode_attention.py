"""Attention of one new token per slot over the keys of its prompt and its completion: in torch, or by a GPU kernel.

`decode_attention` uses the Triton kernel (decode_attention_triton) if it is available and its results on this device
match exact ones; otherwise it uses torch. policy/kv_cache.py has a picture of the memory that both read.

Shape letters: R slots being decoded (the first R of S), H heads, D head dimension, T columns of a slot, A entries of
prompts, C columns of all prompts' key heads, W tiles. The prompt of entry a has a region of columns_A[a] columns for
each key head; the first region begins at index starts_A[a] * Hkv of the prompts' keys and values, and the regions of
the other heads follow. No function here reads a value back to the host, and no shape depends on a value, so a CUDA
graph can capture calls.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatpeak.kernels.gpu_kernels import first_line, report_fault
from flatpeak.kernels.prompt_tiles import PromptTiles

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest allowed difference from the float64 result for N(0, 1) inputs; above it the kernel is not used."""
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
MOST_COLUMNS = 2**18
"""The most keys, over all slots, that plain torch copies at a time."""


def decode_attention(
    query_RHD: Tensor,
    keys_SHTD: Tensor,
    values_SHTD: Tensor,
    lengths_S: Tensor,
    prompt_keys_CD: Tensor,
    prompt_values_CD: Tensor,
    prompt_S: Tensor,
    prompt_lengths_A: Tensor,
    starts_A: Tensor,
    columns_A: Tensor,
    *,
    prompt_columns: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    tiles: PromptTiles | None = None,
) -> Tensor:
    """softmax(softcap * tanh(scale * q k / softcap)) v over the keys of the prompt and then the slot's: [R, Hq, D].

    Slot s sees the first lengths_S[s] of its columns, up to that of the query's token, and the first
    prompt_lengths_A[prompt_S[s]] columns of its prompt; with a window, only the last `window` of these positions. No
    region has more than `prompt_columns` columns. `tiles` saves the kernel from sorting the slots by prompt in every
    layer.
    """
    tensors = (query_RHD, keys_SHTD, values_SHTD, lengths_S)
    prompts = (prompt_keys_CD, prompt_values_CD, prompt_S, prompt_lengths_A, starts_A, columns_A)
    settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    if not uses_kernel(query_RHD, keys_SHTD, window=window, softcap=softcap):
        return reference_attention(*tensors, *prompts, prompt_columns=prompt_columns, **settings)
    from flatpeak.kernels.decode_attention_triton import kernel_attention

    if tiles is None:
        slots, heads = query_RHD.shape[:2]
        repeats = heads // keys_SHTD.shape[1]
        tiles = PromptTiles.build(prompt_S[:slots], num_entries=len(prompt_lengths_A), repeats=repeats)
    return kernel_attention(*tensors, *prompts, prompt_columns=prompt_columns, **settings, tiles=tiles)


def reference_attention(
    query_RHD: Tensor,
    keys_SHTD: Tensor,
    values_SHTD: Tensor,
    lengths_S: Tensor,
    prompt_keys_CD: Tensor,
    prompt_values_CD: Tensor,
    prompt_S: Tensor,
    prompt_lengths_A: Tensor,
    starts_A: Tensor,
    columns_A: Tensor,
    *,
    prompt_columns: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`decode_attention` in torch, for a few slots at a time. Columns that no query sees must be finite too."""
    slots, heads, dim = query_RHD.shape
    kv_heads, columns = keys_SHTD.shape[1:3]
    # Query heads that share a key head become its query rows, so that keys are not repeated.
    folded_RHQD = query_RHD.reshape(slots, kv_heads, heads // kv_heads, dim)
    head_H1 = torch.arange(kv_heads, device=query_RHD.device)[:, None]
    position = torch.arange(prompt_columns, device=query_RHD.device)
    at_once = max(1, MOST_COLUMNS // (prompt_columns + columns))
    attended = []
    for first in range(0, slots, at_once):
        chosen = slice(first, min(first + at_once, slots))
        prompt_R = prompt_S[chosen]
        prompt_lengths_R = prompt_lengths_A.index_select(0, prompt_R)
        columns_R, start_R = (table.index_select(0, prompt_R)[:, None, None] for table in (columns_A, starts_A))
        inside = torch.where(position < prompt_lengths_R[:, None, None], position, 0)
        index_RHL = start_R * kv_heads + head_H1 * columns_R + inside
        visible = visible_keys(
            lengths_S[chosen], prompt_lengths_R, prompt_columns=prompt_columns, columns=columns, window=window
        )
        keys = torch.cat([prompt_keys_CD[index_RHL], keys_SHTD[chosen]], dim=2)
        values = torch.cat([prompt_values_CD[index_RHL], values_SHTD[chosen]], dim=2)
        attended.append(_attend_side_by_side(folded_RHQD[chosen], keys, values, visible, scale=scale, softcap=softcap))
    return torch.cat(attended).reshape(slots, heads, values_SHTD.shape[-1])


def _attend_side_by_side(
    query_RHQD: Tensor,
    keys_RHKD: Tensor,
    values_RHKD: Tensor,
    visible_RK: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    visible = visible_RK[:, None, None, :]
    if softcap is None:
        return F.scaled_dot_product_attention(query_RHQD, keys_RHKD, values_RHKD, attn_mask=visible, scale=scale)
    exact = torch.promote_types(query_RHQD.dtype, torch.float32)
    scores = query_RHQD.to(exact) @ keys_RHKD.to(exact).transpose(-1, -2) * scale
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~visible, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ values_RHKD.to(exact)).to(query_RHQD.dtype)


def visible_keys(
    lengths_R: Tensor, prompt_lengths_R: Tensor, *, prompt_columns: int, columns: int, window: int | None
) -> Tensor:
    """bool [R, L + T]: whether each slot's newest token sees each prompt column, and then each column of the slot."""
    prompt_position = torch.arange(prompt_columns, device=lengths_R.device)
    own_position = torch.arange(columns, device=lengths_R.device)
    on_prompt = prompt_position < prompt_lengths_R[:, None]
    on_own = own_position < lengths_R[:, None]
    if window is not None:
        on_prompt = on_prompt & (prompt_position >= (prompt_lengths_R + lengths_R - window)[:, None])
        on_own = on_own & (own_position >= (lengths_R - window)[:, None])
    return torch.cat([on_prompt, on_own], dim=1)


def uses_kernel(query_RHD: Tensor, keys_SHTD: Tensor, *, window: int | None, softcap: float | None) -> bool:
    """Whether `decode_attention` runs the kernel for such tensors. The first call on a GPU compiles and checks it."""
    if query_RHD.device.type != "cuda":
        return False
    return (
        kernel_fault(
            device=query_RHD.device,
            dtype=query_RHD.dtype,
            dim=query_RHD.shape[-1],
            heads=query_RHD.shape[1],
            kv_heads=keys_SHTD.shape[1],
            windowed=window is not None,
            softcapped=softcap is not None,
        )
        is None
    )


@cache
def kernel_fault(
    *, device: torch.device, dtype: torch.dtype, dim: int, heads: int, kv_heads: int, windowed: bool, softcapped: bool
) -> str | None:
    """The reason why the kernel cannot be used for such heads; None if its results for them match exact ones.

    The first call runs the kernel, so it must not happen while a graph is being captured.
    """
    fault = _unserved(dtype=dtype, dim=dim, heads=heads, kv_heads=kv_heads) or _disagreement(
        device=device, dtype=dtype, dim=dim, heads=heads, kv_heads=kv_heads, windowed=windowed, softcapped=softcapped
    )
    if fault is not None:
        report_fault("decoding runs", fault)
    return fault


def _unserved(*, dtype: torch.dtype, dim: int, heads: int, kv_heads: int) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in TOLERANCES:
        return f"it computes in float32 and bfloat16, not in {dtype}"
    if dim not in HEAD_DIMS:
        return f"a head dimension of {dim} is not among {HEAD_DIMS}"
    if heads // kv_heads > 16:
        return f"{heads // kv_heads} query heads per key head are more than 16"
    return None


def _disagreement(
    *, device: torch.device, dtype: torch.dtype, dim: int, heads: int, kv_heads: int, windowed: bool, softcapped: bool
) -> str | None:
    problem: dict[str, Any] = example_problem(device=device, dtype=dtype, dim=dim, heads=heads, kv_heads=kv_heads)
    settings: dict[str, Any] = {
        "scale": dim**-0.5,
        "window": 100 if windowed else None,
        "softcap": 5.0 if softcapped else None,
    }
    try:
        from flatpeak.kernels.decode_attention_triton import kernel_attention

        tiles = PromptTiles.build(problem["prompt_S"], num_entries=3, repeats=heads // kv_heads)
        attended = kernel_attention(**problem, **settings, tiles=tiles).double()
    except Exception as error:  # compilers and drivers raise various types of errors; torch is the fallback
        return first_line(error)
    exact: dict[str, Any] = {
        name: given.double() if isinstance(given, Tensor) and given.is_floating_point() else given
        for name, given in problem.items()
    }
    gap = float((attended - reference_attention(**exact, **settings)).abs().max())
    return None if gap <= TOLERANCES[dtype] else f"its results are off by {gap:.1e} (allowed: {TOLERANCES[dtype]:.0e})"


def example_problem(*, device: torch.device, dtype: torch.dtype, dim: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Arguments for `reference_attention` and the kernel: 5 slots, 2 of 3 prompts, uneven lengths, two region sizes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, device=device)

    return {
        "query_RHD": normal(5, heads, dim),
        "keys_SHTD": normal(5, kv_heads, 576, dim),
        "values_SHTD": normal(5, kv_heads, 576, dim),
        "lengths_S": integers(1, 576, 70, 300, 64),
        "prompt_keys_CD": normal(448 * kv_heads, dim),
        "prompt_values_CD": normal(448 * kv_heads, dim),
        "prompt_S": integers(2, 0, 2, 2, 0),
        "prompt_lengths_A": integers(320, 64, 33),
        "starts_A": integers(128, 0, 64),
        "columns_A": integers(320, 64, 64),
        "prompt_columns": 320,
    }
