"""The completions of one request: what was drawn, which of them ended and where."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatpeak.errors import DIVERGED, DivergedError
from flatpeak.rollout.randomness import uniforms
from flatpeak.rollout.sampling import draw
from flatpeak.rollout.stopping import StopStrings, is_end_of_sequence
from flatpeak.types import Completion, SamplingParams

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
