"""Attention of new tokens over the keys of their slot and its prompt: one per slot, on a CPU and on a GPU, or several.

On a CPU it consists of batched products. The softmax of a slot runs over the columns of its prompt and its completion,
so two products first compute the scores of both: one over the keys of completions, and one over the keys of prompts, in
which all slots of a group are query rows. A slot's result must not depend on the other slots, to the bit
(docs/engine.md): hence the rules below for the rows and columns of products, and for the order of sums.

Several tokens of a slot (`Extension`) are one call of torch's attention per slot and layer, on any device.

On a GPU one token per slot is one kernel. A decoding step is captured as a CUDA graph and replayed, so it must not
depend on a host value that changes from token to token. The kernel reads lengths, prompts and tiles on the device; its
tables are rewritten only when slots or prompts move, between steps.

R slots being decoded; r query heads per key head (Hkv); W visible columns; A regions of prompts, of C slots each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from flatpeak.kernels.block_attention import SUM_COLUMNS, AttentionRule
from flatpeak.kernels.decode_attention import decode_attention
from flatpeak.kernels.prompt_tiles import PromptTiles
from flatpeak.policy.kv_cache import KeyValueCache
from flatpeak.policy.packing import fill, offsets
from flatpeak.policy.training_attention import last_hidden

LEAST_QUERIES = 4
"""The slots of a prompt are padded to a multiple of this, because products of fewer query rows round differently."""
MOSTLY = 0.75
"""If more than this share of regions is in use, all regions are multiplied in place, without a copy."""


class CpuDecodeAttention:
    """Implements kv_cache.DecodeAttention by batched products.

    For a few query rows these are faster than torch's fused kernel, which works on tiles. Most of the time goes into
    reading keys and values, so only the columns in use are read, and those of a prompt only once per group.
    """

    def __init__(self) -> None:
        self._batch_size = 0
        self._width = 0
        self._own_bias: dict[tuple[int, int | None], Tensor] = {}
        self._prompts: list[SharedPrompts] | None = None

    def rearranged(self, cache: KeyValueCache) -> None:
        """Drop the tables of slots by prompt; `begin` rebuilds them."""
        self._prompts = None

    def begin(self, cache: KeyValueCache, batch_size: int, width: int) -> None:
        """Prepare a step with `width` visible columns of completions."""
        if self._prompts is None or batch_size != self._batch_size:
            self._prompts = _by_region_size(cache, batch_size)
        self._batch_size, self._width = batch_size, width
        self._own_bias = {}

    def attend(self, cache: KeyValueCache, layer: int, query: Tensor, rule: AttentionRule) -> Tensor:
        """Attend with query [R, Hq, 1, D] over keys of prompts and completions: [R, 1, Hq, D]."""
        slots, heads, _, dim = query.shape
        keys, values = (memory[:slots, :, : self._width].flatten(0, 1) for memory in cache.layers[layer])
        kv_heads = len(keys) // slots
        # Query heads that share a key head become its query rows, so that keys are not repeated.
        folded = query.reshape(len(keys), heads // kv_heads, dim)
        scores = _scores(rule, folded, keys, self._bias(cache, kv_heads, rule.window))
        assert self._prompts is not None
        if len(self._prompts) == 1:
            attended, on_own = self._prompts[0].attend(cache, layer, rule, folded, scores)
        else:
            attended = values.new_empty(*folded.shape[:2], values.shape[-1])
            on_own = values.new_empty(scores.shape)
            for prompts in self._prompts:
                index = prompts.head_index(kv_heads)
                results = prompts.attend(
                    cache, layer, rule, folded.index_select(0, index), scores.index_select(0, index)
                )
                for whole, result in zip((attended, on_own), results, strict=True):
                    whole.index_copy_(0, index, result)
        return (attended + weighted_sum(on_own, values)).view(slots, 1, heads, values.shape[-1])

    def _bias(self, cache: KeyValueCache, kv_heads: int, window: int | None) -> Tensor:
        """The mask to add to scores of completions' columns, float32 [R * Hkv, 1, W]: 0 if the slot sees the column,
        else -inf."""
        if (kv_heads, window) not in self._own_bias:
            lengths_R = cache.lengths_S[: self._batch_size]
            distance = lengths_R[:, None] - torch.arange(self._width)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self._own_bias[kv_heads, window] = _minus_infinity(hidden, kv_heads)
        return self._own_bias[kv_heads, window]


class GpuDecodeAttention:
    """Implements kv_cache.DecodeAttention by `kernels.decode_attention`: Triton's kernel, or torch if that fails."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[int, int], PromptTiles] = {}
        self._seen_S: Tensor | None = None

    def rearranged(self, cache: KeyValueCache) -> None:
        """Update the tables in place, because captured graphs read them."""
        for (slots, _), tiles in self._tiles.items():
            tiles.refresh_(cache.prompt_S[:slots])

    def begin(self, cache: KeyValueCache, batch_size: int, width: int) -> None:
        """Count the columns that each slot sees; the kernel reads them on the device."""
        self._seen_S = cache.lengths_S + 1

    def attend(self, cache: KeyValueCache, layer: int, query: Tensor, rule: AttentionRule) -> Tensor:
        """Attend with query [R, Hq, 1, D] over keys of prompts and completions: [R, 1, Hq, D]."""
        assert self._seen_S is not None
        keys, values = cache.layers[layer]
        slots, heads = query.shape[:2]
        repeats = heads // keys.shape[1]
        if (slots, repeats) not in self._tiles:
            self._tiles[slots, repeats] = PromptTiles.build(
                cache.prompt_S[:slots], num_entries=cache.prompts.num_entries, repeats=repeats
            )
        attended = decode_attention(
            query[:, :, 0],
            keys,
            values,
            self._seen_S,
            *cache.prompts.layers[layer],
            cache.prompt_S,
            *cache.prompts.tables,
            prompt_columns=cache.prompts.longest,
            scale=rule.scale,
            window=rule.window,
            softcap=rule.softcap,
            tiles=self._tiles[slots, repeats],
        )
        return attended[:, None]


