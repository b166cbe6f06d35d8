"""Micro-batches as one packed row: each prompt once, then each of its responses, which attend to it.

    prompt 0 | prompt 1 | ... | response 0 | response 1 | ... | filler

Everything in a model except attention reads the row as it is, without padding. Attention pads prompts and responses
in groups of similar length (`by_length`), so that one long prompt does not lengthen the padding of short ones; the
groups follow each other in the row. A model that does not support packing reads the same batch padded, with the prompt
repeated for each completion (`padded_logits`, below).

S counts the row's tokens (including filler), P its prompts, N its responses, T its response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatpeak.kernels.flash_attention import FlashSegments
from flatpeak.kernels.native.training_pass import Groups
from flatpeak.types import PackedCompletions

ROW_MULTIPLE = 4
"""Matrix products give a row the same bits for any values of the other rows only if rows are a multiple of four."""
KEY_MULTIPLE = 16
"""On a CPU keys are padded to a multiple of this, so that the order of a slot's sums does not depend on the lengths of
other slots."""
SMALLEST_PRODUCT = 400
"""torch computes matrix products with fewer multiplications by different code, which rounds differently."""
BATCH_MULTIPLE = 64
"""Training rows are padded to few different lengths, because oneDNN compiles and keeps a kernel per length."""
SIMILAR = 64
"""Lengths that differ by at most this, or by a quarter of the longest, are padded together."""
LARGEST_WASTE = 4
"""The most padded positions per token ..."""
SMALL = 4096
"""... in a group with more positions than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Sections of the packed row, and the positions of their tokens in the padded layout for attention."""

    lengths: Tensor
    """int64 [count], in the order of the padded layout."""
    longest: int
    """Columns of the padded layout."""
    padded_index: Tensor
    """int64 [sum of lengths]: row-major index of each token in the padded [count, longest]."""

    @property
    def count(self) -> int:
        """The number of segments."""
        return len(self.lengths)

    @property
    def starts(self) -> Tensor:
        """int64 [count]: the index of each segment's first token, counting only these segments' tokens."""
        first = (self.padded_index % self.longest == 0).nonzero()[:, 0]
        return torch.empty_like(self.lengths).index_copy_(0, self.padded_index[first] // self.longest, first)

    def pad(self, flat: Tensor) -> Tensor:
        """Pad segments into rows: [sum of lengths, H, D] -> [count, H, longest, D], with zeros as padding."""
        heads, dim = flat.shape[1:]
        padded = flat.new_zeros(self.count * self.longest, heads, dim).index_copy(0, self.padded_index, flat)
        return padded.view(self.count, self.longest, heads, dim).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """Undo the padding: [count, H, longest, D] -> [sum of lengths, H, D]."""
        heads, dim = padded.shape[1], padded.shape[3]
        return padded.transpose(1, 2).reshape(-1, heads, dim).index_select(0, self.padded_index)


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """Responses to prompts of the same group, padded, the longest first."""

    segments: Segments
    group: int
    """The index of the prompts' group in PackedRow.prompts."""
    prompt_N: Tensor
    """int64 [N]: the row of each response's prompt in the group's padded layout, in the order of `segments`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """The input of one packed forward pass."""

    token_ids_S: Tensor
    positions_S: Tensor
    prompts: tuple[Segments, ...]
    """Groups of similar length, in the order of the row."""
    order_P: tuple[int, ...]
    """Indices of the prompts, in the order of the row."""
    responses: tuple[Responses, ...]
    """Responses in the order of the row, after all prompts."""
    source_T: Tensor
    """int64 [T]: the row position whose hidden state predicts each response token; prompts' last positions repeat."""


