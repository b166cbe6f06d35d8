"""One packed row per micro-batch: each prompt once, then each of its responses, which attend to it.

    prompt 0 | prompt 1 | ... | response 0 | response 1 | ... | filler

S counts the row's tokens (filler included), P its prompts, N its responses, T its response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatpeak.types import Batch

ROW_MULTIPLE = 4
"""Matrix products give a row the same bits whatever the other rows are only where rows come in multiples of four."""
BATCH_MULTIPLE = 64
"""Training rows come in few lengths, as oneDNN compiles and keeps a kernel for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Stretches of the packed row, and where their tokens stand when padded side by side for attention."""

    lengths: Tensor
    """int64 [count], in the order of the padded layout."""
    longest: int
    """Columns of the padded layout."""
    slots: Tensor
    """int64 [sum of lengths]: row-major index of each token in the padded [count, longest]."""

    @property
    def count(self) -> int:
        """How many segments."""
        return len(self.lengths)

    def pad(self, flat: Tensor) -> Tensor:
        """[sum of lengths, H, D] -> [count, H, longest, D], zero where there is no token."""
        heads, dim = flat.shape[1:]
        padded = flat.new_zeros(self.count * self.longest, heads, dim).index_copy(0, self.slots, flat)
        return padded.view(self.count, self.longest, heads, dim).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """[count, H, longest, D] -> [sum of lengths, H, D]."""
        heads, dim = padded.shape[1], padded.shape[3]
        return padded.transpose(1, 2).reshape(-1, heads, dim).index_select(0, self.slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """What a model reads in one packed forward pass."""

    token_ids_S: Tensor
    positions_S: Tensor
    prompts: Segments
    responses: Segments | None
    prompt_N: Tensor
    """int64 [N]: the prompt of each response, in the order of the padded layout: the longest response first."""
    source_T: Tensor
    """int64 [T]: the row position whose hidden state predicts each response token. A prompt's last position repeats."""


def segments(lengths: Tensor, *, multiple: int = 1, order: Tensor | None = None) -> Segments:
    """Lay segments of these lengths out side by side, padded to the longest, rounded up to a multiple.

    `order` (int64, a permutation) says which segment stands in each row of the padded layout; None keeps their order.
    """
    longest = -(-int(lengths.max()) // multiple) * multiple
    rows = torch.arange(len(lengths), device=lengths.device)
    places = rows if order is None else torch.empty_like(order).index_copy_(0, order, rows)
    starts = torch.repeat_interleave(places * longest, lengths)
    return Segments(
        lengths=lengths if order is None else lengths.index_select(0, order),
        longest=longest,
        slots=starts + offsets(lengths),
    )


def offsets(lengths: Tensor) -> Tensor:
    """0, 1, ..., length - 1 of every segment, end to end."""
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1]), device=lengths.device) - torch.repeat_interleave(ends - lengths, lengths)


def pack_prompts(prompts: Sequence[Sequence[int]], *, device: torch.device, multiple: int) -> PackedRow:
    """Prompts alone, for prefill. `source_T` holds each prompt's last position."""
    lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=device)
    token_ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    return PackedRow(
        token_ids_S=fill(token_ids),
        positions_S=fill(offsets(lengths_P)),
        prompts=segments(lengths_P, multiple=multiple),
        responses=None,
        prompt_N=torch.zeros(0, dtype=torch.int64, device=device),
        source_T=lengths_P.cumsum(0) - 1,
    )


def pack_batch(batch: Batch) -> PackedRow:
    """Prompts and responses. The last token of a response is read too: it costs one row and keeps the layout plain."""
    device = batch.tokens_T.device
    lengths_P = torch.tensor([len(prompt) for prompt in batch.prompts], device=device)
    prompt_tokens = torch.tensor([token for prompt in batch.prompts for token in prompt], device=device)
    within_T = offsets(batch.lengths_N)
    prompt_lengths_N = lengths_P.index_select(0, batch.prompt_N)
    last_of_prompt_N = (lengths_P.cumsum(0) - 1).index_select(0, batch.prompt_N)
    row_T = len(prompt_tokens) + torch.arange(len(batch.tokens_T), device=device)
    order_N = batch.lengths_N.argsort(descending=True, stable=True)
    source_T = torch.where(within_T == 0, last_of_prompt_N.index_select(0, batch.sequence_T), row_T - 1)
    return PackedRow(
        token_ids_S=fill(torch.cat([prompt_tokens, batch.tokens_T]), BATCH_MULTIPLE),
        positions_S=fill(
            torch.cat([offsets(lengths_P), prompt_lengths_N.index_select(0, batch.sequence_T) + within_T]),
            BATCH_MULTIPLE,
        ),
        prompts=segments(lengths_P),
        responses=segments(batch.lengths_N, order=order_N),
        prompt_N=batch.prompt_N.index_select(0, order_N),
        source_T=source_T,
    )


def fill(rows: Tensor, multiple: int = ROW_MULTIPLE) -> Tensor:
    """Repeat the first row up to a multiple.

    Not zeros: a filler token is then a real one, and models that warn of unmasked padding tokens stay silent.
    """
    missing = -len(rows) % multiple
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else rows
