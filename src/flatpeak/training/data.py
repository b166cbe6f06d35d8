"""The order in which prompts are used: a fresh permutation each pass, a pure function of (seed, cursor)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

import torch

from flatpeak.rollout.randomness import derive_seed
from flatpeak.types import Prompt

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Stream(Generic[Item]):
    """An endless reshuffled sequence of items. Position `cursor` is always the same item: nothing else to save."""

    items: Sequence[Item]
    seed: int

    def take(self, cursor: int, count: int) -> list[tuple[int, Item]]:
        """`count` items from `cursor` on, each with the number of its pass over the data."""
        size = len(self.items)
        return [
            (position // size, self.items[permutation(size, self.seed, position // size)[position % size]])
            for position in range(cursor, cursor + count)
        ]


@lru_cache(maxsize=8)
def permutation(size: int, seed: int, epoch: int) -> list[int]:
    """The order of one pass."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(size, generator=generator).tolist()


def take_prompts(stream: Stream[Prompt], cursor: int, count: int) -> list[Prompt]:
    """Prompts for a rollout. From the second pass on, ids name the pass, so that a prompt drawn twice in one step
    makes two groups with randomness of their own."""
    return [
        prompt if epoch == 0 else replace(prompt, id=f"{prompt.id}@{epoch}")
        for epoch, prompt in stream.take(cursor, count)
    ]
