# mypy: disable-error-code="no-untyped-def,untyped-decorator,unused-ignore"
"""decode_attention in Triton: programs attend to chunks of keys in parallel, then merge them by log-sum-exp.

The first programs attend from all query rows of a tile of slots with the same prompt to a chunk of the prompt. The
other programs attend to a chunk of one slot's keys. The device reads lengths, prompts and tiles: chunks past the end do
nothing, and every token has the same launch. M: query rows of one key head, N: keys, C: chunks.
"""

from __future__ import annotations

from functools import cache

import torch
import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]
from torch import Tensor

from flatpeak.kernels.prompt_tiles import TILE_ROWS, PromptTiles

LARGEST_CHUNK = 512
MOST_CHUNKS = 64
PROGRAMS_PER_PROCESSOR = 2
"""Chunks are halved until so many programs read keys."""
STAGE_BYTES = 16_384
"""Bytes of a block of keys."""
STAGES, WARPS = 3, 4
MERGED_AT_ONCE = 16


def kernel_attention(
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
    window: int | None,
    softcap: float | None,
    tiles: PromptTiles,
    chunk: int | None = None,
) -> Tensor:
    """`decode_attention` by the kernel. Columns of slots and regions, and `chunk` (in keys), are multiples of 64."""
    slots, heads, dim = query_RHD.shape
    kv_heads, columns = keys_SHTD.shape[1:3]
    for states in (keys_SHTD, values_SHTD, prompt_keys_CD, prompt_values_CD):
        assert states.is_contiguous() and states.shape[-1] == dim, "the kernel reads contiguous keys and values"
    num_tiles = len(tiles.starts_W) - 1
    chunk = chunk or choose_chunk(max(columns, prompt_columns), programs=slots * kv_heads, device=query_RHD.device)
    chunks, prompt_chunks = -(-columns // chunk), -(-prompt_columns // chunk)
    shape_RHC = (slots, heads, prompt_chunks + chunks)
    partial_RHCD = torch.empty((*shape_RHC, dim), dtype=torch.float32, device=query_RHD.device)
    logsum_RHC = torch.empty(shape_RHC, dtype=torch.float32, device=query_RHD.device)
    # A slot's prompt chunks belong to the slot's tile, so only one program writes each entry of logsum_RHC.
    _attend_chunks[(num_tiles * prompt_chunks + slots * chunks, kv_heads)](
        *(query_RHD.contiguous(), partial_RHCD, logsum_RHC),
        *(keys_SHTD, values_SHTD, lengths_S, columns, chunks),
        *(prompt_keys_CD, prompt_values_CD, prompt_lengths_A, starts_A, columns_A, prompt_S, prompt_chunks),
        *(tiles.order_R, tiles.starts_W, tiles.counts_W, num_tiles),
        *(chunk, scale, softcap or 1.0, window or 0),
        KV_HEADS=kv_heads,
        REPEATS=heads // kv_heads,
        TILE=TILE_ROWS,
        WINDOWED=window is not None,
        SOFTCAPPED=softcap is not None,
        **launch_settings(dim, repeats=heads // kv_heads, item_size=query_RHD.element_size()),
    )
    output_RHD = torch.empty_like(query_RHD, memory_format=torch.contiguous_format)
    block_d = triton.next_power_of_2(dim)
    _merge_chunks[(slots, heads)](
        *(partial_RHCD, logsum_RHC, output_RHD), prompt_chunks + chunks, heads, dim, block_d, MERGED_AT_ONCE
    )
    return output_RHD


def launch_settings(dim: int, *, repeats: int, item_size: int) -> dict[str, int]:
    """Block sizes: shared memory holds a few stages of key and value blocks."""
    block_d = triton.next_power_of_2(dim)
    return {
        "DIM": dim,
        "BLOCK_D": block_d,
        "BLOCK_N": min(64, max(16, STAGE_BYTES // (block_d * item_size))),
        "OWN_ROWS": max(16, triton.next_power_of_2(repeats)),
        "num_warps": WARPS,
        "num_stages": STAGES,
    }


def choose_chunk(columns: int, *, programs: int, device: torch.device) -> int:
    """The number of keys per program that gives every processor work, from the shapes alone."""
    chunk = LARGEST_CHUNK
    while chunk > 64 and programs * -(-columns // chunk) < PROGRAMS_PER_PROCESSOR * _processors(device):
        chunk //= 2
    while -(-columns // chunk) > MOST_CHUNKS:
        chunk *= 2
    return chunk


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# fmt: off
# Each value that is 1 or a multiple of 16 would otherwise have kernels of its own, compiled in the middle of a rollout.
@triton.jit(do_not_specialize=["chunks", "prompt_chunks", "num_tiles", "window"])
def _attend_chunks(
    query, partial, logsum,
    keys, values, lengths, columns, chunks,
    prompt_keys, prompt_values, prompt_lengths, region_starts, region_columns, prompts, prompt_chunks,
    order, tile_starts, tile_counts, num_tiles,
    chunk, scale, softcap, window,
    KV_HEADS: tl.constexpr, REPEATS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    OWN_ROWS: tl.constexpr, TILE: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr,
):
    """Attend to one chunk of a tile's prompt, or to one chunk of a slot's keys."""
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    all_chunks = prompt_chunks + chunks
    # The branches use different names for tensors of different shapes, because the compiler merges equal names.
    if program < num_tiles * prompt_chunks:
        tile = program // prompt_chunks
        index = program % prompt_chunks
        start = tl.load(tile_starts + tile)
        shared_M = tl.arange(0, TILE)
        member_M = shared_M // REPEATS
        count = tl.load(tile_counts + tile)
        valid_M = member_M < count
        slot_M = tl.load(order + start + member_M, mask=valid_M, other=0)
        prompt = tl.load(prompts + tl.load(order + start))
        length = tl.where(count > 0, tl.load(prompt_lengths + prompt), 0).to(tl.int32)  # no keys for unused tiles
        newest_M = length + tl.load(lengths + slot_M).to(tl.int32)
        base = (tl.load(region_starts + prompt) * KV_HEADS + kv_head * tl.load(region_columns + prompt)) * DIM
        _attend(
            query, partial, logsum, prompt_keys + base, prompt_values + base, slot_M, shared_M, valid_M, newest_M,
            length, index, index, kv_head, all_chunks, chunk, scale, softcap, window,
            KV_HEADS, REPEATS, DIM, BLOCK_D, BLOCK_N, WINDOWED, SOFTCAPPED,
        )
    else:
        own = program - num_tiles * prompt_chunks
        index = own % chunks
        slot = (own // chunks).to(tl.int64)
        row_M = tl.arange(0, OWN_ROWS)
        length = tl.load(lengths + slot).to(tl.int32)
        base = (slot * KV_HEADS + kv_head) * columns * DIM
        _attend(
            query, partial, logsum, keys + base, values + base, slot + tl.zeros([OWN_ROWS], tl.int64), row_M,
            row_M < REPEATS, length + tl.zeros([OWN_ROWS], tl.int32),
            length, index, prompt_chunks + index, kv_head, all_chunks, chunk, scale, softcap, window,
            KV_HEADS, REPEATS, DIM, BLOCK_D, BLOCK_N, WINDOWED, SOFTCAPPED,
        )


@triton.jit
def _attend(
    query, partial, logsum, keys, values, slot_M, row_M, valid_M, newest_M,
    length, index, entry, kv_head, all_chunks, chunk, scale, softcap, window,
    KV_HEADS: tl.constexpr, REPEATS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr,
):
    """Softmax over chunk number `index` of `length` keys, written with its log-sum-exp as chunk `entry` of each row.

    `newest_M` counts the columns up to and including each row's newest token, numbered as these keys.
    """
    d = tl.arange(0, BLOCK_D)
    line_M = slot_M * (KV_HEADS * REPEATS) + kv_head * REPEATS + row_M % REPEATS
    begin = index * chunk
    end = tl.minimum(begin + chunk, length)
    lowest_M = newest_M - window
    if WINDOWED:
        lowest = tl.maximum(tl.min(tl.where(valid_M, lowest_M, 2147483647), 0), 0)
        begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)
    q_MD = tl.load(
        query + line_M[:, None] * DIM + d[None, :], mask=valid_M[:, None] & (d < DIM)[None, :], other=0.0
    )
    top_M = tl.full([row_M.shape[0]], float("-inf"), tl.float32)
    sum_M = tl.zeros([row_M.shape[0]], tl.float32)
    acc_MD = tl.zeros([row_M.shape[0], BLOCK_D], tl.float32)
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside_ND = (n < end)[:, None] & (d < DIM)[None, :]
        k_ND = tl.load(keys + n[:, None] * DIM + d[None, :], mask=inside_ND, other=0.0)
        score_MN = _scores(q_MD, k_ND, n, end, lowest_M, scale, softcap, WINDOWED, SOFTCAPPED)
        new_M = tl.maximum(top_M, tl.max(score_MN, 1))
        shift_M = tl.where(new_M == float("-inf"), 0.0, new_M)  # for rows that have seen no key yet
        weight_MN = tl.exp(score_MN - shift_M[:, None])
        decay_M = tl.exp(top_M - shift_M)
        v_ND = tl.load(values + n[:, None] * DIM + d[None, :], mask=inside_ND, other=0.0)
        sum_M = sum_M * decay_M + tl.sum(weight_MN, 1)
        acc_MD = acc_MD * decay_M[:, None] + tl.dot(weight_MN.to(v_ND.dtype), v_ND, input_precision="tf32x3")
        top_M = new_M
    seen_M = sum_M > 0
    total_M = tl.where(seen_M, sum_M, 1.0)
    target_M = line_M * all_chunks + entry
    tl.store(logsum + target_M, tl.where(seen_M, top_M + tl.log(total_M), float("-inf")), mask=valid_M)
    tl.store(
        partial + target_M[:, None] * DIM + d[None, :],
        acc_MD / total_M[:, None],
        mask=(valid_M & seen_M)[:, None] & (d < DIM)[None, :],
    )


@triton.jit
def _scores(
    q_MD, k_ND, n, end, lowest_M, scale, softcap, WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr
):
    """Scores of query rows against keys number `n`; minus infinity if a row does not see a key."""
    # For float32: three TF32 products on tensor cores, exact to about 1e-6. Ignored for bfloat16.
    score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="tf32x3") * scale
    if SOFTCAPPED:
        score_MN = softcap * (2.0 * tl.sigmoid(2.0 * score_MN / softcap) - 1.0)
    visible_MN = (n < end)[None, :]
    if WINDOWED:
        visible_MN = visible_MN & (n[None, :] >= lowest_M[:, None])
    return tl.where(visible_MN, score_MN, float("-inf"))


@triton.jit(do_not_specialize=["all_chunks"])
def _merge_chunks(
    partial, logsum, output, all_chunks, heads, dim, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Merge the chunks of one query head of one slot, weighted by exp of their log-sum-exp."""
    line = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    top = float("-inf")
    total = 0.0
    acc_D = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, all_chunks, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        logsum_C = tl.load(logsum + line * all_chunks + c, mask=c < all_chunks, other=float("-inf"))
        new = tl.maximum(top, tl.max(logsum_C, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weight_C = tl.exp(logsum_C - shift)
        decay = tl.exp(top - shift)
        # Entries of chunks without visible keys were never written.
        chunk_CD = tl.load(
            partial + (line * all_chunks + c)[:, None] * dim + d[None, :],
            mask=(logsum_C > float("-inf"))[:, None] & (d < dim)[None, :],
            other=0.0,
        )
        acc_D = acc_D * decay + tl.sum(weight_C[:, None] * chunk_CD, 0)
        total = total * decay + tl.sum(weight_C, 0)
        top = new
    tl.store(output + line * dim + d, (acc_D / total).to(output.dtype.element_ty), mask=d < dim)
# fmt: on
