"""Attention by torch on any device: a layer's rule, and responses in blocks of query positions.

A block reads keys up to its last position. On a CPU, blocks use torch's fused kernel with flatpeak's backward pass; on
a GPU, `scaled_dot_product_attention`.

Shape letters: B rows, L positions, Hq query heads, Hkv key heads, D head dimension, P prompts, N responses, Lp columns
of prompts, K keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Query positions per block."""
SUM_COLUMNS = 192
"""Columns, a multiple of BLOCK, per product of a weighted sum. MKL splits sums over 193 to 383 columns into halves, so
the bits of a longer sum would depend on the number of trailing columns with weight 0."""
MOST_KEYS = 2**17
"""The most columns of a block, over all responses: each response has a copy of its prompt's keys."""
MOST_SCORES = 2**23
"""The most query positions times columns of a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRule:
    """One layer's weights of keys: softmax(softcap * tanh(scale * q k / softcap)), within a window."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether it is softmax(scale * q k) without soft cap, dropout or autocast; a window is allowed."""
        return self.softcap is None and not self.dropout and not torch.is_autocast_enabled("cpu")

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with query [B, Hq, L, D] over key, value [B, Hkv, K, D]; mask is bool, or None for plain causal."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=self.dropout,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        repeats = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(repeats, 1).transpose(-1, -2) * self.scale
        scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")).float(), dim=-1).to(value.dtype)
        return F.dropout(weights, self.dropout) @ value.repeat_interleave(repeats, 1)


