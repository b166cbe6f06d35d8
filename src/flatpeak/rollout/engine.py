"""The native engine: reads each prompt once, keeps completions in slots, and decodes a token for all slots at a time.

A `Schedule` decides with integers which completion is in which slot; `DecodeSlots` and the decoder's cache apply this
to tensors. The engine keeps both in step: admit, decode some tokens, collect ended completions, compact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from flatpeak.errors import StoppedError
from flatpeak.protocols import Sampler
from flatpeak.rollout.randomness import completion_keys
from flatpeak.rollout.scheduler import Admission, Schedule, longest_first
from flatpeak.rollout.slots import MAX_ROWS, CompletionBuffer, DecodeSlots, check_request
from flatpeak.rollout.stopping import StopStrings
from flatpeak.types import Group, Prompt, SamplingParams
from flatpeak.utils.buckets import in_buckets
from flatpeak.utils.out_of_memory import Halvings, MemoryBound

if TYPE_CHECKING:
    from flatpeak.protocols import Decoder

EXPECTED_LENGTHS: Final = "expected_lengths"


class NativeEngine(Sampler):
    """A Sampler over a Decoder, which uses the trainer's weights.

    A token depends on its slot's logits and on (seed, prompt id, index in group, position). If the decoder's logits do
    not depend on the batch (see `batch_invariant`), completions do not depend on the other prompts, their order,
    `max_rows` or `compact_below`.

    While `min_new_tokens` forbids end-of-sequence tokens, the engine samples from the other tokens, but stores the
    full-vocabulary log-prob that the trainer recomputes. The same holds for top-p and top-k, with which completions
    also have `filtered_logprobs`. At temperature 0, log-probs are those at temperature 1.
    """

    alike = True

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_rows: int = 512,
        compact_below: float = 0.95,
        read_every: int | None = None,
        prefill_tokens: int = 8192,
    ):
        """`decoder` reads prompts and decodes tokens: a policy, or any object with the same interface.

        `max_rows`: the most slots. `compact_below`: once the queue is empty and at most this share of the slots is in
        use, the remaining completions move together. `read_every`: the tokens between
        checks for ended completions. On a GPU each check waits for the device, which costs more than decoding a few
        extra tokens; None means 1 on a CPU and 8 elsewhere. `prefill_tokens`: the most prompt tokens per forward pass;
        the decoder's memory may require fewer.
        """
        self._decoder = decoder
        self._device = torch.device(decoder.device)
        self._rows = MemoryBound(MAX_ROWS, max_rows)
        self._compact_below = compact_below
        self._read_every = read_every or (1 if self._device.type == "cpu" else 8)
        self._prefill_tokens = prefill_tokens
        self._kept_slots: DecodeSlots | None = None
        self._stopping: Callable[[], bool] = lambda: False
        self.expected_lengths: dict[str, float] = {}
        """Mean length of each example's last completions: the longest start first."""

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        """Pairs (index of the prompt, its group), in the order in which groups are completed.

        If memory runs out, the groups that are not complete are drawn again, in fewer slots.
        """
        check_request(prompts, group_size, sampling, self._rows.value)
        left = dict(enumerate(prompts))
        for attempt in self._rows.attempts(lambda rows: -(-len(left) * group_size // rows), again=self._free_slots):
            with attempt:
                indices = list(left)
                for p, group in self._draw(list(left.values()), group_size=group_size, sampling=sampling, seed=seed):
                    del left[indices[p]]
                    yield indices[p], group

    def _free_slots(self) -> None:
        self._kept_slots = None

    def _draw(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        if not prompts:
            return
        with self._decoding():
            schedule = self._plan(prompts, group_size=group_size)
            decode_slots = self._open(prompts, schedule, group_size=group_size, sampling=sampling, seed=seed)
            limit = self._prefill_tokens
            request = _Request(
                decoder=self._decoder,
                prompts=prompts,
                slots=decode_slots,
                schedule=schedule,
                group_size=group_size,
                prefill_tokens=min(limit, getattr(decode_slots.cache, "prefill_tokens", limit)),
            )
            try:
                while not request.done:
                    if self._stopping():
                        raise StoppedError("a signal asked to stop while completions were sampled")
                    for p, group in request.advance(self._read_every):
                        self.observe([group])
                        yield p, group
            finally:
                if self._kept_slots is not decode_slots:
                    decode_slots.close()

    def observe(self, groups: Sequence[Group]) -> None:
        """Expect completions of these lengths next time; called on all ranks, because any may get the prompt next."""
        for group in groups:
            lengths = [len(completion.token_ids) for completion in group.completions]
            self.expected_lengths[group.prompt.example.id] = sum(lengths) / len(lengths)

    def state(self) -> Mapping[str, Any]:
        """The expected lengths, for a checkpoint.

        If the last bits of results depend on the batch, a resumed run must schedule exactly as before.
        """
        return {EXPECTED_LENGTHS: dict(self.expected_lengths)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Schedule requests as when this state was saved."""
        self.expected_lengths = dict(state.get(EXPECTED_LENGTHS, {}))

    def halve_with(self, halvings: Halvings) -> None:
        """Use fewer slots from now on where memory runs out."""
        halvings.apply(self._rows)

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Raise StoppedError between two tokens once `stopping()` is true."""
        self._stopping = stopping

    @property
    def notices(self) -> list[str]:
        """Reasons why decoding on this device is slower than it could be, if any."""
        reasons = [self._kept_slots.graph.reason] if self._kept_slots is not None else []
        return [reason for reason in reasons if reason is not None]

    def _decoding(self) -> AbstractContextManager[Any]:
        prepare = getattr(self._decoder, "decoding", None)
        return nullcontext() if prepare is None else prepare()

    def _plan(self, prompts: Sequence[Prompt], *, group_size: int) -> Schedule:
        slots = min(self._rows.value, len(prompts) * group_size)
        return Schedule(
            longest_first(
                [len(prompt.token_ids) for prompt in prompts],
                [self.expected_lengths.get(prompt.example.id) for prompt in prompts],
            ),
            group_size=group_size,
            num_slots=slots,
            batch_sizes=self._decoder.batch_sizes(slots),
            compact_below=self._compact_below,
        )

    @torch.inference_mode()
    def _open(
        self, prompts: Sequence[Prompt], schedule: Schedule, *, group_size: int, sampling: SamplingParams, seed: int
    ) -> DecodeSlots:
        """The slots of a request; on a GPU those of the last request are reused if they fit."""
        keys_N = completion_keys(seed, [prompt.id for prompt in prompts], group_size)
        slots = schedule.batch_size
        decode_slots = self._kept_slots
        max_rows = self._rows.value
        if decode_slots is None or decode_slots.request_key != (len(keys_N), sampling, slots, max_rows):
            buffer = CompletionBuffer(
                keys_N,
                sampling=sampling,
                eos_token_ids=self._decoder.eos_token_ids,
                tokenizer=self._decoder.tokenizer,
                stop_strings=StopStrings(sampling.stop, self._decoder.tokenizer) if sampling.stop else None,
                device=self._device,
            )
            decode_slots = DecodeSlots(self._decoder, buffer, sampling=sampling, slots=slots, max_rows=max_rows)
        else:
            decode_slots.buffer.restart(keys_N)
        decode_slots.open(
            self._decoder.open(
                slots=slots,
                entries=schedule.num_entries,
                prompt_lengths=[len(prompt.token_ids) for prompt in prompts],
                new_tokens=sampling.max_new_tokens,
            )
        )
        self._kept_slots = decode_slots if self._device.type == "cuda" else None
        return decode_slots


@dataclass(kw_only=True)
class _Request:
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

    @torch.inference_mode()
    def advance(self, num_tokens: int) -> list[tuple[int, Group]]:
        """Sample `num_tokens` tokens for each completion in a slot; return the groups that this completes."""
        while admission := self.schedule.admit():
            self._begin(admission)
            complete = self._collect()
            if complete:
                return complete
        for _ in range(num_tokens):
            self.slots.step(self.schedule.batch_size)
        return self._collect()

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

    def _collect(self) -> list[tuple[int, Group]]:
        """Free the slots of ended completions; return the complete groups."""
        schedule, decode_slots = self.schedule, self.slots
        decode_slots.buffer.end_at_stop_strings(list(schedule.completion_in.values()))
        ended = decode_slots.buffer.ended_N.tolist()
        slots = [slot for slot, completion in schedule.completion_in.items() if ended[completion]]
        if not slots:
            return []
        decode_slots.vacate(slots)
        complete = schedule.end(slots)
        compaction = schedule.compact()
        if compaction is not None:
            decode_slots.cache.compact(compaction.slots, compaction.entries, compaction.idle)
            decode_slots.move(*compaction.slots)
            decode_slots.vacate(compaction.idle)
        return [(p, self._group(p)) for p in complete]

    def _group(self, p: int) -> Group:
        indices = range(p * self.group_size, (p + 1) * self.group_size)
        return Group(prompt=self.prompts[p], completions=tuple(self.slots.buffer.completions(indices)))
