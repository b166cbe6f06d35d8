"""One request of the native engine: prompts are read, completions go through slots, and groups are completed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatpeak.rollout.scheduler import Admission, Schedule
from flatpeak.rollout.slots import DecodeSlots
from flatpeak.types import Group, Prompt
from flatpeak.utils.buckets import in_buckets

if TYPE_CHECKING:
    from flatpeak.protocols import Decoder


@dataclass(kw_only=True)
class Request:
    """A call of the engine, from reading the first prompt to completing the last group."""

    decoder: Decoder
    prompts: Sequence[Prompt]
    slots: DecodeSlots
    schedule: Schedule
    group_size: int
    prefill_tokens: int
    first_logits: dict[int, Tensor] = field(default_factory=dict)
    """The logits after each prompt that was read, until its last completion starts."""

    @property
    def done(self) -> bool:
        """Whether every group is complete."""
        return self.schedule.done

    @property
    def decoding(self) -> list[int]:
        """The completions that sample tokens."""
        return list(self.schedule.completion_in.values())

    @torch.inference_mode()
    def advance(self, num_tokens: int) -> list[int]:
        """Sample `num_tokens` tokens for each completion in a slot; return the prompts whose groups this completes."""
        while admission := self.schedule.admit(sampling=len(self.decoding)):
            self._begin(admission)
            complete = self._collect()
            if complete:
                return complete
        if self.decoding:
            for _ in range(num_tokens):
                self.slots.step(self.schedule.batch_size)
        return self._collect()

    def group(self, p: int) -> Group:
        """The group of a prompt, which is complete."""
        indices = range(p * self.group_size, (p + 1) * self.group_size)
        return Group(prompt=self.prompts[p], completions=tuple(self.slots.buffer.completions(indices)))

    def _begin(self, admission: Admission) -> None:
        """Read new prompts, put completions into slots, and sample their first tokens, one batch of prompts at a
        time."""
        cache = self.slots.cache
        completions_of: dict[int, list[int]] = {}
        for k, completion in enumerate(admission.completions):
            completions_of.setdefault(completion // self.group_size, []).append(k)
        self._draw_first(admission, {p: ks for p, ks in completions_of.items() if p not in admission.new_prompts})
        # Read prompts of similar lengths together.
        new_prompts = sorted(admission.new_prompts, key=lambda p: -self._length(p))
        for read in in_buckets(new_prompts, self._length, most=self.prefill_tokens):
            token_ids = [self.prompts[p].token_ids for p in read]
            logits_PV = self.decoder.prefill(cache, token_ids, [admission.new_prompts[p] for p in read])
            self.first_logits |= dict(zip(read, logits_PV, strict=True))
            self._draw_first(admission, {p: completions_of[p] for p in read})

    def _length(self, p: int) -> int:
        return len(self.prompts[p].token_ids)

    def _draw_first(self, admission: Admission, completions_of: dict[int, list[int]]) -> None:
        """Start completions of these prompts, which have been read; the dict has their positions in the admission."""
        if not completions_of:
            return
        chosen = [k for ks in completions_of.values() for k in ks]
        slots, entries, completions = (
            [each[k] for k in chosen] for each in (admission.slots, admission.entries, admission.completions)
        )
        self.slots.cache.admit(slots, entries)
        rows = [row for row, ks in enumerate(completions_of.values()) for _ in ks]
        logits_KV = torch.stack([self.first_logits[p] for p in completions_of])[rows]
        self.slots.begin(slots, completions, logits_KV)
        for p in completions_of:
            if (p + 1) * self.group_size - 1 in admission.completions:  # the last of its group
                del self.first_logits[p]

    def _collect(self) -> list[int]:
        """Free the slots of ended completions; return the prompts whose groups are complete."""
        decoding = self.decoding
        self.slots.buffer.end_at_stop_strings(decoding)
        flags = self.slots.buffer.ended_N.tolist()
        ended = {completion for completion in decoding if flags[completion]}
        slots = [slot for slot, completion in self.schedule.completion_in.items() if completion in ended]
        if not slots:
            return []
        self.slots.vacate(slots)
        return self._free(self._ended(slots))

    def _ended(self, slots: Sequence[int]) -> Sequence[int]:
        """Those slots whose completions have no further turn."""
        return slots

    def _free(self, slots: Sequence[int]) -> list[int]:
        if not slots:
            return []
        complete = self.schedule.end(slots)
        compaction = self.schedule.compact()
        if compaction is not None:
            self.slots.cache.compact(compaction.slots, compaction.entries, compaction.idle)
            self.slots.move(*compaction.slots)
            self.slots.vacate(compaction.idle)
        return complete
