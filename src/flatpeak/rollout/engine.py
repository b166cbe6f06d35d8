"""The native engine: reads each prompt once, keeps completions in slots, and decodes a token for all slots at a time.

A `Schedule` decides with integers which completion is in which slot; `DecodeSlots` and the decoder's cache apply this
to tensors. The engine keeps both in step: admit, decode some tokens, collect ended completions, compact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from flatpeak.errors import StoppedError
from flatpeak.protocols import Sampler
from flatpeak.rollout.conversation import Conversation, Dialogue
from flatpeak.rollout.engine_request import Request
from flatpeak.rollout.randomness import completion_keys
from flatpeak.rollout.scheduler import Schedule, longest_first
from flatpeak.rollout.slots import MAX_ROWS, CompletionBuffer, DecodeSlots, check_request
from flatpeak.rollout.stopping import StopStrings
from flatpeak.types import Group, Prompt, SamplingParams
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
                drawn = self._draw(list(left.values()), group_size=group_size, sampling=sampling, seed=seed)
                for p, request in drawn:
                    group = request.group(p)
                    self.observe([group])
                    del left[indices[p]]
                    yield indices[p], group

    def converse(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: SamplingParams,
        seed: int,
        dialogue: Dialogue,
    ) -> Iterator[int]:
        """Draw completions of several turns in one request; see protocols.Sampler. It ends early if memory runs out.

        `sampling.max_new_tokens` bounds all tokens after a prompt.
        """
        check_request(prompts, group_size, sampling, self._rows.value)
        parts = len(prompts) * group_size
        for number, attempt in enumerate(self._rows.attempts(lambda rows: -(-parts // rows), again=self._free_slots)):
            if number:
                return
            with attempt:
                for p, _ in self._draw(prompts, group_size=group_size, sampling=sampling, seed=seed, dialogue=dialogue):
                    yield p

    def _free_slots(self) -> None:
        self._kept_slots = None

    def _draw(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: SamplingParams,
        seed: int,
        dialogue: Dialogue | None = None,
    ) -> Iterator[tuple[int, Request]]:
        """The prompts whose groups are complete, each with the request that holds the group."""
        if not prompts:
            return
        with self._decoding():
            schedule = self._plan(prompts, group_size=group_size)
            decode_slots = self._open(prompts, schedule, group_size=group_size, sampling=sampling, seed=seed)
            limit = self._prefill_tokens
            arguments: dict[str, Any] = {
                "decoder": self._decoder,
                "prompts": prompts,
                "slots": decode_slots,
                "schedule": schedule,
                "group_size": group_size,
                "prefill_tokens": min(limit, getattr(decode_slots.cache, "prefill_tokens", limit)),
            }
            request = (
                Request(**arguments) if dialogue is None else Conversation(**arguments, dialogue=dialogue, seed=seed)
            )
            try:
                while not request.done:
                    if self._stopping():
                        raise StoppedError("a signal asked to stop while completions were sampled")
                    for p in request.advance(self._read_every):
                        yield p, request
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
