"""Attention of one new token per slot on a CPU: plain batched products over the slot's own keys and its prompt's.

R slots being decoded; r query heads to each of Hkv key heads; W visible columns; A rooms of prompts, of C slots each.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from flatpeak.policy.kv_cache import KeyValueCache
from flatpeak.policy.training_attention import SUMMED, AttentionRule

LEAST_QUERIES = 4
"""Products of fewer rows than this round differently from those of more."""
MOSTLY = 0.75
"""Above this share of rooms in use, all of them are multiplied where they stand."""


class CpuDecodeAttention:
    """Implements kv_cache.DecodeAttention by plain batched products.

    For a few query rows they are faster than torch's fused kernel, which works on tiles. The work is bound by reading
    keys and values, so only the columns in use are read, and a prompt's once for all slots of its group.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._width = 0
        self._own_columns: dict[int, Tensor] = {}
        self._own_bias: dict[tuple[int, int | None], Tensor] = {}
        self._prompts: list[SharedPrompts] | None = None

    def rearranged(self, cache: KeyValueCache) -> None:
        """Slots or prompts were moved."""
        self._prompts = None

    def begin(self, cache: KeyValueCache, num_rows: int, width: int) -> None:
        """Prepare a step that sees `width` own columns."""
        if self._prompts is None or num_rows != self._num_rows:
            self._prompts = _by_room(cache, num_rows)
        self._num_rows, self._width = num_rows, width
        self._own_columns, self._own_bias = {}, {}

    def columns(self, cache: KeyValueCache, kv_heads: int) -> Tensor:
        """int64 [R * Hkv]: where each head's new token goes in a layer's memory, seen as rows of D."""
        if kv_heads not in self._own_columns:
            self._own_columns[kv_heads] = cache.next_columns(self._num_rows, kv_heads)
        return self._own_columns[kv_heads]

    def attend(self, cache: KeyValueCache, layer: int, query: Tensor, rule: AttentionRule) -> Tensor:
        """query [R, Hq, 1, D] -> [R, 1, Hq, D]."""
        rows, heads, _, dim = query.shape
        keys, values = (memory[:rows, :, : self._width].flatten(0, 1) for memory in cache.layers[layer])
        kv_heads = len(keys) // rows
        # Query heads that share a key head become query rows of it: no repeated keys.
        folded = query.reshape(len(keys), heads // kv_heads, dim)
        scores = _scores(rule, folded, keys, self._bias(cache, kv_heads, rule.window))
        assert self._prompts is not None
        if len(self._prompts) == 1:
            attended, on_own = self._prompts[0].attend(cache, layer, rule, folded, scores)
        else:
            attended = values.new_empty(*folded.shape[:2], values.shape[-1])
            on_own = values.new_empty(scores.shape)
            for prompts in self._prompts:
                lines = prompts.lines(kv_heads)
                found = prompts.attend(cache, layer, rule, *(each.index_select(0, lines) for each in (folded, scores)))
                for whole, part in zip((attended, on_own), found, strict=True):
                    whole.index_copy_(0, lines, part)
        return (attended + weighted_sum(on_own, values)).view(rows, 1, heads, values.shape[-1])

    def _bias(self, cache: KeyValueCache, kv_heads: int, window: int | None) -> Tensor:
        """float32 [R * Hkv, 1, W]: 0 where a slot sees a column, else minus infinity."""
        if (kv_heads, window) not in self._own_bias:
            lengths_R = cache.lengths_S[: self._num_rows]
            distance = lengths_R[:, None] - torch.arange(self._width)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self._own_bias[kv_heads, window] = _minus_infinity(hidden, kv_heads)
        return self._own_bias[kv_heads, window]


def _by_room(cache: KeyValueCache, num_rows: int) -> list[SharedPrompts]:
    """The slots whose prompts have rooms of one size, for each size."""
    homes = [cache.prompts.home(place) for place in cache.prompt_S[:num_rows].tolist()]
    by_size = sorted(range(num_rows), key=lambda slot: homes[slot][0])
    found = []
    for columns, members in groupby(by_size, key=lambda slot: homes[slot][0]):
        slots = list(members)
        found.append(SharedPrompts(cache, columns, slots, [homes[slot][1] for slot in slots]))
    return found


class SharedPrompts:
    """Prompts in rooms of one size: the slots that share one are query rows of the same product.

    A table names the slots of each room, filled up with any slot to the same number for all. R counts these slots only.
    """

    def __init__(self, cache: KeyValueCache, columns: int, slots: list[int], rooms: list[int]) -> None:
        self._num_rows = len(slots)
        self._columns = columns
        self._slots_R = torch.tensor(slots)
        used = sorted(set(rooms))
        # Rooms between those in use are multiplied too where they are few: to leave them out takes a copy.
        self._rooms = list(range(used[-1] + 1)) if len(used) > MOSTLY * (used[-1] + 1) else used
        index_of = {room: index for index, room in enumerate(self._rooms)}
        prompt_R = torch.tensor([index_of[room] for room in rooms])
        counts_A = torch.bincount(prompt_R, minlength=len(self._rooms))
        copies = -(-int(counts_A.max()) // LEAST_QUERIES) * LEAST_QUERIES
        order_R = prompt_R.argsort(stable=True)
        by_prompt_R = prompt_R.index_select(0, order_R)
        rank_R = torch.arange(self._num_rows) - (counts_A.cumsum(0) - counts_A).index_select(0, by_prompt_R)
        self._place_R = torch.empty_like(order_R).index_copy_(0, order_R, by_prompt_R * copies + rank_R)
        self._places, self._copies = len(self._rooms), copies
        table = torch.zeros(self._places * copies, dtype=torch.int64)
        self._table = table.index_copy_(0, self._place_R, torch.arange(self._num_rows))
        lengths_R = cache.prompts.lengths_A.index_select(0, cache.prompt_S.index_select(0, self._slots_R))
        self._lengths_A = torch.zeros_like(counts_A).scatter_reduce(0, prompt_R, lengths_R, "amax")  # idle slots have 0
        longest = int(lengths_R.max())
        self._width = -(-longest // cache.key_multiple) * cache.key_multiple
        self._bias: dict[int, Tensor] = {}
        self._memories: dict[int, tuple[Tensor, Tensor]] = {}

    def lines(self, kv_heads: int) -> Tensor:
        """int64 [R * Hkv]: these slots' lines among all slots'."""
        return (self._slots_R[:, None] * kv_heads + torch.arange(kv_heads)).flatten()

    def attend(
        self, cache: KeyValueCache, layer: int, rule: AttentionRule, query: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor]:
        """query [R * Hkv, r, D], scores of own keys [R * Hkv, r, X] -> prompts' weighted values, own keys' weights."""
        on_prompt = self._scores(cache, layer, rule, query)
        weights = _softmax(torch.cat([on_prompt, own], -1), query)
        on_prompt, on_own = weights.split([on_prompt.shape[-1], own.shape[-1]], -1)
        return self._weighted_values(cache, layer, on_prompt), on_own

    def _scores(self, cache: KeyValueCache, layer: int, rule: AttentionRule, query: Tensor) -> Tensor:
        """query [R * Hkv, r, D] -> [R * Hkv, r, W]."""
        keys, _ = self._memory(cache, layer)
        kv_heads = keys.shape[0] // self._places
        if kv_heads not in self._bias:
            hidden = torch.arange(self._width) >= self._lengths_A[:, None]
            self._bias[kv_heads] = _minus_infinity(hidden, kv_heads)
        scores = self._by_slot(_scores(rule, self._by_prompt(query, kv_heads), keys, self._bias[kv_heads]), kv_heads)
        if rule.window is None:
            return scores
        distance = cache.positions_S.index_select(0, self._slots_R)[:, None] - torch.arange(self._width)
        return scores + _minus_infinity(distance >= rule.window, kv_heads)

    def _weighted_values(self, cache: KeyValueCache, layer: int, weights: Tensor) -> Tensor:
        """weights [R * Hkv, r, W] -> [R * Hkv, r, D]."""
        _, values = self._memory(cache, layer)
        kv_heads = values.shape[0] // self._places
        return self._by_slot(weighted_sum(self._by_prompt(weights, kv_heads), values), kv_heads)

    def _memory(self, cache: KeyValueCache, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [A * Hkv, W, D] of the prompts in use."""
        if layer not in self._memories:
            rooms = (memory[:, :, : self._width] for memory in cache.prompts.room(layer, self._columns))
            keys, values = (self._in_use(each).flatten(0, 1) for each in rooms)
            self._memories[layer] = (keys, values)
        return self._memories[layer]

    def _in_use(self, rooms: Tensor) -> Tensor:
        if self._rooms[-1] < len(self._rooms):
            return rooms[: len(self._rooms)]
        return rooms.index_select(0, torch.tensor(self._rooms))

    def _by_prompt(self, rows: Tensor, kv_heads: int) -> Tensor:
        """[R * Hkv, r, X] -> [A * Hkv, C * r, X]."""
        _, repeats, size = rows.shape
        table = rows.reshape(self._num_rows, -1).index_select(0, self._table)
        by_head = table.view(self._places, self._copies, kv_heads, repeats * size).transpose(1, 2)
        return by_head.reshape(self._places * kv_heads, self._copies * repeats, size)

    def _by_slot(self, grouped: Tensor, kv_heads: int) -> Tensor:
        """Back."""
        size = grouped.shape[2]
        repeats = grouped.shape[1] // self._copies
        by_head = grouped.view(self._places, kv_heads, self._copies, repeats * size).transpose(1, 2)
        slots = by_head.reshape(self._places * self._copies, -1).index_select(0, self._place_R)
        return slots.view(self._num_rows * kv_heads, repeats, size)


def _scores(rule: AttentionRule, query: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """[B, q, W] for B key heads of q query rows each; bias [B, 1, W]."""
    if rule.softcap is None:
        return torch.baddbmm(
            bias if query.dtype == bias.dtype else bias.to(query.dtype), query, keys.transpose(1, 2), alpha=rule.scale
        )
    return bias + rule.softcap * torch.tanh(torch.bmm(query, keys.transpose(1, 2)) * (rule.scale / rule.softcap))


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """weights [B, q, W], values [B, W, D] -> [B, q, D]: the same bits however many columns of weight 0 follow."""
    if weights.shape[-1] <= SUMMED:
        return torch.bmm(weights, values)
    attended = torch.bmm(weights[..., :SUMMED], values[:, :SUMMED])
    for start in range(SUMMED, weights.shape[-1], SUMMED):
        span = slice(start, start + SUMMED)
        attended = torch.baddbmm(attended, weights[..., span], values[:, span])
    return attended


def _softmax(scores: Tensor, like: Tensor) -> Tensor:
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    return weights if like.dtype == torch.float32 else weights.to(like.dtype)


def _minus_infinity(hidden: Tensor, kv_heads: int) -> Tensor:
    """bool [B, W] -> float32 [B * Hkv, 1, W]: minus infinity where hidden, else 0."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).repeat_interleave(kv_heads, 0)[:, None]
