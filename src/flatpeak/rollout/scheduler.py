"""The schedule of a request, that is, which completion is decoded in which slot, with integers instead of tensors.

A request is closed: all its completions are known at the start. Completions that are expected to be long start first,
so that none is decoded alone at the end. The queue fills freed slots. Once the queue is empty, the remaining
completions move together, so that a step costs no more than they need.

Completion p * G + g is number g of the group of prompt p.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Completions that start: `completions[k]` in slot `slots[k]`, with its prompt in cache entry `entries[k]`."""

    completions: list[int]
    slots: list[int]
    entries: list[int]
    new_prompts: dict[int, int]
    """Prompts to read first, with the entry of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compaction:
    """Completions and prompts that move to lower slots and entries, and slots in the batch that become idle."""

    slots: tuple[list[int], list[int]]
    """(sources, targets)."""
    entries: tuple[list[int], list[int]]
    """(sources, targets)."""
    idle: list[int]


def longest_first(prompt_lengths: Sequence[int], expected: Sequence[float | None]) -> list[int]:
    """The order of the prompts: the longest expected completions first, prompts without an expectation in the middle.

    Without any expectation, the longest prompts come first, which costs nothing and fills prefills evenly.
    """
    known = sorted(length for length in expected if length is not None)
    middle = known[len(known) // 2] if known else 0.0
    lengths = [middle if length is None else length for length in expected]
    return sorted(range(len(prompt_lengths)), key=lambda p: (-lengths[p], -prompt_lengths[p], p))


class Schedule:
    """P * G completions in at most `num_slots` slots."""

    def __init__(
        self,
        order: Sequence[int],
        *,
        group_size: int,
        num_slots: int,
        batch_sizes: Sequence[int],
        compact_below: float,
    ) -> None:
        """`batch_sizes`: the numbers of slots that a step may decode, ascending; the last is at least `num_slots`."""
        self._queue = deque(p * group_size + g for p in order for g in range(group_size))
        self._group_size = group_size
        self._batch_sizes = batch_sizes
        self._compact_below = compact_below
        self._unfinished = dict.fromkeys(order, group_size)  # unfinished completions of each prompt
        self._entry_of: dict[int, int] = {}
        self._num_slots = min(num_slots, len(self._queue))
        self.num_entries = min(len(order), self._num_slots + 1)
        """The most prompts in use: one per slot, and one whose started completions have ended while others wait."""
        self._free_entries = list(range(self.num_entries))[::-1]
        self.completion_in: dict[int, int] = {}
        """The completion in each occupied slot."""
        self.batch_size = self.batch_size_for(self._num_slots)
        """The number of slots that a step decodes, from the first."""

    @property
    def done(self) -> bool:
        """Whether all completions have ended."""
        return not self._queue and not self.completion_in

    def batch_size_for(self, count: int) -> int:
        """The smallest number of slots that a step may decode and that is at least `count`."""
        return next(size for size in self._batch_sizes if size >= count)

    def admit(self, *, sampling: int | None = None) -> Admission | None:
        """Fill free slots from the queue once an eighth of the slots is free, because filling reads prompts.

        `sampling`: the occupied slots that sample, by default all; those that wait for something else do not count.
        """
        free = self._num_slots - len(self.completion_in)
        sampling = len(self.completion_in) if sampling is None else sampling
        least = min(len(self._queue), max(1, (free + sampling) // 8)) if sampling else 1
        if not self._queue or free < least:
            return None
        slots = [slot for slot in range(self._num_slots) if slot not in self.completion_in][: len(self._queue)]
        completions = [self._queue.popleft() for _ in slots]
        prompts = [completion // self._group_size for completion in completions]
        new_prompts = {p: self._free_entries.pop() for p in dict.fromkeys(prompts) if p not in self._entry_of}
        self._entry_of |= new_prompts
        self.completion_in |= dict(zip(slots, completions, strict=True))
        entries = [self._entry_of[p] for p in prompts]
        return Admission(completions=completions, slots=slots, entries=entries, new_prompts=new_prompts)

    def end(self, slots: Sequence[int]) -> list[int]:
        """Free the slots of ended completions; return the prompts whose groups are now complete."""
        complete = []
        for slot in slots:
            prompt = self.completion_in.pop(slot) // self._group_size
            self._unfinished[prompt] -= 1
            if not self._unfinished[prompt]:
                complete.append(prompt)
                self._free_entries.append(self._entry_of.pop(prompt))
        return complete

    def compact(self) -> Compaction | None:
        """Move the remaining completions together if the queue is empty and few enough remain."""
        if self._queue or not self.completion_in or len(self.completion_in) > self._compact_below * self.batch_size:
            return None
        smaller = self.batch_size_for(len(self.completion_in))
        if smaller == self.batch_size:
            return None
        self.batch_size = smaller
        slots, self.completion_in = _densely(self.completion_in)
        entries, prompt_in = _densely({entry: prompt for prompt, entry in self._entry_of.items()})
        self._entry_of = {prompt: entry for entry, prompt in prompt_in.items()}
        self._free_entries = []  # no more prompts will be read
        return Compaction(slots=slots, entries=entries, idle=list(range(len(self.completion_in), smaller)))


def _densely(occupied: Mapping[int, int]) -> tuple[tuple[list[int], list[int]], dict[int, int]]:
    """The fewest moves (sources, targets) that make indices 0, 1, ... contiguous, and the resulting occupancy."""
    sources = [index for index in occupied if index >= len(occupied)]
    targets = [index for index in range(len(occupied)) if index not in occupied]
    moves = dict(zip(sources, targets, strict=True))
    return (sources, targets), {moves.get(index, index): value for index, value in occupied.items()}
