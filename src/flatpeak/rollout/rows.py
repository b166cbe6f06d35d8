"""The completions being drawn side by side: what was drawn, which of them ended and where."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.rollout.randomness import uniforms
from flatpeak.rollout.sampling import draw
from flatpeak.rollout.stopping import StopStrings, is_end_of_sequence
from flatpeak.types import Completion, SamplingParams

if TYPE_CHECKING:
    from flatpeak.protocols import Tokenizer


class Rows:
    """N completions at the same position. An engine draws for the rows that it still decodes, and asks which ended.

    Histories are tensors written one position at a time; what is drawn for a row after its end is ignored.
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
        num_rows = len(keys_N)
        shape_TN = (sampling.max_new_tokens, num_rows)
        self.max_new_tokens = sampling.max_new_tokens
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._keys_N = keys_N.to(device)
        self._eos_K = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)
        self._tokens_TN = torch.zeros(shape_TN, dtype=torch.int64, device=device)
        self._logprobs_TN = torch.zeros(shape_TN, dtype=torch.float32, device=device)
        self._filtered_TN = torch.zeros_like(self._logprobs_TN) if sampling.filtered else None
        self._ends_N = torch.zeros(num_rows, dtype=torch.int64, device=device)  # tokens up to the stop; 0: none yet
        self._histories: list[list[int]] = [[] for _ in range(num_rows)]  # filled only where there are stop strings

    def draw(self, logits_RV: Tensor, rows_R: Tensor, position: int) -> Tensor:
        """Draw and record the token at `position` of these rows (int64 [R], indices among the N); int64 [R]."""
        forbidden_K = None
        if position < self._sampling.min_new_tokens:
            forbidden_K = self._eos_K[self._eos_K < logits_RV.shape[-1]]
        drawn = draw(
            logits_RV,
            uniforms(self._keys_N.index_select(0, rows_R), position),
            temperature=self._sampling.temperature,
            top_k=self._sampling.top_k,
            top_p=self._sampling.top_p,
            forbidden_K=forbidden_K,
        )
        self._tokens_TN[position].index_copy_(0, rows_R, drawn.tokens_R)
        self._logprobs_TN[position].index_copy_(0, rows_R, drawn.logprobs_R)
        if self._filtered_TN is not None and drawn.filtered_logprobs_R is not None:
            self._filtered_TN[position].index_copy_(0, rows_R, drawn.filtered_logprobs_R)
        return drawn.tokens_R

    def still_live(self, live_R: Tensor, rows_R: Tensor, start: int, end: int) -> Tensor:
        """Of the live rows among `rows_R`, those that no token at positions start..end-1 has ended; bool [R]."""
        drawn_BR = self._tokens_TN[start:end].index_select(1, rows_R)
        stops_BR = is_end_of_sequence(drawn_BR, self._eos_K)
        if self._stop_strings is not None:
            stops_BR |= self._completes_stop_string(self._stop_strings, drawn_BR, live_R, rows_R, start)
        stopped_R = live_R & stops_BR.any(0)
        ends_R = start + 1 + stops_BR.int().argmax(0)  # argmax finds the first
        ends_R = torch.where(stopped_R, ends_R, self._ends_N.index_select(0, rows_R))
        self._ends_N.index_copy_(0, rows_R, ends_R)
        return live_R & ~stopped_R

    def completions(self) -> list[Completion]:
        """The N completions, in order."""
        if not bool(torch.isfinite(self._logprobs_TN).all()):
            raise UserError(
                "the model's logits are NaN or infinite: its weights have diverged or are damaged; "
                "go back to an earlier checkpoint, with a lower optimizer.learning_rate"
            )
        ends = self._ends_N.tolist()
        lengths = [end or self.max_new_tokens for end in ends]
        used = slice(max(lengths))
        tokens_NT = self._tokens_TN[used].T.tolist()
        logprobs_NT = self._logprobs_TN[used].T.tolist()
        filtered_NT = None if self._filtered_TN is None else self._filtered_TN[used].T.tolist()
        tokens = [row[:length] for row, length in zip(tokens_NT, lengths, strict=True)]
        texts = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [
            Completion(
                token_ids=tuple(tokens[n]),
                logprobs=tuple(logprobs_NT[n][:length]),
                finish_reason="stop" if ends[n] else "length",
                text=texts[n],
                filtered_logprobs=None if filtered_NT is None else tuple(filtered_NT[n][:length]),
            )
            for n, length in enumerate(lengths)
        ]

    def _completes_stop_string(
        self, stop_strings: StopStrings, drawn_BR: Tensor, live_R: Tensor, rows_R: Tensor, start: int
    ) -> Tensor:
        """bool [B, R]: the first token of each live row that completes a stop string."""
        hits_BR = torch.zeros(drawn_BR.shape, dtype=torch.bool)
        end = start + len(drawn_BR)
        heeded = range(max(start, self._sampling.min_new_tokens - 1), end)
        columns = zip(drawn_BR.T.tolist(), live_R.tolist(), rows_R.tolist(), strict=True)
        for r, (drawn, live, row) in enumerate(columns):
            if live:
                self._histories[row].extend(drawn)
                position = stop_strings.first_completed(self._histories[row], heeded)
                if position is not None:
                    hits_BR[position - start, r] = True
        return hits_BR.to(drawn_BR.device)
