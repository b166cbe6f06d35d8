"""A request whose completions have several turns: what follows a turn is appended, and the next turn is sampled.

A completion keeps its slot while it is answered, and its keys: a turn costs its own new tokens. The tokens of all turns
are in one row of the buffer, so `max_new_tokens` bounds the whole completion. Reading answers costs a pass in which no
completion samples: answers wait until there is one for every eight completions that sample, and no longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from flatpeak.rollout.engine_request import Request
from flatpeak.rollout.randomness import completion_keys
from flatpeak.rollout.scheduler import Admission
from flatpeak.types import Completion
from flatpeak.utils.buckets import in_buckets

TOGETHER: Final = 8
"""Answers wait until there is one for every so many completions that sample meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NextTurn:
    """The input of a completion before its next turn."""

    id: str
    """Determines the turn's random numbers, as a prompt's id does."""
    added: Sequence[int]
    """The tokens that follow its last turn; at least one."""


class Dialogue(Protocol):
    """The other side of a conversation."""

    max_tokens: int | None
    """The most tokens of a turn."""

    def take(self, completion: int, turn: Completion) -> bool:
        """Read a turn; False ends the completion."""
        ...

    def answers(self, *, least: int, wait: bool) -> Sequence[tuple[int, NextTurn | None]]:
        """Completions with what they read next, or None for an end; none while fewer than `least` have an answer.

        `wait`: wait until one has.
        """
        ...

    def begin(self, completions: Sequence[int]) -> None:
        """Note that these completions begin: until now they have waited for a slot."""
        ...


@dataclass(kw_only=True)
class Conversation(Request):
    """A Request of several turns."""

    dialogue: Dialogue
    seed: int
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Completions that are being answered, each with its length and its last token."""

    @property
    def decoding(self) -> list[int]:
        """The completions that sample tokens."""
        return [completion for completion in self.schedule.completion_in.values() if completion not in self.waiting]

    def advance(self, num_tokens: int) -> list[int]:
        """Begin the turns that can begin, and sample; return the prompts whose groups this completes."""
        complete = self._continue(wait=False) or super().advance(num_tokens)
        return complete or ([] if self.decoding else self._continue(wait=True))

    @torch.inference_mode()
    def _continue(self, *, wait: bool) -> list[int]:
        """Append answers; return the prompts whose groups are complete."""
        if not self.waiting:
            return []
        answers = self.dialogue.answers(least=len(self.decoding) // TOGETHER, wait=wait)
        slot_of = {completion: slot for slot, completion in self.schedule.completion_in.items()}
        turns = {completion: turn for completion, turn in answers if turn is not None}
        for batch in in_buckets(list(turns), lambda c: 1 + len(turns[c].added), most=self.prefill_tokens):
            slots, ends = [slot_of[completion] for completion in batch], [self.waiting[c] for c in batch]
            logits_KV = self.decoder.extend(
                self.slots.cache,
                slots,
                [length - 1 for length, _ in ends],  # the last token of a turn has not been read
                [[last, *turns[completion].added] for completion, (_, last) in zip(batch, ends, strict=True)],
            )
            keys = completion_keys(self.seed, [turns[completion].id for completion in batch], 1)
            self.slots.buffer.resume(batch, [turns[completion].added for completion in batch], keys)
            self.slots.begin(slots, batch, logits_KV)
        for completion, _ in answers:
            del self.waiting[completion]
        return self._free([slot_of[completion] for completion, turn in answers if turn is None])

    def _begin(self, admission: Admission) -> None:
        self.dialogue.begin(admission.completions)
        super()._begin(admission)

    def _collect(self) -> list[int]:
        if self.dialogue.max_tokens is not None:
            self.slots.buffer.end_long_turns(self.decoding, self.dialogue.max_tokens)
        return super()._collect()

    def _ended(self, slots: Sequence[int]) -> list[int]:
        """Those slots whose completions have no further turn."""
        completions = [self.schedule.completion_in[slot] for slot in slots]
        lengths = self.slots.buffer.lengths_N.tolist()
        for completion, turn in zip(completions, self.slots.buffer.completions(completions), strict=True):
            if self.dialogue.take(completion, turn):
                self.waiting[completion] = (lengths[completion], turn.token_ids[-1])
        return [slot for slot, completion in zip(slots, completions, strict=True) if completion not in self.waiting]
