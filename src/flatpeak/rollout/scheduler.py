"""Which completion is decoded in which slot: pure bookkeeping on integers.

A request is closed: all its completions are known at its start. Those expected to be long begin first, so that none of
them is left to be decoded alone at the end; freed slots are filled from the queue; and once the queue is empty the
completions that are left move together, so that a step costs no more than they need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Completions that begin: row `rows[k]` in slot `slots[k]`, its prompt at place `places[k]`."""

    rows: list[int]
    slots: list[int]
    places: list[int]
    new_prompts: dict[int, int]
    """Prompts that have to be read first, and the place of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compaction:
    """Completions and prompts that move to lower slots and places, and slots below `num_rows` left without one."""

    slots: tuple[list[int], list[int]]
    places: tuple[list[int], list[int]]
    idle: list[int]


def longest_first(prompt_lengths: Sequence[int], expected: Sequence[float | None]) -> list[int]:
    """The order of the prompts: the longest expected completions first, those of unknown length among the middle ones.

    Prompts of which nothing is known stand by their own length, which costs nothing and fills prefills evenly.
    """
    known = sorted(length for length in expected if length is not None)
    middle = known[len(known) // 2] if known else 0.0
    lengths = [middle if length is None else length for length in expected]
    return sorted(range(len(prompt_lengths)), key=lambda p: (-lengths[p], -prompt_lengths[p], p))


class Schedule:
    """P * G completions, row p * G + g of prompt p, in at most `num_slots` slots."""

    def __init__(
        self,
        order: Sequence[int],
        *,
        group_size: int,
        num_slots: int,
        buckets: Sequence[int],
        compact_below: float,
    ) -> None:
        """`buckets`: the numbers of slots that a step may decode, ascending; the last is at least `num_slots`."""
        self._queue = deque(p * group_size + g for p in order for g in range(group_size))
        self._group_size = group_size
        self._buckets = buckets
        self._compact_below = compact_below
        self._open = dict.fromkeys(order, group_size)  # completions of each prompt that have not ended
        self._place_of: dict[int, int] = {}
        self._num_slots = min(num_slots, len(self._queue))
        self.num_places = min(len(order), self._num_slots + 1)
        """Prompts in use at once: one in every slot, and one whose completions so far have ended while others wait."""
        self._free_places = list(range(self.num_places))[::-1]
        self.row_of: dict[int, int] = {}
        """The completion in each occupied slot."""
        self.num_rows = self.bucket(self._num_slots)
        """A step decodes the first so many slots."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to decode."""
        return not self._queue and not self.row_of

    def bucket(self, count: int) -> int:
        """The smallest number of slots a step may decode that holds `count`."""
        return next(size for size in self._buckets if size >= count)

    def admit(self) -> Admission | None:
        """Fill free slots from the queue: as soon as an eighth of them is free, as every filling reads prompts."""
        free = self._num_slots - len(self.row_of)
        if not self._queue or (self.row_of and free < min(len(self._queue), max(1, self._num_slots // 8))):
            return None
        slots = [slot for slot in range(self._num_slots) if slot not in self.row_of][: len(self._queue)]
        rows = [self._queue.popleft() for _ in slots]
        prompts = [row // self._group_size for row in rows]
        new_prompts = {p: self._free_places.pop() for p in dict.fromkeys(prompts) if p not in self._place_of}
        self._place_of |= new_prompts
        self.row_of |= dict(zip(slots, rows, strict=True))
        return Admission(rows=rows, slots=slots, places=[self._place_of[p] for p in prompts], new_prompts=new_prompts)

    def end(self, slots: Sequence[int]) -> list[int]:
        """The completions in these slots have ended; the prompts whose groups are complete with that."""
        complete = []
        for slot in slots:
            prompt = self.row_of.pop(slot) // self._group_size
            self._open[prompt] -= 1
            if not self._open[prompt]:
                complete.append(prompt)
                self._free_places.append(self._place_of.pop(prompt))
        return complete

    def compact(self) -> Compaction | None:
        """Move what is left together, if the queue is empty and few enough are left."""
        if self._queue or not self.row_of or len(self.row_of) > self._compact_below * self.num_rows:
            return None
        smaller = self.bucket(len(self.row_of))
        if smaller == self.num_rows:
            return None
        self.num_rows = smaller
        slots, self.row_of = _densely(self.row_of)
        place_moves, by_place = _densely({place: prompt for prompt, place in self._place_of.items()})
        self._place_of = {prompt: place for place, prompt in by_place.items()}
        self._free_places = []  # no prompt is read any more
        return Compaction(slots=slots, places=place_moves, idle=list(range(len(self.row_of), smaller)))


def _densely(held: Mapping[int, int]) -> tuple[tuple[list[int], list[int]], dict[int, int]]:
    """((sources, targets), held after these moves): as few moves as leave indices 0, 1, ... without a hole."""
    sources = [index for index in held if index >= len(held)]
    targets = [index for index in range(len(held)) if index not in held]
    moves = dict(zip(sources, targets, strict=True))
    return (sources, targets), {moves.get(index, index): value for index, value in held.items()}
