"""What every engine does around its decoding: check the request, cut it to size, and put the groups together."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flatpeak.errors import UserError
from flatpeak.rollout.randomness import row_keys
from flatpeak.rollout.rows import Rows
from flatpeak.rollout.stopping import StopStrings
from flatpeak.types import Completion, Group, Prompt, SamplingParams

if TYPE_CHECKING:
    from flatpeak.protocols import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Completions decoded side by side: the same copies of each of some prompts."""

    prompts: tuple[int, ...]
    """Indices of the prompts."""
    copies: range
    """Indices within their groups."""


def plan_chunks(prompt_lengths: Sequence[int], *, group_size: int, max_rows: int) -> list[Chunk]:
    """Cut P * G completions into chunks of at most `max_rows`, prompts of similar length together, longest first.

    A group is cut only where it alone is larger than `max_rows`.
    """
    order = sorted(range(len(prompt_lengths)), key=lambda p: -prompt_lengths[p])
    copies_at_once = min(group_size, max_rows)
    prompts_at_once = max_rows // copies_at_once if copies_at_once == group_size else 1
    return [
        Chunk(
            prompts=tuple(order[first : first + prompts_at_once]),
            copies=range(copy, min(copy + copies_at_once, group_size)),
        )
        for first in range(0, len(order), prompts_at_once)
        for copy in range(0, group_size, copies_at_once)
    ]


def generate_in_chunks(
    decode: Callable[[Rows, list[tuple[int, ...]], int], None],
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    sampling: SamplingParams,
    seed: int,
    max_rows: int,
    eos_token_ids: Set[int],
    tokenizer: Tokenizer,
    device: torch.device | str,
) -> list[Group]:
    """Groups in the order of the prompts; `decode(rows, token_ids_P, copies)` draws the completions of a chunk."""
    check_request(prompts, group_size, sampling, max_rows)
    stop_strings = StopStrings(sampling.stop, tokenizer) if sampling.stop else None
    keys_PG = row_keys(seed, [prompt.id for prompt in prompts], group_size).view(len(prompts), group_size)
    completions: dict[tuple[int, int], Completion] = {}
    lengths = [len(prompt.token_ids) for prompt in prompts]
    for chunk in plan_chunks(lengths, group_size=group_size, max_rows=max_rows):
        rows = Rows(
            keys_PG[list(chunk.prompts)][:, chunk.copies.start : chunk.copies.stop].flatten(),
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            stop_strings=stop_strings,
            device=device,
        )
        decode(rows, [prompts[p].token_ids for p in chunk.prompts], len(chunk.copies))
        places = [(p, g) for p in chunk.prompts for g in chunk.copies]
        completions.update(zip(places, rows.completions(range(rows.count)), strict=True))
    return [
        Group(prompt=prompt, completions=tuple(completions[p, g] for g in range(group_size)))
        for p, prompt in enumerate(prompts)
    ]


def check_request(prompts: Sequence[Prompt], group_size: int, sampling: SamplingParams, max_rows: int) -> None:
    """UserError where settings cannot work, or a prompt is empty."""
    wrong = [
        f"{name}={value}: {rule}"
        for name, value, holds, rule in (
            ("group_size", group_size, group_size >= 1, "at least 1"),
            ("max_rows", max_rows, max_rows >= 1, "at least 1"),
            ("temperature", sampling.temperature, sampling.temperature >= 0, "0 (greedy) or more"),
            ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
            ("top_k", sampling.top_k, sampling.top_k >= 0, "0 (off) or more"),
            ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", sampling.min_new_tokens, sampling.min_new_tokens >= 0, "0 or more"),
        )
        if not holds
    ]
    if wrong:
        raise UserError(f"these sampling settings cannot work: {'; '.join(wrong)}")
    for prompt in prompts:
        if not prompt.token_ids:
            raise UserError(f"prompt {prompt.id} has no tokens: give it at least one, such as the tokenizer's BOS")
