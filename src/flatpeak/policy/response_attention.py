"""Attention of many responses to their prompts and to themselves, block by block of query positions.

Responses stand padded side by side, the longest first. Block j holds positions jB ... (j+1)B - 1 of the responses that
reach it, which are the first N_j, some at a time where they are many; its keys are the prompt's and the response's own
up to the block's end. So padding costs at most one block per response, and keys that causality hides are not
multiplied: with answers of uneven length a quarter of the work of one padded square.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flatpeak.policy.attention import AttentionRule

BLOCK = 64
"""Query positions at a time."""
SUMMED = 192
"""Columns, a multiple of BLOCK, whose weighted sum is taken in one product. MKL cuts sums over 193 to 383 columns into
halves, so that the bits of a longer sum depend on how many columns of weight 0 follow."""
MOST_KEYS = 2**17
"""Columns of all responses together that a block lays side by side: each response has its prompt's keys beside it."""
MOST_SCORES = 2**23
"""Query positions times columns of a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Query positions start ... end - 1 of the responses first ... first + count - 1."""

    first: int
    count: int
    start: int
    end: int
    mask: Tensor
    """bool [count, 1, end - start, Lp + end]: what each query sees of its prompt and of its own response."""


def blocks(lengths_N: Tensor, prompt_lengths_N: Tensor, prompt_columns: int, window: int | None) -> list[Block]:
    """Cut responses of these lengths (descending) into blocks."""
    lengths = lengths_N.tolist()
    device = lengths_N.device
    prompt_place = torch.arange(prompt_columns, device=device)
    found = []
    for start in range(0, lengths[0], BLOCK):
        end = min(start + BLOCK, lengths[0])
        reaching = sum(length > start for length in lengths)
        place, own_place = torch.arange(start, end, device=device)[:, None], torch.arange(end, device=device)
        columns = prompt_columns + end
        at_once = max(1, min(MOST_KEYS // columns, MOST_SCORES // (columns * (end - start))))
        for first in range(0, reaching, at_once):
            count = min(at_once, reaching - first)
            before = prompt_lengths_N[first : first + count, None]
            on_own = (place >= own_place).expand(count, -1, -1)
            on_prompt = (prompt_place < before)[:, None].expand(-1, end - start, -1)
            if window is not None:
                on_own = on_own & (place - own_place < window)
                on_prompt = on_prompt & (before[:, None] + place - prompt_place < window)
            mask = torch.cat([on_prompt, on_own], -1)[:, None]
            found.append(Block(first=first, count=count, start=start, end=end, mask=mask))
    return found


def attend_in_blocks(
    rule: AttentionRule,
    queries: Tensor,
    prompts: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    prompt_N: Tensor,
    cut: list[Block],
) -> Tensor:
    """queries [N, Hq, L, D], prompts' keys and values [P, Hkv, Lp, D], own ones [N, Hkv, L, D] -> [N, Hq, L, D].

    Positions past a response's end get whatever; nothing reads them.
    """
    plain = rule.softcap is None and not rule.dropout and not torch.is_autocast_enabled("cpu")
    alike = queries.dtype == own[0].dtype == own[1].dtype and queries.shape[-1] == own[1].shape[-1]
    if plain and alike and queries.device.type == "cpu":
        attended: Tensor = _BlockAttention.apply(queries, *prompts, *own, prompt_N, cut, rule.scale)
        return attended
    output = queries.new_zeros(*queries.shape[:3], own[1].shape[-1])
    for block in cut:
        keys, values = (_keys(prompt, response, prompt_N, block) for prompt, response in zip(prompts, own, strict=True))
        _place(output, block).copy_(rule(_place(queries, block), keys, values, block.mask))
    return output


def _keys(prompts: Tensor, own: Tensor, prompt_N: Tensor, block: Block) -> Tensor:
    """[N_j, Hkv, Lp + end, D]."""
    return torch.cat([prompts.index_select(0, prompt_N[_rows(block)]), own[_rows(block), :, : block.end]], 2)


class _BlockAttention(torch.autograd.Function):
    """The same by torch's fused CPU kernel, with gradients summed in place and no copy of the keys kept.

    Query heads that share a key head are query rows of it, so that keys are not repeated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        prompt_keys: Tensor,
        prompt_values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        prompt_N: Tensor,
        cut: list[Block],
        scale: float,
    ) -> Tensor:
        output = torch.zeros_like(queries)
        sums = []
        for block in cut:
            rows, mask = _fold(queries, block, own_keys.shape[1]), _fold_mask(block, queries, own_keys)
            attended, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                rows,
                _keys(prompt_keys, own_keys, prompt_N, block),
                _keys(prompt_values, own_values, prompt_N, block),
                attn_mask=mask,
                scale=scale,
            )
            _place(output, block).copy_(_unfold(attended, queries.shape[1]))
            sums.append(log_sums)
        ctx.save_for_backward(queries, prompt_keys, prompt_values, own_keys, own_values, prompt_N, output, *sums)
        ctx.cut, ctx.scale = cut, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        queries, prompt_keys, prompt_values, own_keys, own_values, prompt_N, output, *sums = ctx.saved_tensors
        grads = [torch.zeros_like(tensor) for tensor in (queries, prompt_keys, prompt_values, own_keys, own_values)]
        kv_heads, columns = own_keys.shape[1], prompt_keys.shape[2]
        for block, log_sums in zip(ctx.cut, sums, strict=True):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _fold(grad_output, block, kv_heads),
                _fold(queries, block, kv_heads),
                _keys(prompt_keys, own_keys, prompt_N, block),
                _keys(prompt_values, own_values, prompt_N, block),
                _fold(output, block, kv_heads),
                log_sums,
                0.0,
                False,
                attn_mask=_fold_mask(block, queries, own_keys),
                scale=ctx.scale,
            )
            _place(grads[0], block).copy_(_unfold(found[0], queries.shape[1]))
            for prompt_grad, own_grad, grad in zip(grads[1:3], grads[3:], found[1:], strict=True):
                prompt_grad.index_add_(0, prompt_N[_rows(block)], grad[:, :, :columns])
                own_grad[_rows(block), :, : block.end].add_(grad[:, :, columns:])
        return *grads, None, None, None


def _rows(block: Block) -> slice:
    return slice(block.first, block.first + block.count)


def _place(tensor: Tensor, block: Block) -> Tensor:
    return tensor[_rows(block), :, block.start : block.end]


def _fold(tensor: Tensor, block: Block, kv_heads: int) -> Tensor:
    """[N, Hq, L, D] -> the block's [N_j, Hkv, r * B, D]."""
    folded: Tensor = _place(tensor, block).unflatten(1, (kv_heads, -1)).flatten(2, 3)
    return folded


def _unfold(rows: Tensor, heads: int) -> Tensor:
    """[N_j, Hkv, r * B, D] -> [N_j, Hq, B, D]."""
    unfolded: Tensor = rows.unflatten(2, (heads // rows.shape[1], -1)).flatten(1, 2)
    return unfolded


def _fold_mask(block: Block, queries: Tensor, keys: Tensor) -> Tensor:
    """The mask of the folded rows, as the numbers that the kernel adds to scores."""
    repeats = queries.shape[1] // keys.shape[1]
    bias = torch.zeros(block.mask.shape, dtype=queries.dtype, device=queries.device)
    return bias.masked_fill_(~block.mask, -torch.inf).repeat(1, 1, repeats, 1)
