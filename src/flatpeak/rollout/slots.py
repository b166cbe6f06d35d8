"""The memory of a request during decoding: the completions so far, and the slots that sample the next token.

A `CompletionBuffer` stores the samples of N completions, by completion. `DecodeSlots` maps S slots to them and makes
steps: a forward pass of the decoder and a sample for each slot, in place. The schedule decides which completion is in
which slot (scheduler.py). A step reads no tensor on the host, so that it can be captured as a CUDA graph; ends of
completions are read between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatpeak.errors import DIVERGED, DivergedError, UserError
from flatpeak.functional.kept_tokens import ALL_BUT, TokenSet, list_sets
from flatpeak.protocols import Decoder
from flatpeak.rollout.cuda_graphs import GraphedStep
from flatpeak.rollout.randomness import keys_from, uniforms
from flatpeak.rollout.sampling import draw
from flatpeak.rollout.stopping import StopStrings, is_end_of_sequence
from flatpeak.types import Completion, Prompt, SamplingParams

if TYPE_CHECKING:
    from flatpeak.protocols import Tokenizer

MAX_ROWS = "rollout.max_rows"
"""The setting that bounds the completions in memory at once."""


class CompletionBuffer:
    """Tokens and log-probabilities of N completions, each with its own position.

    Completion N is a dummy for the samples of idle slots, so that every slot can sample in every step. Tensors are
    written in place without reading their values, so that a step can be captured in a graph.
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
        """`keys_N`: the random keys of the completions (randomness.completion_keys)."""
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
        self._kept: list[list[TokenSet]] = [[] for _ in range(self.count + 1)]  # filled only with a filter
        self.lengths_N = torch.zeros(self.count + 1, dtype=torch.int64, device=device)
        """int64 [N + 1]: the number of tokens so far."""
        self.ended_N = torch.zeros(self.count + 1, dtype=torch.bool, device=device)
        """bool [N + 1]: whether the completion ended, by an end-of-sequence token, a stop string or the cap."""
        self._stopped_N = torch.zeros_like(self.ended_N)  # ended before the cap
        self._ends_V: Tensor | None = None
        self._histories: list[list[int]] = [[] for _ in range(self.count)]  # of the turn; filled only with stop strings
        self._begins = [0] * self.count  # the first token of each completion's turn

    @property
    def step_state(self) -> list[Tensor]:
        """Tensors that determine the next token; every sample changes them."""
        return [self.lengths_N, self.ended_N, self._stopped_N]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that sampling reads or writes."""
        histories = [self._tokens_NT, self._logprobs_NT, self._keys_N, self._eos_K]
        return [*self.step_state, *histories, *([] if self._filtered_NT is None else [self._filtered_NT])]

    @property
    def plain_draws(self) -> dict[str, Any] | None:
        """The inputs and outputs of sampling, by name; None unless it samples from softmax(logits / temperature)."""
        if self._sampling.temperature == 0 or self._sampling.filtered:
            return None
        return {
            "keys": self._keys_N,
            "ends": self._eos_K,
            "tokens": self._tokens_NT,
            "lengths": self.lengths_N,
            "logprobs": self._logprobs_NT,
            "ended": self.ended_N,
            "stopped": self._stopped_N,
            "temperature": self._sampling.temperature,
        }

    def restart(self, keys_N: Tensor) -> None:
        """Reset for the same number of completions, in the same memory."""
        self._keys_N[:-1] = keys_N.to(self._keys_N.device)
        for tensor in self.step_state:
            tensor.zero_()
        self._histories = [[] for _ in range(self.count)]
        self._begins = [0] * self.count
        self._kept = [[] for _ in range(self.count + 1)]

    def resume(self, completions: Sequence[int], added: Sequence[Sequence[int]], keys: Tensor) -> None:
        """Begin another turn of these completions after tokens that were added; `keys`: the turns' random keys."""
        index = torch.tensor(completions, device=self.lengths_N.device)
        ends = self.lengths_N.index_select(0, index).tolist()
        begins = torch.tensor([end + len(tokens) for end, tokens in zip(ends, added, strict=True)])
        for completion, end, begin, tokens in zip(completions, ends, begins.tolist(), added, strict=True):
            self._tokens_NT[completion, end:begin] = torch.tensor(tokens, device=index.device)
            self._histories[completion] = []
            self._begins[completion] = begin
            if self._filtered_NT is not None:
                self._kept[completion][end:] = [(ALL_BUT,)] * len(tokens)
        self._keys_N[index] = keys_from(keys, begins).to(index.device)
        self.lengths_N[index] = begins.to(index.device)
        self.ended_N[index] = False
        self._stopped_N[index] = False

    def draw(self, logits_RV: Tensor, completion_R: Tensor) -> Tensor:
        """Sample and record the next token of these completions (int64 [R], not ended; the dummy may repeat).

        Returns the tokens, int64 [R]. The host reads no values unless a filter is on.
        """
        drawn_R = self.lengths_N.index_select(0, completion_R)
        drawn = draw(
            logits_RV,
            uniforms(self._keys_N.index_select(0, completion_R), drawn_R),
            temperature=self._sampling.temperature,
            top_k=self._sampling.top_k,
            top_p=self._sampling.top_p,
            min_p=self._sampling.min_p,
            forbidden=self._forbidden(logits_RV, drawn_R),
        )
        index_R = completion_R * self.max_new_tokens + drawn_R
        self._tokens_NT.view(-1).index_copy_(0, index_R, drawn.tokens_R)
        self._logprobs_NT.view(-1).index_copy_(0, index_R, drawn.logprobs_R)
        if self._filtered_NT is not None and drawn.filtered_logprobs_R is not None:
            self._filtered_NT.view(-1).index_copy_(0, index_R, drawn.filtered_logprobs_R)
        if drawn.kept_RV is not None:
            for completion, kept in zip(completion_R.tolist(), list_sets(drawn.kept_RV), strict=True):
                self._kept[completion].append(kept)
        lengths_R = drawn_R + 1
        stopped_R = is_end_of_sequence(drawn.tokens_R, self._eos_K)
        self._stopped_N.index_copy_(0, completion_R, stopped_R)
        self.ended_N.index_copy_(0, completion_R, stopped_R | (lengths_R == self.max_new_tokens))
        self.lengths_N.index_copy_(0, completion_R, lengths_R)
        self.lengths_N[-1:].zero_()  # the dummy stays at its first position, so it never passes the last
        return drawn.tokens_R

    def end_at_stop_strings(self, completions: Sequence[int]) -> None:
        """End those completions in which a stop string was completed since the last call."""
        if self._stop_strings is None or not completions:
            return
        lengths = self.lengths_N[: self.count].tolist()
        seen = [self._begins[completion] + len(self._histories[completion]) for completion in completions]
        first, last = min(seen), max(lengths[completion] for completion in completions)
        new_KB = self._tokens_NT[list(completions), first:last].tolist()
        ended: dict[int, int] = {}
        for completion, start, new in zip(completions, seen, new_KB, strict=True):
            history = self._histories[completion]
            history.extend(new[start - first : lengths[completion] - first])
            begin = self._begins[completion]
            candidates = range(max(start, self._sampling.min_new_tokens - 1) - begin, lengths[completion] - begin)
            position = self._stop_strings.first_completed(history, candidates)
            if position is not None:
                ended[completion] = begin + position + 1
        self._end(ended, stopped=True)

    def end_long_turns(self, completions: Sequence[int], most: int) -> None:
        """End those completions whose turn has reached this many tokens, and cut it where it has more."""
        lengths, stopped = self.lengths_N.tolist(), self._stopped_N.tolist()
        lasts = {completion: self._begins[completion] + most for completion in completions}
        reached = {c: last for c, last in lasts.items() if lengths[c] >= last + stopped[c]}
        self._end(reached, stopped=False)

    def _end(self, lengths: Mapping[int, int], *, stopped: bool) -> None:
        """End these completions at these lengths."""
        if lengths:
            index = torch.tensor(list(lengths), device=self.lengths_N.device)
            self.lengths_N[index] = torch.tensor(list(lengths.values()), device=index.device)
            self.ended_N[index] = True
            self._stopped_N[index] = stopped

    def completions(self, indices: Sequence[int]) -> list[Completion]:
        """Read the last turns of these completions, which must all have ended, in this order."""
        index = torch.tensor(indices, device=self.lengths_N.device)
        ends = self.lengths_N.index_select(0, index).tolist()
        begins = [self._begins[completion] for completion in indices]
        read = slice(min(begins), max(ends))
        turns = [slice(begin - read.start, end - read.start) for begin, end in zip(begins, ends, strict=True)]
        stopped = self._stopped_N.index_select(0, index).tolist()
        logprobs_KT = self._logprobs_NT[:, read].index_select(0, index)
        if not bool(torch.isfinite(logprobs_KT).all()):
            raise DivergedError(
                f"the model's logits are NaN or infinite: its weights have diverged or are damaged; {DIVERGED}"
            )
        tokens = _cut(self._tokens_NT[:, read].index_select(0, index), turns)
        logprobs = _cut(logprobs_KT, turns)
        filtered = None if self._filtered_NT is None else _cut(self._filtered_NT[:, read].index_select(0, index), turns)
        texts = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [
            Completion(
                token_ids=tuple(tokens[k]),
                logprobs=tuple(logprobs[k]),
                finish_reason="stop" if stopped[k] else "length",
                text=texts[k],
                filtered_logprobs=None if filtered is None else tuple(filtered[k]),
                kept=None if filtered is None else tuple(self._kept[completion][begins[k] : ends[k]]),
            )
            for k, completion in enumerate(indices)
        ]

    def _forbidden(self, logits_RV: Tensor, drawn_R: Tensor) -> Tensor | None:
        """bool [R, V]: end-of-sequence tokens before the minimum length; None if there are none."""
        if not self._sampling.min_new_tokens:
            return None
        if self._ends_V is None:
            ids_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
            self._ends_V = is_end_of_sequence(ids_V, self._eos_K)
        return self._ends_V & (drawn_R < self._sampling.min_new_tokens)[:, None]


