"""The native engine: each prompt read once, completions in slots, one token for all of them at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatpeak.rollout.randomness import row_keys
from flatpeak.rollout.scheduler import Admission, Schedule, longest_first
from flatpeak.rollout.slots import Rows, Workspace, check_request
from flatpeak.rollout.stopping import StopStrings
from flatpeak.types import Group, Prompt, SamplingParams

if TYPE_CHECKING:
    from flatpeak.protocols import Decoder


class NativeEngine:
    """A Sampler over a Decoder, on the trainer's own weights.

    A token depends on its row's logits and on (seed, prompt id, index in group, position). Where the decoder's logits
    do not depend on the batch (see `batch_invariant`), neither do completions: not on the other prompts, their order,
    `max_rows` or `compact_below`.

    While `min_new_tokens` forbids end-of-sequence tokens, the stored log-prob stays the full-vocabulary one that the
    trainer recomputes, although the token was drawn from the other tokens only. The same goes for top-p and top-k,
    for which the completion has `filtered_logprobs` too. At temperature 0 log-probs are those at temperature 1.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_rows: int = 512,
        compact_below: float = 0.95,
        read_every: int | None = None,
        prefill_tokens: int = 8192,
    ):
        """At most `max_rows` slots; those of ended completions are given up once `compact_below` of them are left.

        `read_every`: look for ended completions every so many tokens. On a GPU each look waits for the device, and so
        costs more than a few tokens too many; None is 1 on a CPU and 8 elsewhere. `prefill_tokens`: prompt tokens read
        in one forward pass.
        """
        self._decoder = decoder
        self._device = torch.device(decoder.device)
        self._max_rows = max_rows
        self._compact_below = compact_below
        self._read_every = read_every or (1 if self._device.type == "cpu" else 8)
        self._prefill_tokens = prefill_tokens
        self._workspace: Workspace | None = None
        self.expected_lengths: dict[str, float] = {}
        """By example, the mean length of the completions drawn for it last: what is long is begun first."""

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order."""
        groups = dict(self.stream(prompts, group_size=group_size, sampling=sampling, seed=seed))
        return [groups[p] for p in range(len(prompts))]

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        """(index of the prompt, its group), in the order in which groups are complete."""
        check_request(prompts, group_size, sampling, self._max_rows)
        if not prompts:
            return
        with self._decoding():
            schedule = self._plan(prompts, group_size=group_size)
            workspace = self._open(prompts, schedule, group_size=group_size, sampling=sampling, seed=seed)
            request = _Request(
                self._decoder,
                prompts,
                workspace=workspace,
                schedule=schedule,
                group_size=group_size,
                prefill_tokens=self._prefill_tokens,
            )
            try:
                while not request.done:
                    for p, group in request.advance(self._read_every):
                        lengths = [len(completion.token_ids) for completion in group.completions]
                        self.expected_lengths[group.prompt.example.id] = sum(lengths) / len(lengths)
                        yield p, group
            finally:
                if self._workspace is not workspace:
                    workspace.close()

    def state(self) -> dict[str, float]:
        """The expected lengths, for a checkpoint.

        Where results depend on the batch in their last bits, a resumed run has to schedule as it did before.
        """
        return dict(self.expected_lengths)

    def load(self, state: Mapping[str, float]) -> None:
        """Order the work as when this state was saved."""
        self.expected_lengths = dict(state)

    @property
    def notices(self) -> list[str]:
        """Why decoding is slower than it could be on this device, if it is."""
        reasons = [self._workspace.graph.reason] if self._workspace is not None else []
        return [reason for reason in reasons if reason is not None]

    def _decoding(self) -> AbstractContextManager[Any]:
        prepare = getattr(self._decoder, "decoding", None)
        return nullcontext() if prepare is None else prepare()

    def _plan(self, prompts: Sequence[Prompt], *, group_size: int) -> Schedule:
        slots = min(self._max_rows, len(prompts) * group_size)
        return Schedule(
            longest_first(
                [len(prompt.token_ids) for prompt in prompts],
                [self.expected_lengths.get(prompt.example.id) for prompt in prompts],
            ),
            group_size=group_size,
            num_slots=slots,
            buckets=self._decoder.batch_sizes(slots),
            compact_below=self._compact_below,
        )

    @torch.inference_mode()
    def _open(
        self, prompts: Sequence[Prompt], schedule: Schedule, *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Workspace:
        """Memory for a request; on a GPU that of the last one, if it serves."""
        keys_N = row_keys(seed, [prompt.id for prompt in prompts], group_size)
        slots = schedule.num_rows
        workspace = self._workspace
        if workspace is None or workspace.serves != (len(keys_N), sampling, slots, self._max_rows):
            rows = Rows(
                keys_N,
                sampling=sampling,
                eos_token_ids=self._decoder.eos_token_ids,
                tokenizer=self._decoder.tokenizer,
                stop_strings=StopStrings(sampling.stop, self._decoder.tokenizer) if sampling.stop else None,
                device=self._device,
            )
            workspace = Workspace(self._decoder, rows, sampling=sampling, slots=slots, max_rows=self._max_rows)
        else:
            workspace.rows.restart(keys_N)
        workspace.open(
            self._decoder.open(
                slots=slots,
                places=schedule.num_places,
                prompt_lengths=[len(prompt.token_ids) for prompt in prompts],
                new_tokens=sampling.max_new_tokens,
            )
        )
        self._workspace = workspace if self._device.type == "cuda" else None
        return workspace


class _Request:
    """One call of the engine while it is served."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        *,
        workspace: Workspace,
        schedule: Schedule,
        group_size: int,
        prefill_tokens: int,
    ) -> None:
        self._decoder = decoder
        self._prompts = prompts
        self._workspace = workspace
        self._schedule = schedule
        self._group_size = group_size
        self._prefill_tokens = prefill_tokens
        self._first_logits: dict[int, Tensor] = {}

    @property
    def done(self) -> bool:
        """Whether every group has been given out."""
        return self._schedule.done

    @torch.inference_mode()
    def advance(self, num_tokens: int) -> list[tuple[int, Group]]:
        """Draw `num_tokens` tokens for every completion under way; the groups that are complete then."""
        while admission := self._schedule.admit():
            self._begin(admission)
            complete = self._collect()
            if complete:
                return complete
        for _ in range(num_tokens):
            self._workspace.step(self._schedule.num_rows)
        return self._collect()

    def _begin(self, admission: Admission) -> None:
        """Read new prompts, put completions into slots, and draw their first tokens."""
        cache = self._workspace.cache
        for places in self._prefill_pieces(admission.new_prompts):
            token_ids = [self._prompts[p].token_ids for p in places]
            logits_PV = self._decoder.prefill(cache, token_ids, list(places.values()))
            self._first_logits |= dict(zip(places, logits_PV, strict=True))
        cache.admit(admission.slots, admission.places)
        wanted = [row // self._group_size for row in admission.rows]
        prompts = list(dict.fromkeys(wanted))
        index = {p: position for position, p in enumerate(prompts)}
        logits_KV = torch.stack([self._first_logits[p] for p in prompts])[[index[p] for p in wanted]]
        self._workspace.begin(admission.slots, admission.rows, logits_KV)
        for p in prompts:
            if (p + 1) * self._group_size - 1 in admission.rows:  # the last of its group
                del self._first_logits[p]

    def _collect(self) -> list[tuple[int, Group]]:
        """Give up the slots of ended completions; the groups that are complete."""
        schedule, workspace = self._schedule, self._workspace
        workspace.rows.heed_stop_strings(list(schedule.row_of.values()))
        ended = workspace.rows.ended_N.tolist()
        slots = [slot for slot, row in schedule.row_of.items() if ended[row]]
        if not slots:
            return []
        workspace.leave(slots)
        complete = schedule.end(slots)
        compaction = schedule.compact()
        if compaction is not None:
            workspace.cache.compact(compaction.slots, compaction.places, compaction.idle)
            workspace.move(*compaction.slots)
            workspace.leave(compaction.idle)
        return [(p, self._group(p)) for p in complete]

    def _group(self, p: int) -> Group:
        rows = range(p * self._group_size, (p + 1) * self._group_size)
        return Group(prompt=self._prompts[p], completions=tuple(self._workspace.rows.completions(rows)))

    def _prefill_pieces(self, places: dict[int, int]) -> Iterator[dict[int, int]]:
        """Cut new prompts into pieces of at most `prefill_tokens` tokens, those of similar length together."""
        piece: dict[int, int] = {}
        tokens = 0
        for p in sorted(places, key=lambda p: -len(self._prompts[p].token_ids)):
            length = len(self._prompts[p].token_ids)
            if piece and tokens + length > self._prefill_tokens:
                yield piece
                piece, tokens = {}, 0
            piece[p] = places[p]
            tokens += length
        if piece:
            yield piece