def alike(*states: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether queries, keys and values are on a CPU, with one type (`dtype`, if given) and one dimension."""
    kinds = {(each.dtype, each.shape[-1], each.device.type) for each in states}
    return kinds == {(dtype or states[0].dtype, states[0].shape[-1], "cpu")}


def attend_to_prefixes(rule: AttentionRule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention [P, H, L, D]: the first SUM_COLUMNS positions, then each block over the keys up to its end.

    A block's sums then have the same columns, and so the same bits, for any length of the other prompts.
    """
    length = query.shape[2]
    if length > SUM_COLUMNS:
        key, value = (F.pad(states, (0, 0, 0, -length % BLOCK)) for states in (key, value))
    position = torch.arange(key.shape[2], device=query.device)
    attended = []
    for start, end in pairwise([0, *range(SUM_COLUMNS, length, BLOCK), min(-(-length // BLOCK) * BLOCK, key.shape[2])]):
        distance = position[start : min(end, length), None] - position[:end]
        mask = distance >= 0 if rule.window is None else (distance >= 0) & (distance < rule.window)
        causal = start == 0 and rule.window is None
        attended.append(rule(query[:, :, start:end], key[:, :, :end], value[:, :, :end], None if causal else mask))
    return torch.cat(attended, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Query positions start ... end - 1 of the responses first ... first + count - 1."""

    first: int
    count: int
    start: int
    end: int
    mask: Tensor
    """bool [count, 1, end - start, Lp + end]: the columns of prompt and response that each query sees."""


def cut_blocks(lengths_N: Tensor, prompt_lengths_N: Tensor, prompt_columns: int, window: int | None) -> list[Block]:
    """Cut responses with these lengths (descending) into blocks, each with the responses that are long enough."""
    lengths = lengths_N.tolist()
    device = lengths_N.device
    prompt_position = torch.arange(prompt_columns, device=device)
    blocks = []
    for start in range(0, lengths[0], BLOCK):
        end = min(start + BLOCK, lengths[0])
        reaching = sum(length > start for length in lengths)
        position, own_position = torch.arange(start, end, device=device)[:, None], torch.arange(end, device=device)
        columns = prompt_columns + end
        at_once = max(1, min(MOST_KEYS // columns, MOST_SCORES // (columns * (end - start))))
        for first in range(0, reaching, at_once):
            count = min(at_once, reaching - first)
            before = prompt_lengths_N[first : first + count, None]
            on_own = (position >= own_position).expand(count, -1, -1)
            on_prompt = (prompt_position < before)[:, None].expand(-1, end - start, -1)
            if window is not None:
                on_own = on_own & (position - own_position < window)
                on_prompt = on_prompt & (before[:, None] + position - prompt_position < window)
            mask = torch.cat([on_prompt, on_own], -1)[:, None]
            blocks.append(Block(first=first, count=count, start=start, end=end, mask=mask))
    return blocks


def attend_in_blocks(
    rule: AttentionRule,
    queries: Tensor,
    prompts: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    prompt_N: Tensor,
    blocks: list[Block],
) -> Tensor:
    """Attend with queries [N, Hq, L, D] over keys and values of prompts and responses: [N, Hq, L, D].

    `prompts` are [P, Hkv, Lp, D], and response n has prompt prompt_N[n]; `own` are [N, Hkv, L, D]. Results past the end
    of a response are undefined and never read.
    """
    if rule.plain and alike(queries, *own):
        attended: Tensor = _FusedBlocks.apply(queries, *prompts, *own, prompt_N, blocks, rule.scale)
        return attended
    output = queries.new_zeros(*queries.shape[:3], own[1].shape[-1])
    for block in blocks:
        keys, values = (_keys(prompt, response, prompt_N, block) for prompt, response in zip(prompts, own, strict=True))
        _queries(output, block).copy_(rule(_queries(queries, block), keys, values, block.mask))
    return output


def _keys(prompts: Tensor, own: Tensor, prompt_N: Tensor, block: Block) -> Tensor:
    """A block's keys or values, those of prompts followed by those of responses: [N_j, Hkv, Lp + end, D]."""
    return torch.cat([prompts.index_select(0, prompt_N[_responses(block)]), own[_responses(block), :, : block.end]], 2)


def _responses(block: Block) -> slice:
    return slice(block.first, block.first + block.count)


def _queries(tensor: Tensor, block: Block) -> Tensor:
    return tensor[_responses(block), :, block.start : block.end]


def _fold(tensor: Tensor, block: Block, kv_heads: int) -> Tensor:
    """Select a block's queries, and fold r heads with the same keys into query rows: [N_j, Hkv, r * B, D]."""
    folded: Tensor = _queries(tensor, block).unflatten(1, (kv_heads, -1)).flatten(2, 3)
    return folded


def _unfold(rows: Tensor, heads: int) -> Tensor:
    """Undo the fold of heads: [N_j, Hkv, r * B, D] -> [N_j, Hq, B, D]."""
    unfolded: Tensor = rows.unflatten(2, (heads // rows.shape[1], -1)).flatten(1, 2)
    return unfolded


def _fold_mask(block: Block, queries: Tensor, keys: Tensor) -> Tensor:
    """The mask of the folded rows, as numbers to add to scores."""
    repeats = queries.shape[1] // keys.shape[1]
    bias = torch.zeros(block.mask.shape, dtype=queries.dtype, device=queries.device)
    return bias.masked_fill_(~block.mask, -torch.inf).repeat(1, 1, repeats, 1)


class _FusedBlocks(torch.autograd.Function):
    """`attend_in_blocks` by torch's fused CPU kernel; it sums gradients in place and keeps no copy of the keys.

    Query heads that share a key head become its query rows, so that keys are not repeated.
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
        blocks: list[Block],
        scale: float,
    ) -> Tensor:
        output = torch.zeros_like(queries)
        sums = []
        for block in blocks:
            rows, mask = _fold(queries, block, own_keys.shape[1]), _fold_mask(block, queries, own_keys)
            attended, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                rows,
                _keys(prompt_keys, own_keys, prompt_N, block),
                _keys(prompt_values, own_values, prompt_N, block),
                attn_mask=mask,
                scale=scale,
            )
            _queries(output, block).copy_(_unfold(attended, queries.shape[1]))
            sums.append(log_sums)
        ctx.save_for_backward(queries, prompt_keys, prompt_values, own_keys, own_values, prompt_N, output, *sums)
        ctx.blocks, ctx.scale = blocks, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        queries, prompt_keys, prompt_values, own_keys, own_values, prompt_N, output, *sums = ctx.saved_tensors
        grads = [torch.zeros_like(tensor) for tensor in (queries, prompt_keys, prompt_values, own_keys, own_values)]
        kv_heads, columns = own_keys.shape[1], prompt_keys.shape[2]
        for block, log_sums in zip(ctx.blocks, sums, strict=True):
            block_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
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
            _queries(grads[0], block).copy_(_unfold(block_grads[0], queries.shape[1]))
            for prompt_grad, own_grad, grad in zip(grads[1:3], grads[3:], block_grads[1:], strict=True):
                prompt_grad.index_add_(0, prompt_N[_responses(block)], grad[:, :, :columns])
                own_grad[_responses(block), :, : block.end].add_(grad[:, :, columns:])
        return *grads, None, None, None
