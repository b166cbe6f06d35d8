"""Workloads: random models, and prompts whose answers get their lengths from the model.

A new model gives every token about the same probability. So a vocabulary of 96 ends an answer at each token with
probability 1/96, and answers capped at 256 tokens have skewed lengths with a mean of about a third of the cap; a
vocabulary of 512 with a cap of 128 makes nearly all answers as long as the cap. This file uses only the standard
library, because vLLM's Python does not have flatpeak.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PAD, EOS = 0, 1
FIRST_WORD = 2
"""The smallest token id that is a word."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The shape of a Qwen2 model with a tied output layer."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    prompts: int
    """Prompts of a step, each with GROUP completions."""


SIZES = {
    "1M": Size(hidden=128, intermediate=512, layers=4, heads=4, kv_heads=2, prompts=8),
    "7M": Size(hidden=256, intermediate=1024, layers=7, heads=4, kv_heads=2, prompts=8),
    "45M": Size(hidden=512, intermediate=2048, layers=12, heads=8, kv_heads=4, prompts=4),
}
GROUP = 8
"""Completions of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The lengths of prompts and answers."""

    vocabulary: int
    cap: int
    """The most tokens of an answer."""
    shortest_prompt: int
    longest_prompt: int


LENGTHS = {
    "skewed": Lengths(vocabulary=96, cap=256, shortest_prompt=40, longest_prompt=80),
    "uniform, long prompts": Lengths(vocabulary=512, cap=128, shortest_prompt=120, longest_prompt=136),
    "uniform, short prompts": Lengths(vocabulary=512, cap=128, shortest_prompt=10, longest_prompt=20),
    "vocabulary 32k": Lengths(vocabulary=32_000, cap=128, shortest_prompt=60, longest_prompt=68),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its prompts, by name; a real model has explicit prompts."""

    size: str
    lengths: str
    prompts: int
    """Prompts of a step."""
    group: int = GROUP
    asked: Sequence[tuple[str, list[int]]] = ()
    """A real model's prompts for all steps: text and tokens."""
    cap: int = 0
    """The most tokens of a real model's answer."""
    eos: int = EOS
    pad: int = PAD

    @property
    def shape(self) -> Size:
        """The shape of the model."""
        return SIZES[self.size]

    @property
    def limits(self) -> Lengths:
        """The lengths of prompts and answers."""
        if self.asked:
            longest = max(len(ids) for _, ids in self.asked)
            return Lengths(vocabulary=0, cap=self.cap, shortest_prompt=0, longest_prompt=longest)
        return LENGTHS[self.lengths]

    def useful_tokens(self, sequence: list[int]) -> int:
        """Tokens of an answer up to and including its end-of-sequence token, without padding."""
        return sequence.index(self.eos) + 1 if self.eos in sequence else len(sequence)


def workload(size: str, lengths: str, *, prompts: int | None = None) -> Workload:
    """Make a workload by name, by default with the size's number of prompts."""
    return Workload(size=size, lengths=lengths, prompts=prompts or SIZES[size].prompts)


def prompt_ids(work: Workload, step: int) -> list[list[int]]:
    """The prompts of a step: different words in each step, so that caching does not help any contender."""
    if work.asked:
        return [ids for _, ids in work.asked[step * work.prompts : (step + 1) * work.prompts]]
    limits = work.limits
    draw = random.Random(f"{limits} {step}")
    return [
        [
            draw.randrange(FIRST_WORD, limits.vocabulary)
            for _ in range(draw.randint(limits.shortest_prompt, limits.longest_prompt))
        ]
        for _ in range(work.prompts)
    ]


def prompt_texts(work: Workload, step: int) -> list[str]:
    """The texts of the prompts of a step."""
    if work.asked:
        return [text for text, _ in work.asked[step * work.prompts : (step + 1) * work.prompts]]
    return [as_text(ids) for ids in prompt_ids(work, step)]


def as_text(token_ids: list[int]) -> str:
    """The words of a random model for these tokens."""
    return " ".join(f"w{token}" for token in token_ids)


def continuous_batching(work: Workload) -> dict[str, int]:
    """Settings of transformers' continuous batching that fit the workload; the fastest of those tried.

    With its defaults it fills half of the machine's memory with cache, and is six times slower.
    """
    page = 16
    pages = -(-(work.limits.longest_prompt + work.limits.cap) // page) + 1
    return {"page_size": page, "num_blocks": pages * work.prompts * work.group, "max_batch_tokens": 512}