def _cut(values_KT: Tensor, turns: Sequence[slice]) -> list[list]:  # type: ignore[type-arg]
    return [row[turn] for row, turn in zip(values_KT.tolist(), turns, strict=True)]


class DecodeSlots:
    """The slots of a request, each with its completion and the completion's last token.

    On a GPU they outlive the request, so that the next request can replay graphs captured on their tensors.
    """

    def __init__(
        self, decoder: Decoder, buffer: CompletionBuffer, *, sampling: SamplingParams, slots: int, max_rows: int
    ) -> None:
        self.buffer = buffer
        self.request_key = (buffer.count, sampling, slots, max_rows)
        """The properties of a request that these slots fit; the next request can reuse them only with the same."""
        self._decoder = decoder
        self.cache: Any = None
        """The decoder's memory of keys and values (a DecodeState)."""
        self._draw_tokens = buffer.draw
        self._dummy = buffer.count
        self._completion_S = torch.full((slots,), self._dummy, device=decoder.device)
        self._tokens_S = torch.zeros_like(self._completion_S)
        self._logits_SV: Tensor | None = None
        # Filters read values on the host, which a captured step cannot: then only the forward pass is captured.
        self._draws_apart = sampling.filtered
        self.graph = GraphedStep(
            self._forward if self._draws_apart else self._forward_and_draw,
            device=decoder.device,
            state=self._step_state,
            fixed=self._fixed_tensors,
        )

    def open(self, cache: Any) -> None:
        """Start a request with this cache."""
        self.cache = cache
        drawing = getattr(cache, "drawing", None)
        self._draw_tokens = self.buffer.draw if drawing is None else drawing(self.buffer)
        self._completion_S.fill_(self._dummy)
        self._tokens_S.zero_()
        self.graph.begin()

    def close(self) -> None:
        """Free the memory now: reference cycles would keep it until the garbage collector runs."""
        del self.graph, self.cache, self.buffer, self._draw_tokens

    def begin(self, slots: Sequence[int], completions: Sequence[int], logits_KV: Tensor) -> None:
        """Put these completions into these slots, and sample their first tokens from the prompts' last logits."""
        completion_K, slots_K = self._index(completions), self._index(slots)
        self._tokens_S[slots_K] = self._draw_tokens(logits_KV, completion_K)
        self._completion_S[slots_K] = self._unless_ended(completion_K)

    def step(self, batch_size: int) -> None:
        """Sample one token for each of the first `batch_size` slots."""
        self.graph(batch_size)
        if self._draws_apart:
            assert self._logits_SV is not None
            self._draw(self._logits_SV[:batch_size])

    def vacate(self, slots: Sequence[int]) -> None:
        """Assign these slots to the dummy completion; where the cache can, they are decoded no more."""
        self._completion_S[self._index(slots)] = self._dummy
        if (skip := getattr(self.cache, "skip", None)) is not None:
            skip(slots)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move completions to other slots."""
        sources_K, targets_K = self._index(sources), self._index(targets)
        for tensor in (self._completion_S, self._tokens_S):
            tensor[targets_K] = tensor[sources_K]

    def _forward_and_draw(self, batch_size: int) -> None:
        self._draw(self._decoder.decode(self.cache, self._tokens_S[:batch_size]))

    def _forward(self, batch_size: int) -> None:
        logits_RV = self._decoder.decode(self.cache, self._tokens_S[:batch_size])
        if self._logits_SV is None:
            self._logits_SV = logits_RV.new_empty(len(self._completion_S), logits_RV.shape[1])
        self._logits_SV[:batch_size] = logits_RV

    def _draw(self, logits_RV: Tensor) -> None:
        completion_R = self._completion_S[: len(logits_RV)]
        self._tokens_S[: len(logits_RV)] = self._draw_tokens(logits_RV, completion_R)
        self._completion_S[: len(logits_RV)] = self._unless_ended(completion_R)

    def _unless_ended(self, completion_R: Tensor) -> Tensor:
        """The same completions, with the dummy in place of ended ones."""
        return completion_R.masked_fill(self.buffer.ended_N.index_select(0, completion_R), self._dummy)

    def _step_state(self) -> list[Tensor]:
        return [self._completion_S, self._tokens_S, *self.buffer.step_state, *getattr(self.cache, "step_state", ())]

    def _fixed_tensors(self) -> list[Tensor]:
        own = [self._completion_S, self._tokens_S, *self.buffer.tensors]
        return [*own, *getattr(self.cache, "tensors", ()), *getattr(self._decoder, "decoding_tensors", ())]

    def _index(self, indices: Sequence[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.int64, device=self._completion_S.device)


def check_request(prompts: Sequence[Prompt], group_size: int, sampling: SamplingParams, max_rows: int) -> None:
    """Raise UserError if settings cannot work, or if a prompt is empty."""
    wrong = [
        f"{name}={value}: {rule}"
        for name, value, holds, rule in (
            ("group_size", group_size, group_size >= 1, "at least 1"),
            ("max_rows", max_rows, max_rows >= 1, "at least 1"),
            ("temperature", sampling.temperature, sampling.temperature >= 0, "at least 0 (greedy)"),
            ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
            ("top_k", sampling.top_k, sampling.top_k >= 0, "at least 0 (off)"),
            ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "from 0 (off) to 1"),
            ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", sampling.min_new_tokens, sampling.min_new_tokens >= 0, "at least 0"),
        )
        if not holds
    ]
    if wrong:
        raise UserError(f"these sampling settings cannot work: {'; '.join(wrong)}")
    for prompt in prompts:
        if not prompt.token_ids:
            raise UserError(f"prompt {prompt.id} has no tokens: give it at least one, such as the tokenizer's BOS")
