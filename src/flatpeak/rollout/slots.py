"""The completions of one request: what was drawn, which of them ended and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatpeak.errors import DIVERGED, DivergedError, UserError
from flatpeak.protocols import Decoder
from flatpeak.rollout.cuda_graphs import GraphedStep
from flatpeak.rollout.randomness import row_keys, uniforms
from flatpeak.rollout.sampling import draw
from flatpeak.rollout.stopping import StopStrings, is_end_of_sequence
from flatpeak.types import Completion, Group, Prompt, SamplingParams

if TYPE_CHECKING:
    from flatpeak.protocols import Tokenizer


class Rows:
    """N completions, each at a position of its own. Row N is nobody's: what idle slots draw goes there.

    Histories are tensors written in place, without a look at their values, so that a step can be captured in a graph.
    """

    def __init__(
        self,
        keys_N: Tensor,
        *,
        sampling: SamplingParams,
        eos_token_ids: Set[int],
        tokenizer: Tokenizer,
        stop_strings: StopStrings | None,
        device: torch.device | str,
    ):
        self.count = len(keys_N)
        self.max_new_tokens = sampling.max_new_tokens
        shape_NT = (self.count + 1, sampling.max_new_tokens)
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._keys_N = torch.cat([keys_N, keys_N.new_zeros(1)]).to(device)
        self._eos_K = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)
        self._tokens_NT = torch.zeros(shape_NT, dtype=torch.int64, device=device)
        self._logprobs_NT = torch.zeros(shape_NT, dtype=torch.float32, device=device)
        self._filtered_NT = torch.zeros_like(self._logprobs_NT) if sampling.filtered else None
        self.lengths_N = torch.zeros(self.count + 1, dtype=torch.int64, device=device)
        """int64 [N + 1]: tokens drawn so far."""
        self.ended_N = torch.zeros(self.count + 1, dtype=torch.bool, device=device)
        """bool [N + 1]: at an end-of-sequence token, a stop string or the cap."""
        self._stopped_N = torch.zeros_like(self.ended_N)  # ended, and not at the cap
        self._ends_V: Tensor | None = None
        self._histories: list[list[int]] = [[] for _ in range(self.count)]  # filled only where there are stop strings

    @property
    def marks(self) -> list[Tensor]:
        """What says which token comes next."""
        return [self.lengths_N, self.ended_N, self._stopped_N]

    @property
    def tensors(self) -> list[Tensor]:
        """All that a draw reads or writes."""
        histories = [self._tokens_NT, self._logprobs_NT, self._keys_N, self._eos_K]
        return [*self.marks, *histories, *([] if self._filtered_NT is None else [self._filtered_NT])]

    def restart(self, keys_N: Tensor) -> None:
        """Draw anew, for as many completions, in the same memory."""
        self._keys_N[:-1] = keys_N.to(self._keys_N.device)
        for tensor in self.marks:
            tensor.zero_()
        self._histories = [[] for _ in range(self.count)]

    def draw(self, logits_RV: Tensor, rows_R: Tensor) -> Tensor:
        """Draw and record the next token of these rows (int64 [R], none that has ended, N any number of times).

        Returns the tokens, int64 [R]. No value is read on the host unless a filter is on.
        """
        drawn_R = self.lengths_N.index_select(0, rows_R)
        drawn = draw(
            logits_RV,
            uniforms(self._keys_N.index_select(0, rows_R), drawn_R),
            temperature=self._sampling.temperature,
            top_k=self._sampling.top_k,
            top_p=self._sampling.top_p,
            forbidden=self._forbidden(logits_RV, drawn_R),
        )
        place_R = rows_R * self.max_new_tokens + drawn_R
        self._tokens_NT.view(-1).index_copy_(0, place_R, drawn.tokens_R)
        self._logprobs_NT.view(-1).index_copy_(0, place_R, drawn.logprobs_R)
        if self._filtered_NT is not None and drawn.filtered_logprobs_R is not None:
            self._filtered_NT.view(-1).index_copy_(0, place_R, drawn.filtered_logprobs_R)
        lengths_R = drawn_R + 1
        stopped_R = is_end_of_sequence(drawn.tokens_R, self._eos_K)
        self._stopped_N.index_copy_(0, rows_R, stopped_R)
        self.ended_N.index_copy_(0, rows_R, stopped_R | (lengths_R == self.max_new_tokens))
        self.lengths_N.index_copy_(0, rows_R, lengths_R)
        self.lengths_N[-1:].zero_()  # nobody's row stays at its first column
        return drawn.tokens_R

    def heed_stop_strings(self, rows: Sequence[int]) -> None:
        """End those of these rows in which a stop string was completed since they were looked at last."""
        if self._stop_strings is None or not rows:
            return
        lengths = self.lengths_N[: self.count].tolist()
        seen = [len(self._histories[row]) for row in rows]
        first, last = min(seen), max(lengths[row] for row in rows)
        new_KB = self._tokens_NT[list(rows), first:last].tolist()
        ended: dict[int, int] = {}
        for row, start, new in zip(rows, seen, new_KB, strict=True):
            history = self._histories[row]
            history.extend(new[start - first : lengths[row] - first])
            heeded = range(max(start, self._sampling.min_new_tokens - 1), lengths[row])
            position = self._stop_strings.first_completed(history, heeded)
            if position is not None:
                ended[row] = position + 1
        if ended:
            index = torch.tensor(list(ended), device=self.lengths_N.device)
            self.lengths_N[index] = torch.tensor(list(ended.values()), device=index.device)
            self.ended_N[index] = True
            self._stopped_N[index] = True

    def completions(self, rows: Sequence[int]) -> list[Completion]:
        """These rows, which have all ended, in this order."""
        index = torch.tensor(rows, device=self.lengths_N.device)
        lengths = self.lengths_N.index_select(0, index).tolist()
        stopped = self._stopped_N.index_select(0, index).tolist()
        used = max(lengths)
        logprobs_KT = self._logprobs_NT.index_select(0, index)[:, :used]
        if not bool(torch.isfinite(logprobs_KT).all()):
            raise DivergedError(
                f"the model's logits are NaN or infinite: its weights have diverged or are damaged; {DIVERGED}"
            )
        tokens = _cut(self._tokens_NT.index_select(0, index)[:, :used], lengths)
        logprobs = _cut(logprobs_KT, lengths)
        filtered = None if self._filtered_NT is None else _cut(self._filtered_NT.index_select(0, index), lengths)
        texts = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [
            Completion(
                token_ids=tuple(tokens[k]),
                logprobs=tuple(logprobs[k]),
                finish_reason="stop" if stopped[k] else "length",
                text=texts[k],
                filtered_logprobs=None if filtered is None else tuple(filtered[k]),
            )
            for k in range(len(rows))
        ]

    def _forbidden(self, logits_RV: Tensor, drawn_R: Tensor) -> Tensor | None:
        """bool [R, V]: the end-of-sequence tokens that come too early; None where none can."""
        if not self._sampling.min_new_tokens:
            return None
        if self._ends_V is None:
            ids_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
            self._ends_V = is_end_of_sequence(ids_V, self._eos_K)
        return self._ends_V & (drawn_R < self._sampling.min_new_tokens)[:, None]


def _cut(values_KT: Tensor, lengths: Sequence[int]) -> list[list]:  # type: ignore[type-arg]
    return [row[:length] for row, length in zip(values_KT.tolist(), lengths, strict=True)]


class Workspace:
    """Tensors written in place. On a GPU it outlives its request, so that graphs captured on it can be used again."""

    def __init__(self, decoder: Decoder, rows: Rows, *, sampling: SamplingParams, slots: int, max_rows: int) -> None:
        self.rows = rows
        self.serves = (rows.count, sampling, slots, max_rows)
        """What a request must have in common with the one this was made for."""
        self._decoder = decoder
        self.cache: Any = None
        """The decoder's memory of keys and values (a DecodeState)."""
        self._nobody = rows.count
        self._rows_S = torch.full((slots,), self._nobody, device=decoder.device)
        self._tokens_S = torch.zeros_like(self._rows_S)
        self._logits_SV: Tensor | None = None
        # Filters look at values on the host, which a captured step cannot: there the forward pass alone is captured.
        self._draws_apart = sampling.filtered
        self.graph = GraphedStep(
            self._forward if self._draws_apart else self._forward_and_draw,
            device=decoder.device,
            state=self._what_comes_next,
            fixed=self._what_must_not_move,
        )

    def open(self, cache: Any) -> None:
        """Begin a request on this memory."""
        self.cache = cache
        self._rows_S.fill_(self._nobody)
        self._tokens_S.zero_()
        self.graph.begin()

    def close(self) -> None:
        """Give the memory back now: what refers to itself would wait for the garbage collector."""
        del self.graph, self.cache, self.rows

    def begin(self, slots: Sequence[int], rows: Sequence[int], logits_KV: Tensor) -> None:
        """Put these rows into these slots, and draw their first tokens from the logits after their prompts."""
        rows_K, slots_K = self._index(rows), self._index(slots)
        self._tokens_S[slots_K] = self.rows.draw(logits_KV, rows_K)
        self._rows_S[slots_K] = self._heed_ends(rows_K)

    def step(self, num_rows: int) -> None:
        """One token for the first `num_rows` slots."""
        self.graph(num_rows)
        if self._draws_apart:
            assert self._logits_SV is not None
            self._draw(self._logits_SV[:num_rows])

    def leave(self, slots: Sequence[int]) -> None:
        """Nobody's row is in these slots any more."""
        self._rows_S[self._index(slots)] = self._nobody

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let rows go on in other slots."""
        sources_K, targets_K = self._index(sources), self._index(targets)
        for tensor in (self._rows_S, self._tokens_S):
            tensor[targets_K] = tensor[sources_K]

    def _forward_and_draw(self, num_rows: int) -> None:
        self._draw(self._decoder.decode(self.cache, self._tokens_S[:num_rows]))

    def _forward(self, num_rows: int) -> None:
        logits_RV = self._decoder.decode(self.cache, self._tokens_S[:num_rows])
        if self._logits_SV is None:
            self._logits_SV = logits_RV.new_empty(len(self._rows_S), logits_RV.shape[1])
        self._logits_SV[:num_rows] = logits_RV

    def _draw(self, logits_RV: Tensor) -> None:
        rows_R = self._rows_S[: len(logits_RV)]
        self._tokens_S[: len(logits_RV)] = self.rows.draw(logits_RV, rows_R)
        self._rows_S[: len(logits_RV)] = self._heed_ends(rows_R)

    def _heed_ends(self, rows_R: Tensor) -> Tensor:
        """The same rows, nobody's where one has ended."""
        return rows_R.masked_fill(self.rows.ended_N.index_select(0, rows_R), self._nobody)

    def _what_comes_next(self) -> list[Tensor]:
        return [self._rows_S, self._tokens_S, *self.rows.marks, *getattr(self.cache, "marks", ())]

    def _what_must_not_move(self) -> list[Tensor]:
        own = [self._rows_S, self._tokens_S, *self.rows.tensors]
        return [*own, *getattr(self.cache, "tensors", ()), *getattr(self._decoder, "decoding_tensors", ())]

    def _index(self, indices: Sequence[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.int64, device=self._rows_S.device)


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
