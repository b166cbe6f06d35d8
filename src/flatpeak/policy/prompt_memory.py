"""Keys and values of the prompts in use, in rooms of a few sizes: a long prompt widens its own room and no other.

A places of prompts; D the head dimension. Rooms of one size lie behind each other, [rows, Hkv, columns, D], and those
of all sizes in one tensor [cells * Hkv, D], a cell being a column of all key heads. Tables say where each place's room
is; they and the memory are written in place, so that graphs captured on them stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from flatpeak.policy.lengths import by_length
from flatpeak.policy.packing import PackedRow, offsets

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
