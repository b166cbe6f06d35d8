"""The device side of a request: what is in each slot, and the step that draws one token for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatpeak.protocols import Decoder
from flatpeak.rollout.graphs import GraphedStep
from flatpeak.rollout.rows import Rows
from flatpeak.types import SamplingParams


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
