"""The key-value cache of a request: keys and values of each prompt, stored once, and of the completions being decoded.

For keys and for values, each layer has a memory of completions and a memory of prompts. A completion has a slot, whose
columns hold its tokens. A prompt has an entry, which locates its tokens in the memory of prompts. Every slot of the
prompt's group refers to the entry (prompt_S). A cell below is one column of every key head.

    completions [S, Hkv, columns, D]           prompts [cells * Hkv, D], seen as buckets of equally wide regions

             column  0  1  2  3  4  5           bucket of 4 columns         bucket of 8 columns
    slot 0           a  a  a  .  .  .          +---------+---------+       +-----------------+
    slot 1           b  .  .  .  .  .          | P P P . | W W W W |       | Q Q Q Q Q Q . . |
    slot 2           c  c  c  c  c  .          +---------+---------+       +-----------------+
    slot 3           .  .  .  .  .  .            entry 0   entry 2           entry 1

    lengths_S = [3, 1, 5, 0]                   lengths_A = [3, 6, 4]    by entry
    prompt_S  = [0, 0, 1, 0]                   starts_A  = [0, 8, 4]    the first cell of the entry's region
                                               columns_A = [4, 8, 4]    its columns

Slots 0 and 1 belong to one group: they share entry 0, so prompt P is read and stored once. Slot 3 is idle, and W is a
prompt whose completions have not begun. The width of a region fits prompts of similar length, so one long prompt does
not widen other regions. Attention ignores cells without a token ('.') by the lengths. Memory is allocated once and
written in place, so captured CUDA graphs stay valid.

Shape letters: S slots, of which a step decodes the first R; K slots or entries in a call; A entries; D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from flatpeak.kernels.block_attention import AttentionRule
from flatpeak.policy.packing import PackedRow, by_length, offsets
from flatpeak.policy.training_attention import PackedContext

Buckets = Mapping[int, int]
"""Columns of a region -> the number of regions of that size."""
Region = tuple[int, int]
"""The columns of a region, and its index among regions of that size."""
SMALLEST_GPU_REGION = 256
"""Columns of the smallest region on a GPU."""
GPU_KEY_MULTIPLE = 64
"""On a GPU the kernel needs keys padded to a multiple of this."""


class DecodeAttention(Protocol):
    """Attention of one new token per slot over a cache, on one kind of device (decoding_attention.py)."""

    def rearranged(self, cache: KeyValueCache) -> None:
        """Handle slots or prompts that were filled, moved or emptied."""
        ...

    def begin(self, cache: KeyValueCache, batch_size: int, width: int) -> None:
        """Prepare a step over the first `batch_size` slots, which see at most `width` completion columns."""
        ...

    def attend(self, cache: KeyValueCache, layer: int, query: Tensor, rule: AttentionRule) -> Tensor:
        """Attend with query [R, Hq, 1, D] over keys of prompts and completions, newest included: [R, 1, Hq, D]."""
        ...


class KeyValueCache:
    """Keys and values of a request; implements protocols.DecodeState and, during a step, AttentionContext."""

    def __init__(
        self,
        *,
        slots: int,
        entries: int,
        buckets: Buckets,
        new_tokens: int,
        key_multiple: int,
        attention: DecodeAttention,
        device: torch.device,
    ) -> None:
        self.num_slots = slots
        self.key_multiple = key_multiple
        self.columns = round_up(new_tokens, key_multiple)
        self.lengths_S = torch.zeros(slots, dtype=torch.int64, device=device)
        """The number of filled columns of each slot."""
        self.positions_S = torch.zeros_like(self.lengths_S)
        """The position of the next token."""
        self.limits_S = torch.zeros_like(self.lengths_S)
        """The position of a completion's last token, the largest learned position that it needs."""
        self.prompt_S = torch.zeros_like(self.lengths_S)
        """The entry of each slot's prompt."""
        self.prompts = PromptCache(entries, buckets, device)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Per layer keys and values [S, Hkv, columns, D]."""
        self.calls: list[int] = []
        """The layers that have asked for attention in this step."""
        self._columns: dict[int, Tensor] = {}
        self._on_gpu = device.type != "cpu"
        self._attention = attention
        self.restart(new_tokens=new_tokens)

    @property
    def step_state(self) -> list[Tensor]:
        """Tensors that locate the next token; every step changes them."""
        return [self.lengths_S, self.positions_S]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a step reads or writes."""
        memories = [m for pairs in (self.prompts.layers, self.layers) for pair in pairs.values() for m in pair]
        return [*self._of_slots, *self.prompts.tables, *memories]

    @property
    def _of_slots(self) -> list[Tensor]:
        return [*self.step_state, self.limits_S, self.prompt_S]

    def serves(self, *, slots: int, entries: int, buckets: Buckets, new_tokens: int) -> bool:
        """Whether this memory fits such a request."""
        return slots <= self.num_slots and new_tokens <= self.columns and self.prompts.serves(entries, buckets)

    def restart(self, *, new_tokens: int) -> None:
        """Start another request in the same memory, with at most this many tokens per completion."""
        for tensor in self._of_slots:
            tensor.zero_()
        self.prompts.restart()
        self.new_tokens = new_tokens
        self._starts = [0] * self.num_slots  # a slot's length is its start plus the tokens decoded since then
        self._decoded = 0
        self._cleared = self.columns if self._on_gpu else 0  # a captured step must not clear memory
        self._attention.rearranged(self)

    def store(self, entries: Sequence[int], prefill: PackedContext) -> None:
        """Keep the prompts of a prefill as these entries."""
        assert prefill.kept is not None
        self.prompts.store(entries, prefill.row, prefill.kept)
        for layer, states in prefill.kept.items():
            if layer not in self.layers:
                self._allocate(layer, states)

    def admit(self, slots: Sequence[int], entries: Sequence[int]) -> None:
        """Start completions in these slots, with the prompts in these entries."""
        slots_K, entries_K = self._index(slots), self._index(entries)
        prompt_lengths_K = self.prompts.lengths_A.index_select(0, entries_K)
        self.prompt_S.index_copy_(0, slots_K, entries_K)
        self.limits_S.index_copy_(0, slots_K, prompt_lengths_K + self.new_tokens - 1)
        self.set_lengths(slots, [0] * len(slots))
        self._attention.rearranged(self)

    def set_lengths(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep this many tokens of these slots' completions; the next token follows them."""
        slots_K, lengths_K = self._index(slots), self._index(lengths)
        prompt_lengths_K = self.prompts.lengths_A.index_select(0, self.prompt_S.index_select(0, slots_K))
        self.positions_S.index_copy_(0, slots_K, prompt_lengths_K + lengths_K)
        self.lengths_S.index_copy_(0, slots_K, lengths_K)
        for slot, length in zip(slots, lengths, strict=True):
            self._starts[slot] = length - self._decoded

    def compact(
        self,
        slots: tuple[Sequence[int], Sequence[int]],
        entries: tuple[Sequence[int], Sequence[int]],
        idle: Sequence[int],
    ) -> None:
        """Move completions and prompts from sources to targets; idle slots are no longer decoded."""
        if slots[0]:
            self._move_slots(*slots)
        if entries[0]:
            self._move_prompts(*entries)
        if idle:
            for tensor in self._of_slots:
                tensor.index_fill_(0, self._index(idle), 0)
            for slot in idle:
                self._starts[slot] = -self._decoded
        self._attention.rearranged(self)

    def begin_token(self, batch_size: int) -> None:
        """Prepare a step over the first `batch_size` slots."""
        self.calls = []
        self._columns = {}
        # The host counts lengths too: reading them from a tensor would wait for the device.
        width = self.reach(batch_size, max(self._starts[:batch_size]) + self._decoded + 1)
        self._attention.begin(self, batch_size, width)

    def reach(self, batch_size: int, length: int) -> int:
        """The columns to read where the longest completion of the first slots has this length; they are finite."""
        width = min(round_up(length, self.key_multiple), self.columns)
        if width > self._cleared:
            self._clear(batch_size, width)
        return width

    def end_token(self, batch_size: int) -> None:
        """Count the token that every layer has stored.

        The slot of an ended completion is decoded until it is reused, and stays at its last column.
        """
        self.lengths_S[:batch_size].add_(1).clamp_(max=self.columns - 1)
        positions_R = self.positions_S[:batch_size].add_(1)
        torch.minimum(positions_R, self.limits_S[:batch_size], out=positions_R)
        self._decoded += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Store the keys and values of the new tokens and attend over all; see AttentionContext, here with L = 1."""
        self.calls.append(layer)
        columns = self._next_columns(len(key), key.shape[1])
        for memory, new in zip(self.layers[layer], (key, value), strict=True):
            memory.view(-1, memory.shape[-1]).index_copy_(0, columns, new.flatten(0, 2))
        return self._attention.attend(self, layer, query, rule)

    def attend_stored(self, layer: int, query: Tensor, rule: AttentionRule) -> Tensor:
        """Attend with query [R, Hq, D] over keys of prompts and completions, the new tokens' stored already."""
        self.calls.append(layer)
        return self._attention.attend(self, layer, query[:, :, None], rule)[:, 0]

    def _next_columns(self, batch_size: int, kv_heads: int) -> Tensor:
        """int64 [R * Hkv]: the target of each new key head in a layer's memory, viewed as vectors of size D; kept for
        all layers of the step."""
        if kv_heads not in self._columns:
            lengths_R = self.lengths_S[:batch_size]
            heads = torch.arange(batch_size * kv_heads, device=lengths_R.device).view(batch_size, kv_heads)
            self._columns[kv_heads] = (heads * self.columns + lengths_R[:, None]).flatten()
        return self._columns[kv_heads]

    def _index(self, indices: Sequence[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.int64, device=self.lengths_S.device)

    def _move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        used = min(self._cleared, self.columns)
        for memories in self.layers.values():
            for memory in memories:
                self._move(memory[:, :, :used], sources, targets)
        for tensor in self._of_slots:
            self._move(tensor, sources, targets)
        for source, target in zip(sources, targets, strict=True):
            self._starts[target] = self._starts[source]

    def _move_prompts(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.prompts.move(sources, targets)
        now_at_A = torch.arange(self.prompts.num_entries, device=self.prompt_S.device)
        now_at_A.index_copy_(0, self._index(sources), self._index(targets))
        self.prompt_S.copy_(now_at_A.index_select(0, self.prompt_S))

    def _move(self, memory: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        memory.index_copy_(0, self._index(targets), memory.index_select(0, self._index(sources)))

    def _allocate(self, layer: int, states: tuple[Tensor, Tensor]) -> None:
        keys, values = (new.new_empty(self.num_slots, new.shape[1], self.columns, new.shape[2]) for new in states)
        for memory in (keys, values):
            memory[:, :, : self._cleared].zero_()
        self.layers[layer] = (keys, values)

    def _clear(self, batch_size: int, width: int) -> None:
        """Write zeros to new columns: hidden columns are read too, with weight 0, so they must be finite.

        Clearing the whole memory at once would cost more than a short request, and most of it is never used.
        """
        for memories in self.layers.values():
            for memory in memories:
                memory[:batch_size, :, self._cleared : width].zero_()
        self._cleared = width


class PromptCache:
    """Keys and values of prompts by entry, each prompt in a region wide enough for it."""

    def __init__(self, entries: int, buckets: Buckets, device: torch.device) -> None:
        self.num_entries = entries
        self.buckets = dict(sorted(buckets.items()))
        sizes = [columns * count for columns, count in self.buckets.items()]
        self._begin = dict(zip(self.buckets, accumulate([0, *sizes]), strict=False))
        self.cells = sum(sizes)
        self.longest = max(self.buckets)
        self.lengths_A = torch.zeros(entries, dtype=torch.int64, device=device)
        """The tokens of each entry's prompt."""
        self.starts_A = torch.zeros_like(self.lengths_A)
        """The first cell of each entry's region."""
        self.columns_A = torch.zeros_like(self.lengths_A)
        """The columns of each entry's region."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Per layer keys and values [cells * Hkv, D]."""
        self._regions: dict[int, Region] = {}
        self._free: dict[int, list[int]] = {}
        self.restart()

    @property
    def tables(self) -> list[Tensor]:
        """Tensors that locate the prompts."""
        return [self.lengths_A, self.starts_A, self.columns_A]

    def serves(self, entries: int, buckets: Buckets) -> bool:
        """Whether this memory fits the prompts of such a request."""
        fit = (count <= self.buckets.get(columns, 0) for columns, count in buckets.items())
        return entries <= self.num_entries and all(fit)

    def restart(self) -> None:
        """Drop all prompts, but keep the memory."""
        for table in self.tables:
            table.zero_()
        self._regions = {}
        self._free = {columns: list(range(count))[::-1] for columns, count in self.buckets.items()}

    def region_of(self, entry: int) -> Region:
        """The region of an entry's prompt; any region for an entry without a prompt."""
        return self._regions.get(entry, (min(self.buckets), 0))

    def store(self, entries: Sequence[int], row: PackedRow, kept: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Keep the prompts of a prefill; prompt p becomes entry entries[p]."""
        lengths_P = torch.cat([segments.lengths for segments in row.prompts])  # in the order of the row
        entries = [entries[p] for p in row.order_P]
        for entry in entries:
            self._release(entry)
        regions = [self._occupy(entry, length) for entry, length in zip(entries, lengths_P.tolist(), strict=True)]
        starts = [self._begin[columns] + columns * index for columns, index in regions]
        located = (lengths_P, self._index(starts), self._index([columns for columns, _ in regions]))
        for table, values in zip(self.tables, located, strict=True):
            table.index_copy_(0, self._index(entries), values)
        cells: dict[int, Tensor] = {}
        for layer, states in kept.items():
            if layer not in self.layers:
                self._allocate(layer, states)
            kv_heads = states[0].shape[1]
            if kv_heads not in cells:
                cells[kv_heads] = _cells(*located, kv_heads)
            for memory, new in zip(self.layers[layer], states, strict=True):
                memory.index_copy_(0, cells[kv_heads], new.flatten(0, 1))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Rename entries: the source prompts become those of the targets. Copies no keys or values."""
        for target in targets:
            self._release(target)
        for source, target in zip(sources, targets, strict=True):
            if source in self._regions:
                self._regions[target] = self._regions.pop(source)
        for table in self.tables:
            table.index_copy_(0, self._index(targets), table.index_select(0, self._index(sources)))

    def bucket(self, layer: int, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all regions of one size, [count, Hkv, columns, D]."""
        keys, values = self.layers[layer]
        kv_heads = len(keys) // self.cells
        begin, count = self._begin[columns] * kv_heads, self.buckets[columns]
        end = begin + count * columns * kv_heads
        keys, values = (memory[begin:end].view(count, kv_heads, columns, -1) for memory in (keys, values))
        return keys, values

    def _release(self, entry: int) -> None:
        if entry in self._regions:
            columns, index = self._regions.pop(entry)
            self._free[columns].append(index)

    def _occupy(self, entry: int, length: int) -> Region:
        columns = next(columns for columns in self.buckets if columns >= length and self._free[columns])
        free = self._free[columns]
        free.sort(reverse=True)  # use the lowest first: attention over adjacent regions needs no copy
        self._regions[entry] = (columns, free.pop())
        return self._regions[entry]

    def _allocate(self, layer: int, states: tuple[Tensor, Tensor]) -> None:
        keys, values = (new.new_empty(self.cells * new.shape[1], new.shape[2]).zero_() for new in states)
        self.layers[layer] = (keys, values)

    def _index(self, indices: Sequence[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.int64, device=self.lengths_A.device)


def _cells(lengths_P: Tensor, starts_P: Tensor, columns_P: Tensor, kv_heads: int) -> Tensor:
    """int64 [tokens * Hkv]: the target of each token's key heads in a layer's memory, viewed as vectors of size D."""
    within = offsets(lengths_P)
    first = torch.repeat_interleave(starts_P * kv_heads, lengths_P) + within
    stride = torch.repeat_interleave(columns_P, lengths_P)
    heads = torch.arange(kv_heads, device=within.device)
    return (first[:, None] + stride[:, None] * heads).flatten()


def fitting_buckets(lengths: Sequence[int], entries: int, *, multiple: int) -> dict[int, int]:
    """Regions for prompts of these lengths, at most `entries` at a time, as wide as similar lengths need."""
    buckets: dict[int, int] = {}
    for group in by_length(lengths):
        columns = round_up(max(lengths[p] for p in group), multiple)
        buckets[columns] = min(entries, buckets.get(columns, 0) + len(group))
    return buckets


def graded_buckets(lengths: Sequence[int], entries: int) -> dict[int, int]:
    """The same in the sizes 256, 384, 512, 768, ... and counts 1, 2, 4, ..., so that the next request is likely to
    fit."""
    counts: dict[int, int] = {}
    for length in lengths:
        columns = SMALLEST_GPU_REGION
        while columns < length:
            columns = columns * 3 // 2 if columns & (columns - 1) == 0 else columns * 4 // 3
        counts[columns] = counts.get(columns, 0) + 1
    return {columns: min(entries, 1 << (count - 1).bit_length()) for columns, count in counts.items()}


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is at least `length`."""
    return -(-length // multiple) * multiple