def segments(lengths: Tensor, *, multiple: int = 1, order: Tensor | None = None) -> Segments:
    """Lay out segments of these lengths, padded to the longest, rounded up to a multiple.

    `order` (int64, a permutation) is the segment in each row of the padded layout; None keeps the given order.
    """
    longest = -(-int(lengths.max()) // multiple) * multiple
    rows = torch.arange(len(lengths), device=lengths.device)
    row_of = rows if order is None else torch.empty_like(order).index_copy_(0, order, rows)
    starts = torch.repeat_interleave(row_of * longest, lengths)
    return Segments(
        lengths=lengths if order is None else lengths.index_select(0, order),
        longest=longest,
        padded_index=starts + offsets(lengths),
    )


def offsets(lengths: Tensor) -> Tensor:
    """0, 1, ..., length - 1 for each segment, concatenated."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0  # if all completions are empty, there are no segments
    return torch.arange(total, device=lengths.device) - torch.repeat_interleave(ends - lengths, lengths)


def pack_prompts(prompts: Sequence[Sequence[int]], *, device: torch.device, multiple: int) -> PackedRow:
    """Pack prompts alone, for prefill. `source_T` is the last position of each prompt, in the given order."""
    lengths = [len(prompt) for prompt in prompts]
    groups = by_length(lengths)
    order = tuple(chain.from_iterable(groups))
    lengths_P = torch.tensor([lengths[p] for p in order], device=device)
    token_ids = torch.tensor([token for p in order for token in prompts[p]], device=device)
    return PackedRow(
        token_ids_S=fill(token_ids),
        positions_S=fill(offsets(lengths_P)),
        prompts=tuple(_prompt_segments(lengths, groups, device=device, multiple=multiple)),
        order_P=order,
        responses=(),
        source_T=_by_index(order, lengths_P.cumsum(0) - 1),
    )


def pack_batch(batch: PackedCompletions) -> PackedRow:
    """Pack prompts and responses.

    The last token of each response is packed too. It predicts nothing, but omitting it would complicate every index to
    save one position.
    """
    device = batch.tokens_T.device
    lengths = [len(prompt) for prompt in batch.prompts]
    groups = by_length(lengths)
    order_P = tuple(chain.from_iterable(groups))
    prompt_tokens = torch.tensor([token for p in order_P for token in batch.prompts[p]], device=device)
    lengths_P = torch.tensor([lengths[p] for p in order_P], device=device)
    last_of_prompt_N = _by_index(order_P, lengths_P.cumsum(0) - 1).index_select(0, batch.prompt_N)
    bundles = _bundles(batch, groups)
    order_N = torch.tensor([n for _, members in bundles for n in members], dtype=torch.int64, device=device)
    lengths_R = batch.lengths_N.index_select(0, order_N)  # in the order of the row
    within_R, within_T = offsets(lengths_R), offsets(batch.lengths_N)
    starts_N = (batch.lengths_N.cumsum(0) - batch.lengths_N).index_select(0, order_N)
    token_R = torch.repeat_interleave(starts_N, lengths_R) + within_R
    # The start of each response in the row; an empty response has no start, and no token refers to it.
    begins_N = torch.zeros_like(batch.lengths_N).index_copy_(0, order_N, lengths_R.cumsum(0) - lengths_R)
    before_T = len(prompt_tokens) + begins_N.index_select(0, batch.sequence_T) + within_T - 1
    prompt_lengths_N = torch.tensor(lengths, device=device).index_select(0, batch.prompt_N)
    positions_R = torch.repeat_interleave(prompt_lengths_N.index_select(0, order_N), lengths_R) + within_R
    return PackedRow(
        token_ids_S=fill(torch.cat([prompt_tokens, batch.tokens_T.index_select(0, token_R)]), BATCH_MULTIPLE),
        positions_S=fill(torch.cat([offsets(lengths_P), positions_R]), BATCH_MULTIPLE),
        prompts=tuple(_prompt_segments(lengths, groups, device=device)),
        order_P=order_P,
        responses=tuple(_responses(batch, groups, bundles)),
        source_T=torch.where(within_T == 0, last_of_prompt_N.index_select(0, batch.sequence_T), before_T),
    )


def _prompt_segments(
    lengths: Sequence[int], groups: Sequence[Sequence[int]], *, device: torch.device, multiple: int = 1
) -> Iterator[Segments]:
    for group in groups:
        yield segments(torch.tensor([lengths[p] for p in group], device=device), multiple=multiple)


def _bundles(batch: PackedCompletions, groups: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Pairs (group of prompts, responses to them), one per group of response lengths; empty responses are omitted."""
    group_of = {p: g for g, group in enumerate(groups) for p in group}
    lengths = batch.lengths_N.tolist()
    members: list[list[int]] = [[] for _ in groups]
    for n, p in enumerate(batch.prompt_N.tolist()):
        if lengths[n]:
            members[group_of[p]].append(n)
    bundles = []
    for g, chosen in enumerate(members):
        for bundle in by_length([lengths[n] for n in chosen], similar=False):
            bundles.append((g, [chosen[index] for index in bundle]))
    return bundles


def _responses(
    batch: PackedCompletions, groups: Sequence[Sequence[int]], bundles: Sequence[tuple[int, list[int]]]
) -> Iterator[Responses]:
    row_of = {p: row for group in groups for row, p in enumerate(group)}
    device = batch.lengths_N.device
    rows_N = torch.tensor([row_of[p] for p in batch.prompt_N.tolist()], dtype=torch.int64, device=device)
    for group, members in bundles:
        members_N = torch.tensor(members, device=device)
        lengths_N = batch.lengths_N.index_select(0, members_N)
        order_N = lengths_N.argsort(descending=True, stable=True)
        yield Responses(
            segments=segments(lengths_N, order=order_N),
            group=group,
            prompt_N=rows_N.index_select(0, members_N.index_select(0, order_N)),
        )


def attention_groups(row: PackedRow) -> Groups:
    """The segments of a packed row for native kernels: each prompt, followed by its responses."""
    starts, lengths, prompt = _located(row)
    order = prompt.argsort(stable=True)  # a prompt comes before its responses
    return Groups(
        bounds=F.pad(prompt.bincount().cumsum(0), (1, 0)),
        segments=torch.stack([starts, lengths], 1).index_select(0, order),
    )


def flash_segments(row: PackedRow) -> FlashSegments:
    """The segments of a packed row for FlashAttention."""
    starts, lengths, prompt = _located(row)
    return FlashSegments.build(starts, lengths, prompt)


def _located(row: PackedRow) -> tuple[Tensor, Tensor, Tensor]:
    """The first token and the number of tokens of each prompt and then of each response, and the index of its
    prompt."""
    packed = [*row.prompts, *(bundle.segments for bundle in row.responses)]
    begins = accumulate((len(each.padded_index) for each in packed), initial=0)
    starts = torch.cat([begin + each.starts for begin, each in zip(begins, packed, strict=False)])
    before = [0, *accumulate(each.count for each in row.prompts)]
    own = torch.arange(before[-1], device=starts.device)
    prompts = [own, *(before[bundle.group] + bundle.prompt_N for bundle in row.responses)]
    return starts, torch.cat([each.lengths for each in packed]), torch.cat(prompts)


def _by_index(order: Sequence[int], values: Tensor) -> Tensor:
    """Undo an order: `values[i]` belongs to index `order[i]`; the result is in the order of indices."""
    return torch.empty_like(values).index_copy_(0, torch.tensor(order, device=values.device), values)


def fill(rows: Tensor, multiple: int = ROW_MULTIPLE) -> Tensor:
    """Repeat the first row up to a multiple of rows.

    Zeros could be padding tokens without a mask, about which some models warn; a real token causes no warning.
    """
    missing = -len(rows) % multiple
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else rows


def key_multiple(config: Any) -> int:
    """A multiple for the number of keys, large enough that torch uses the same code for all products of a head."""
    heads: int = config.num_attention_heads
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_key: int = dim * heads // (getattr(config, "num_key_value_heads", None) or heads)
    return KEY_MULTIPLE * -(-SMALLEST_PRODUCT // (KEY_MULTIPLE * per_key))


def by_length(lengths: Sequence[int], *, similar: bool = True) -> list[list[int]]:
    """Indices in groups of similar length, the longest first; within a group they keep their order.

    Without `similar`, only LARGEST_WASTE limits the padding that a group may need.
    """
    groups: list[list[int]] = []
    longest = tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        tokens += length
        near = not similar or longest - length <= max(SIMILAR, longest // 4)
        if not groups or not near or (len(groups[-1]) + 1) * longest > max(SMALL, LARGEST_WASTE * tokens):
            groups.append([])
            longest = tokens = length
        groups[-1].append(index)
    return [sorted(group) for group in groups]


def padded_logits(model: Any, batch: PackedCompletions) -> Tensor:
    """The logits at each response token, at least float32 [T, V], by the model's own padded forward pass."""
    device = batch.tokens_T.device
    responses = batch.tokens_T.split(batch.lengths_N.tolist())
    rows = [
        torch.cat([torch.tensor(batch.prompts[prompt], device=device), response])
        for prompt, response in zip(batch.prompt_N.tolist(), responses, strict=True)
    ]
    lengths_N = torch.tensor([len(row) for row in rows], device=device)
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attention_mask = (torch.arange(input_ids.shape[1], device=device) < lengths_N[:, None]).long()
    first_N = torch.arange(len(rows), device=device) * input_ids.shape[1] + lengths_N - batch.lengths_N - 1
    source_T = first_N.index_select(0, batch.sequence_T) + offsets(batch.lengths_N)
    with _logits_only_at(model, source_T, input_ids.shape):
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    # Logits have all positions if the hook below did not recognize the input of the output layer.
    logits_TV: Tensor = (
        logits[0] if logits.shape[:2] != input_ids.shape else logits.flatten(0, 1).index_select(0, source_T)
    )
    return logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))


@contextmanager
def _logits_only_at(model: Any, source_T: Tensor, shape: torch.Size) -> Iterator[None]:
    """A context in which the output layer reads hidden states [N, L, D] only at these positions, as a row [1, T, D].

    Logits of whole prompts would need more memory than everything else. Models compute logits separately for each
    token.
    """

    def choose(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(arguments) != 1 or arguments[0].shape[:-1] != shape:
            return None
        return (arguments[0].flatten(0, 1).index_select(0, source_T)[None],)

    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()
