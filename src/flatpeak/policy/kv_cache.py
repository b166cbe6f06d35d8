"""Keys and values of the completions being decoded: contiguous slots per layer, and each prompt's once.

S slots, of which a step decodes the first R; D the head dimension. A slot's token j stands at column j of its own
memory; its prompt's stand at the prompt's place, shared by all of its group. Memory is allocated once and written in
place, so that graphs captured on it stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from flatpeak.policy.packing import PackedRow, by_length, offsets
from flatpeak.policy.training_attention import AttentionRule, PackedContext

Rooms = Mapping[int, int]
"""Columns of a room -> how many rooms of that size."""
Home = tuple[int, int]
"""The columns of a room, and which of that size it is."""
SMALLEST_GPU_ROOM = 256


def fitting_rooms(lengths: Sequence[int], places: int, *, multiple: int) -> dict[int, int]:
    """Rooms for prompts of these lengths, at most `places` of them at a time: as wide as those of similar length."""
    found: dict[int, int] = {}
    for group in by_length(lengths):
        columns = round_up(max(lengths[p] for p in group), multiple)
        found[columns] = min(places, found.get(columns, 0) + len(group))
    return found


def graded_rooms(lengths: Sequence[int], places: int) -> dict[int, int]:
    """The same in the sizes 256, 384, 512, 768, ... and numbers 1, 2, 4, ...: those of the next request fit too."""
    counts: dict[int, int] = {}
    for length in lengths:
        columns = SMALLEST_GPU_ROOM
        while columns < length:
            columns = columns * 3 // 2 if columns & (columns - 1) == 0 else columns * 4 // 3
        counts[columns] = counts.get(columns, 0) + 1
    return {columns: min(places, 1 << (count - 1).bit_length()) for columns, count in counts.items()}


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is at least `length`."""
    return -(-length // multiple) * multiple


class PromptMemory:
    """Keys and values of prompts, with the places where they stand."""

    def __init__(self, places: int, rooms: Rooms, device: torch.device) -> None:
        self.places = places
        self.rooms = dict(sorted(rooms.items()))
        sizes = [columns * rows for columns, rows in self.rooms.items()]
        self._begin = dict(zip(self.rooms, accumulate([0, *sizes]), strict=False))
        self.cells = sum(sizes)
        self.longest = max(self.rooms)
        self.lengths_A = torch.zeros(places, dtype=torch.int64, device=device)
        self.starts_A = torch.zeros_like(self.lengths_A)
        """The first cell of each place's room."""
        self.columns_A = torch.zeros_like(self.lengths_A)
        """The columns of each place's room."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Per layer keys and values [cells * Hkv, D]."""
        self._home: dict[int, Home] = {}
        self._free: dict[int, list[int]] = {}
        self.restart()

    @property
    def tables(self) -> list[Tensor]:
        """Tensors that locate the prompts."""
        return [self.lengths_A, self.starts_A, self.columns_A]

    def serves(self, places: int, rooms: Rooms) -> bool:
        """Whether there is room for such a request."""
        return places <= self.places and all(rows <= self.rooms.get(columns, 0) for columns, rows in rooms.items())

    def restart(self) -> None:
        """Forget all prompts and keep the memory."""
        for table in self.tables:
            table.zero_()
        self._home = {}
        self._free = {columns: list(range(rows))[::-1] for columns, rows in self.rooms.items()}

    def home(self, place: int) -> Home:
        """Where a place's prompt stands; of a place that has none, some room."""
        return self._home.get(place, (min(self.rooms), 0))

    def store(self, places: Sequence[int], row: PackedRow, kept: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Keep the prompts of a prefill, number p of them at places[p]."""
        lengths_P = torch.cat([segments.lengths for segments in row.prompts])  # as they stand in the row
        places = [places[p] for p in row.order_P]
        for place in places:
            self._leave(place)
        homes = [self._move_in(place, length) for place, length in zip(places, lengths_P.tolist(), strict=True)]
        starts = [self._begin[columns] + columns * index for columns, index in homes]
        found = (lengths_P, self._index(starts), self._index([columns for columns, _ in homes]))
        for table, values in zip(self.tables, found, strict=True):
            table.index_copy_(0, self._index(places), values)
        cells: dict[int, Tensor] = {}
        for layer, states in kept.items():
            if layer not in self.layers:
                self._allocate(layer, states)
            kv_heads = states[0].shape[1]
            if kv_heads not in cells:
                cells[kv_heads] = _cells(*found, kv_heads)
            for memory, new in zip(self.layers[layer], states, strict=True):
                memory.index_copy_(0, cells[kv_heads], new.flatten(0, 1))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Prompts at the first places are those at the others from now on; what they know stays where it is."""
        for target in targets:
            self._leave(target)
        for source, target in zip(sources, targets, strict=True):
            if source in self._home:
                self._home[target] = self._home.pop(source)
        for table in self.tables:
            table.index_copy_(0, self._index(targets), table.index_select(0, self._index(sources)))

    def room(self, layer: int, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the rooms of one size, [rows, Hkv, columns, D]."""
        keys, values = self.layers[layer]
        kv_heads = len(keys) // self.cells
        begin, rows = self._begin[columns] * kv_heads, self.rooms[columns]
        end = begin + rows * columns * kv_heads
        keys, values = (memory[begin:end].view(rows, kv_heads, columns, -1) for memory in (keys, values))
        return keys, values

    def _leave(self, place: int) -> None:
        if place in self._home:
            columns, index = self._home.pop(place)
            self._free[columns].append(index)

    def _move_in(self, place: int, length: int) -> Home:
        columns = next(columns for columns in self.rooms if columns >= length and self._free[columns])
        free = self._free[columns]
        free.sort(reverse=True)  # the lowest first: attention over rooms that lie together needs no copy
        self._home[place] = (columns, free.pop())
        return self._home[place]

    def _allocate(self, layer: int, states: tuple[Tensor, Tensor]) -> None:
        keys, values = (new.new_empty(self.cells * new.shape[1], new.shape[2]).zero_() for new in states)
        self.layers[layer] = (keys, values)

    def _index(self, indices: Sequence[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.int64, device=self.lengths_A.device)


def _cells(lengths_P: Tensor, starts_P: Tensor, columns_P: Tensor, kv_heads: int) -> Tensor:
    """int64 [tokens * Hkv]: where each token's key heads go in a layer's memory, seen as rows of D."""
    within = offsets(lengths_P)
    first = torch.repeat_interleave(starts_P * kv_heads, lengths_P) + within
    stride = torch.repeat_interleave(columns_P, lengths_P)
    heads = torch.arange(kv_heads, device=within.device)
    return (first[:, None] + stride[:, None] * heads).flatten()


class DecodeAttention(Protocol):
    """Attention of one new token per slot over a cache, on one kind of device (decode_attention_cpu, _gpu)."""

    def rearranged(self, cache: KeyValueCache) -> None:
        """Take note that slots or prompts have been filled, moved or emptied."""
        ...

    def begin(self, cache: KeyValueCache, num_rows: int, width: int) -> None:
        """Prepare a step over the first `num_rows` slots, none of which sees more than `width` own columns."""
        ...

    def columns(self, cache: KeyValueCache, kv_heads: int) -> Tensor:
        """See KeyValueCache.next_columns, for the slots of this step."""
        ...

    def attend(self, cache: KeyValueCache, layer: int, query: Tensor, rule: AttentionRule) -> Tensor:
        """Attend with query [R, Hq, 1, D] over prompts' and own keys, the newest included: [R, 1, Hq, D]."""
        ...


class KeyValueCache:
    """Implements protocols.DecodeState."""

    def __init__(
        self,
        *,
        slots: int,
        places: int,
        rooms: Rooms,
        new_tokens: int,
        key_multiple: int,
        attention: DecodeAttention,
        device: torch.device,
    ) -> None:
        self.num_slots = slots
        self.key_multiple = key_multiple
        self.columns = round_up(new_tokens, key_multiple)
        self.new_tokens = new_tokens
        """At most so many per completion in this request."""
        self.lengths_S = torch.zeros(slots, dtype=torch.int64, device=device)
        """Own columns filled."""
        self.positions_S = torch.zeros_like(self.lengths_S)
        """The position of the token that comes next."""
        self.limits_S = torch.zeros_like(self.lengths_S)
        """The position of a completion's last token: learned positions end there."""
        self.prompt_S = torch.zeros_like(self.lengths_S)
        """The place of each slot's prompt."""
        self.prompts = PromptMemory(places, rooms, device)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Per layer keys and values [S, Hkv, columns, D]."""
        self.calls: list[int] = []
        """The layers that asked for attention in this step."""
        self._on_gpu = device.type != "cpu"
        self._starts = [0] * slots  # a slot's own length is its start plus the tokens decoded since the cache began
        self._decoded = 0
        self._cleared = self.columns if self._on_gpu else 0  # a captured step must not clear anything
        self._attention = attention

    @property
    def marks(self) -> list[Tensor]:
        """What says where the next token goes."""
        return [self.lengths_S, self.positions_S]

    @property
    def tensors(self) -> list[Tensor]:
        """All that a step reads or writes."""
        memories = [m for pairs in (self.prompts.layers, self.layers) for pair in pairs.values() for m in pair]
        return [*self._of_slots, *self.prompts.tables, *memories]

    @property
    def _of_slots(self) -> list[Tensor]:
        return [*self.marks, self.limits_S, self.prompt_S]

    def serves(self, *, slots: int, places: int, rooms: Rooms, new_tokens: int) -> bool:
        """Whether there is room for such a request."""
        return slots <= self.num_slots and new_tokens <= self.columns and self.prompts.serves(places, rooms)

    def restart(self, *, new_tokens: int) -> None:
        """Serve another request in the same memory."""
        for tensor in self._of_slots:
            tensor.zero_()
        self.prompts.restart()
        self.new_tokens = new_tokens
        self._starts = [0] * self.num_slots
        self._decoded = 0
        self._cleared = self.columns if self._on_gpu else 0
        self._attention.rearranged(self)

    def store(self, places: Sequence[int], prefill: PackedContext) -> None:
        """Keep the prompts of this prefill at these places."""
        assert prefill.kept is not None
        self.prompts.store(places, prefill.row, prefill.kept)
        for layer, states in prefill.kept.items():
            if layer not in self.layers:
                self._allocate(layer, states)

    def admit(self, slots: Sequence[int], places: Sequence[int]) -> None:
        """Begin completions in these slots, of the prompts at these places."""
        slots_K, places_K = self._index(slots), self._index(places)
        prompt_lengths_K = self.prompts.lengths_A.index_select(0, places_K)
        self.prompt_S.index_copy_(0, slots_K, places_K)
        self.positions_S.index_copy_(0, slots_K, prompt_lengths_K)
        self.limits_S.index_copy_(0, slots_K, prompt_lengths_K + self.new_tokens - 1)
        self.lengths_S.index_fill_(0, slots_K, 0)
        for slot in slots:
            self._starts[slot] = -self._decoded
        self._attention.rearranged(self)

    def compact(
        self,
        slots: tuple[Sequence[int], Sequence[int]],
        places: tuple[Sequence[int], Sequence[int]],
        idle: Sequence[int],
    ) -> None:
        """Move completions and prompts from sources to targets; nothing is decoded in the idle slots any more."""
        if slots[0]:
            self._move_slots(*slots)
        if places[0]:
            self._move_prompts(*places)
        if idle:
            for tensor in self._of_slots:
                tensor.index_fill_(0, self._index(idle), 0)
            for slot in idle:
                self._starts[slot] = -self._decoded
        self._attention.rearranged(self)

    def begin_token(self, num_rows: int) -> None:
        """Prepare a step over the first `num_rows` slots."""
        self.calls = []
        longest = max(self._starts[:num_rows]) + self._decoded + 1
        width = min(round_up(longest, self.key_multiple), self.columns)
        if width > self._cleared:
            self._clear(num_rows, width)
        self._attention.begin(self, num_rows, width)

    def end_token(self, num_rows: int) -> None:
        """The token is in. A slot whose completion has ended is decoded until others take its place: it stays put."""
        self.lengths_S[:num_rows].add_(1).clamp_(max=self.columns - 1)
        positions_R = self.positions_S[:num_rows].add_(1)
        torch.minimum(positions_R, self.limits_S[:num_rows], out=positions_R)
        self._decoded += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See attention.AttentionContext; L is 1."""
        self.calls.append(layer)
        columns = self._attention.columns(self, key.shape[1])
        for memory, new in zip(self.layers[layer], (key, value), strict=True):
            memory.view(-1, memory.shape[-1]).index_copy_(0, columns, new.flatten(0, 2))
        return self._attention.attend(self, layer, query, rule)

    def next_columns(self, num_rows: int, kv_heads: int) -> Tensor:
        """int64 [R * Hkv]: where each head's new token goes in a layer's memory, seen as rows of D."""
        lengths_R = self.lengths_S[:num_rows]
        heads = torch.arange(num_rows * kv_heads, device=lengths_R.device).view(num_rows, kv_heads)
        return (heads * self.columns + lengths_R[:, None]).flatten()

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
        now_at_A = torch.arange(self.prompts.places, device=self.prompt_S.device)
        now_at_A.index_copy_(0, self._index(sources), self._index(targets))
        self.prompt_S.copy_(now_at_A.index_select(0, self.prompt_S))

    def _move(self, memory: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        memory.index_copy_(0, self._index(targets), memory.index_select(0, self._index(sources)))

    def _allocate(self, layer: int, states: tuple[Tensor, Tensor]) -> None:
        keys, values = (new.new_empty(self.num_slots, new.shape[1], self.columns, new.shape[2]) for new in states)
        for memory in (keys, values):
            memory[:, :, : self._cleared].zero_()
        self.layers[layer] = (keys, values)

    def _clear(self, num_rows: int, width: int) -> None:
        """Zeros where nobody has written: a hidden column is read too, with weight 0, and must be finite for that.

        The whole memory at once would cost more than a short request takes; most of it is never reached.
        """
        for memories in self.layers.values():
            for memory in memories:
                memory[:num_rows, :, self._cleared : width].zero_()
        self._cleared = width