class Extension:
    """Several new tokens for some slots of a cache, in one pass; implements AttentionContext with L = T.

    T new tokens, slot by slot. A slot attends by itself, so that its result depends on no other.
    """

    def __init__(
        self, cache: KeyValueCache, slots: Sequence[int], kept: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Append tokens to these slots after the first kept[k] tokens of each."""
        self.calls: list[int] = []
        self._cache, self._slots = cache, slots
        self._counts = [len(token_ids) for token_ids in tokens]
        self._lengths = [before + count for before, count in zip(kept, self._counts, strict=True)]
        cache.reach(cache.num_slots, max(self._lengths))
        cache.set_lengths(slots, self._lengths)
        device = cache.lengths_S.device
        slots_K, counts_K = torch.tensor(slots, device=device), torch.tensor(self._counts, device=device)
        self._entries = cache.prompt_S.index_select(0, slots_K).tolist()
        self._prompt_lengths = cache.prompts.lengths_A[self._entries].tolist()
        within_T = offsets(counts_K)
        self._columns_T = torch.repeat_interleave(torch.tensor(kept, device=device), counts_K) + within_T
        self._slot_T = torch.repeat_interleave(slots_K, counts_K)
        before_T = torch.repeat_interleave(torch.tensor(self._prompt_lengths, device=device), counts_K)
        self._tokens_T = fill(torch.tensor([token for token_ids in tokens for token in token_ids], device=device))
        self._positions_T = fill(before_T + self._columns_T)
        self._last_K = counts_K.cumsum(0) - 1

    def hidden(self, trunk: nn.Module) -> Tensor:
        """The last hidden states after the last new token of each slot, [K, D]."""
        return last_hidden(trunk, self._tokens_T[None], self._positions_T[None], self)[0].index_select(0, self._last_K)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Store the keys and values of the new tokens, and attend over all; see AttentionContext."""
        self.calls.append(layer)
        for memory, new in zip(self._cache.layers[layer], (key, value), strict=True):
            memory[self._slot_T, :, self._columns_T] = new[0, :, : len(self._slot_T)].transpose(0, 1)
        attended = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        first = 0
        for k, count in enumerate(self._counts):
            keys, values = self._visible(layer, k)
            distance = torch.arange(count, device=query.device)[:, None] + (keys.shape[2] - count)
            distance = distance - torch.arange(keys.shape[2], device=query.device)
            mask = (distance >= 0) if rule.window is None else (distance >= 0) & (distance < rule.window)
            own = rule(query[:, :, first : first + count], keys, values, mask)
            attended[:, first : first + count] = own.transpose(1, 2)
            first += count
        return attended

    def _visible(self, layer: int, k: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, Hkv, K, D] of the prompt and the completion of the k-th slot."""
        columns, index = self._cache.prompts.region_of(self._entries[k])
        pairs = zip(self._cache.prompts.bucket(layer, columns), self._cache.layers[layer], strict=True)
        keys, values = (
            torch.cat([prompts[index, :, : self._prompt_lengths[k]], own[self._slots[k], :, : self._lengths[k]]], 1)
            for prompts, own in pairs
        )
        return keys[None], values[None]


def _by_region_size(cache: KeyValueCache, batch_size: int) -> list[SharedPrompts]:
    """The prompts of the first slots, grouped by region size, because a product needs equal shapes."""
    regions = [cache.prompts.region_of(entry) for entry in cache.prompt_S[:batch_size].tolist()]
    by_size = sorted(range(batch_size), key=lambda slot: regions[slot][0])
    shared = []
    for columns, members in groupby(by_size, key=lambda slot: regions[slot][0]):
        slots = list(members)
        shared.append(SharedPrompts(cache, columns, slots, [regions[slot][1] for slot in slots]))
    return shared


class SharedPrompts:
    """Prompts in regions of one size: slots that share a prompt are query rows of the same product.

    A table lists the slots of each region, padded with arbitrary slots to the same number. R counts only these slots.
    """

    def __init__(self, cache: KeyValueCache, columns: int, slots: list[int], regions: list[int]) -> None:
        """`regions`: the region of each slot's prompt, by its index among those of `columns` columns."""
        self._num_slots = len(slots)
        self._columns = columns
        self._slots_R = torch.tensor(slots)
        used = sorted(set(regions))
        # If few regions in between are unused, they are multiplied too, which saves a copy.
        self._regions = list(range(used[-1] + 1)) if len(used) > MOSTLY * (used[-1] + 1) else used
        index_of = {region: index for index, region in enumerate(self._regions)}
        prompt_R = torch.tensor([index_of[region] for region in regions])
        counts_A = torch.bincount(prompt_R, minlength=len(self._regions))
        copies = -(-int(counts_A.max()) // LEAST_QUERIES) * LEAST_QUERIES
        order_R = prompt_R.argsort(stable=True)
        by_prompt_R = prompt_R.index_select(0, order_R)
        rank_R = torch.arange(self._num_slots) - (counts_A.cumsum(0) - counts_A).index_select(0, by_prompt_R)
        self._index_R = torch.empty_like(order_R).index_copy_(0, order_R, by_prompt_R * copies + rank_R)
        self._num_regions, self._copies = len(self._regions), copies
        table = torch.zeros(self._num_regions * copies, dtype=torch.int64)
        self._table = table.index_copy_(0, self._index_R, torch.arange(self._num_slots))
        lengths_R = cache.prompts.lengths_A.index_select(0, cache.prompt_S.index_select(0, self._slots_R))
        self._lengths_A = torch.zeros_like(counts_A).scatter_reduce(0, prompt_R, lengths_R, "amax")  # idle slots: 0
        longest = int(lengths_R.max())
        self._width = -(-longest // cache.key_multiple) * cache.key_multiple
        self._bias: dict[int, Tensor] = {}
        self._memories: dict[int, tuple[Tensor, Tensor]] = {}

    def head_index(self, kv_heads: int) -> Tensor:
        """int64 [R * Hkv]: the key heads of these slots, as indices among the heads of all slots."""
        return (self._slots_R[:, None] * kv_heads + torch.arange(kv_heads)).flatten()

    def attend(
        self, cache: KeyValueCache, layer: int, rule: AttentionRule, query: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum of the prompts' values, given query [R * Hkv, r, D] and completion scores [R * Hkv, r, X].

        Returns this sum [R * Hkv, r, D], and the weights of completions' keys from the same softmax.
        """
        on_prompt = self._scores(cache, layer, rule, query)
        weights = _softmax(torch.cat([on_prompt, own], -1), query)
        on_prompt, on_own = weights.split([on_prompt.shape[-1], own.shape[-1]], -1)
        return self._weighted_values(cache, layer, on_prompt), on_own

    def _scores(self, cache: KeyValueCache, layer: int, rule: AttentionRule, query: Tensor) -> Tensor:
        """Scores of the prompts' keys: query [R * Hkv, r, D] -> [R * Hkv, r, W]."""
        keys, _ = self._memory(cache, layer)
        kv_heads = keys.shape[0] // self._num_regions
        if kv_heads not in self._bias:
            hidden = torch.arange(self._width) >= self._lengths_A[:, None]
            self._bias[kv_heads] = _minus_infinity(hidden, kv_heads)
        scores = self._by_slot(_scores(rule, self._by_prompt(query, kv_heads), keys, self._bias[kv_heads]), kv_heads)
        if rule.window is None:
            return scores
        distance = cache.positions_S.index_select(0, self._slots_R)[:, None] - torch.arange(self._width)
        return scores + _minus_infinity(distance >= rule.window, kv_heads)

    def _weighted_values(self, cache: KeyValueCache, layer: int, weights: Tensor) -> Tensor:
        """Sum the prompts' values: weights [R * Hkv, r, W] -> [R * Hkv, r, D]."""
        _, values = self._memory(cache, layer)
        kv_heads = values.shape[0] // self._num_regions
        return self._by_slot(weighted_sum(self._by_prompt(weights, kv_heads), values), kv_heads)

    def _memory(self, cache: KeyValueCache, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [A * Hkv, W, D] of the prompts in use."""
        if layer not in self._memories:
            bucket = (memory[:, :, : self._width] for memory in cache.prompts.bucket(layer, self._columns))
            keys, values = (self._in_use(memory).flatten(0, 1) for memory in bucket)
            self._memories[layer] = (keys, values)
        return self._memories[layer]

    def _in_use(self, bucket: Tensor) -> Tensor:
        if self._regions[-1] < len(self._regions):
            return bucket[: len(self._regions)]
        return bucket.index_select(0, torch.tensor(self._regions))

    def _by_prompt(self, by_slot: Tensor, kv_heads: int) -> Tensor:
        """Gather the slots of each prompt: [R * Hkv, r, X] -> [A * Hkv, C * r, X]."""
        _, repeats, size = by_slot.shape
        table = by_slot.reshape(self._num_slots, -1).index_select(0, self._table)
        by_head = table.view(self._num_regions, self._copies, kv_heads, repeats * size).transpose(1, 2)
        return by_head.reshape(self._num_regions * kv_heads, self._copies * repeats, size)

    def _by_slot(self, by_prompt: Tensor, kv_heads: int) -> Tensor:
        """Undo `_by_prompt`: [A * Hkv, C * r, X] -> [R * Hkv, r, X]."""
        size = by_prompt.shape[2]
        repeats = by_prompt.shape[1] // self._copies
        by_head = by_prompt.view(self._num_regions, kv_heads, self._copies, repeats * size).transpose(1, 2)
        slots = by_head.reshape(self._num_regions * self._copies, -1).index_select(0, self._index_R)
        return slots.view(self._num_slots * kv_heads, repeats, size)


def _scores(rule: AttentionRule, query: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """Scores [B, q, W] of B key heads with q query rows each; bias is [B, 1, W]."""
    if rule.softcap is None:
        return torch.baddbmm(
            bias if query.dtype == bias.dtype else bias.to(query.dtype), query, keys.transpose(1, 2), alpha=rule.scale
        )
    return bias + rule.softcap * torch.tanh(torch.bmm(query, keys.transpose(1, 2)) * (rule.scale / rule.softcap))


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Sum values [B, W, D] by weights [B, q, W]: [B, q, D], with the same bits for any number of trailing zeros."""
    if weights.shape[-1] <= SUM_COLUMNS:
        return torch.bmm(weights, values)
    attended = torch.bmm(weights[..., :SUM_COLUMNS], values[:, :SUM_COLUMNS])
    for start in range(SUM_COLUMNS, weights.shape[-1], SUM_COLUMNS):
        columns = slice(start, start + SUM_COLUMNS)
        attended = torch.baddbmm(attended, weights[..., columns], values[:, columns])
    return attended


def _softmax(scores: Tensor, like: Tensor) -> Tensor:
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    return weights if like.dtype == torch.float32 else weights.to(like.dtype)


def _minus_infinity(hidden: Tensor, kv_heads: int) -> Tensor:
    """A mask to add to scores, float32 [B * Hkv, 1, W], from bool [B, W]: minus infinity if hidden, else 0."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).repeat_interleave(kv_heads, 0)[:, None]
