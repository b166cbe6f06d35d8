"""The curriculum: a first task until a step or a pass rate is reached, then the main one; and the order of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Generic, TypeVar

import torch

from flatpeak.rewards.reward_set import RewardSet
from flatpeak.rollout.randomness import derive_seed
from flatpeak.training.config import DifficultyConfig
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


@dataclass(frozen=True, kw_only=True)
class MixedStream(Stream[Item]):
    """Several streams as one, each with its share of the positions. A position determines that of every stream."""

    streams: Sequence[Stream[Item]]
    weights: Sequence[float]

    def take(self, cursor: int, count: int) -> list[tuple[int, Item]]:
        """`count` items from `cursor` on, each with the number of its pass over its own stream."""
        drawn = (mixed_position(position, self.weights) for position in range(cursor, cursor + count))
        return [self.streams[index].take(position, 1)[0] for index, position in drawn]


def mixed_position(position: int, weights: Sequence[float]) -> tuple[int, int]:
    """The index of the stream at a position of a mixture, and the position in that stream.

    The first stream has floor(share * n + 1/2) of the first n positions; the others divide the rest alike. So every
    step has each stream's share, up to rounding.
    """
    for index in range(len(weights) - 1):
        share = weights[index] / sum(weights[index:])
        before, after = (math.floor(share * end + 0.5) for end in (position, position + 1))
        if after > before:
            return index, before
        position -= before
    return len(weights) - 1, position


@lru_cache(maxsize=32)
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


def next_prompts(
    stream: Stream[Prompt], cursor: int, count: int, *, skips: Callable[[Prompt], bool] | None
) -> tuple[list[Prompt], int]:
    """`count` prompts from `cursor` on without those that `skips` says, and the position after them.

    No more than the data has are passed over.
    """
    if skips is None:
        return take_prompts(stream, cursor, count), cursor + count
    prompts, last = list[Prompt](), cursor + len(stream.items)
    while len(prompts) < count:
        (prompt,) = take_prompts(stream, cursor, 1)
        cursor += 1
        if cursor > last or not skips(prompt):
            prompts.append(prompt)
    return prompts, cursor


def question_of(prompt: Prompt) -> str:
    """The name of a question, the same in every pass over the data and unique in a mixture."""
    return f"{prompt.example.task}/{prompt.example.id}" if prompt.example.task else prompt.example.id


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One task of a curriculum."""

    task: str
    prompts: Stream[Prompt]
    reward: RewardSet
    accuracy: str | None
    """The reward component whose mean is the pass rate; None where none says right or wrong."""
    max_steps: int | None = None
    """The phase ends after so many steps; None never ends."""
    until_pass_rate: float | None = None
    """The phase ends as soon as a step's pass rate reaches this."""

    def is_over(self, *, steps: int, pass_rate: float) -> bool:
        """Whether the phase ends after `steps` steps, the last of which passed at `pass_rate`."""
        if self.max_steps is None:
            return False
        return steps >= self.max_steps or (self.until_pass_rate is not None and pass_rate >= self.until_pass_rate)


@dataclass(kw_only=True, slots=True)
class Progression:
    """Position of a run in its curriculum and its data, saved in checkpoints."""

    phase: int = 0
    phase_steps: int = 0
    cursors: list[int]
    rates: dict[str, float] = field(default_factory=dict)
    """The last pass rate of each question that was asked, where questions are chosen by it."""

    @classmethod
    def start(cls, phases: Sequence[Phase]) -> Progression:
        """The beginning of every phase."""
        return cls(cursors=[0] * len(phases))

    def skips(self, rule: DifficultyConfig | None, *, seed: int) -> Callable[[Prompt], bool] | None:
        """Whether to pass over a prompt, by the last pass rate of its question; None without a rule.

        A function of the prompt, the seed and `rates`, which a checkpoint holds.
        """
        if rule is None:
            return None
        low, high = rule.pass_rate

        def skipped(prompt: Prompt) -> bool:
            rate = self.rates.get(question_of(prompt))
            if rate is None or low <= rate <= high:
                return False
            return derive_seed(seed, "difficulty", prompt.id) / 2**63 >= rule.keep

        return skipped

    def step_done(self, phases: Sequence[Phase], *, pass_rate: float) -> None:
        """Count the step, and move on where the phase is over."""
        self.phase_steps += 1
        if phases[self.phase].is_over(steps=self.phase_steps, pass_rate=pass_rate):
            self.phase += 1
            self.phase_steps = 0
            self.rates = {}  # another task's questions may have the same ids
