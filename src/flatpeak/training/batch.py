"""From groups of completions to packed batches, and from a batch to minibatches and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatpeak.functional.weights import completion_weights
from flatpeak.training.config import MinibatchOf, Normalization
from flatpeak.types import Batch, Group, PackedCompletions

Packed = TypeVar("Packed", bound=PackedCompletions)


def collate(groups: Sequence[Group], valid_PG: Tensor, *, device: torch.device) -> PackedCompletions:
    """Lay the valid completions of all groups end to end.

    valid_PG (bool) leaves out what is missing. Prompt p of the result is that of group p.
    """
    kept = [
        (index, completion)
        for index, group in enumerate(groups)
        for completion, valid in zip(group.completions, valid_PG[index].tolist(), strict=True)
        if valid
    ]
    lengths_N = torch.tensor([len(completion.token_ids) for _, completion in kept], dtype=torch.int64, device=device)
    return PackedCompletions(
        prompts=tuple(group.prompt.token_ids for group in groups),
        prompt_N=torch.tensor([index for index, _ in kept], dtype=torch.int64, device=device),
        lengths_N=lengths_N,
        tokens_T=_flat([completion.token_ids for _, completion in kept], dtype=torch.int64, device=device),
        sequence_T=torch.arange(len(kept), device=device).repeat_interleave(lengths_N),
        sampler_logprobs_T=_flat([completion.logprobs for _, completion in kept], dtype=torch.float32, device=device),
    )


def take(batch: Packed, completions_M: Tensor) -> Packed:
    """The sub-batch of these completions (int64, ascending), with only the prompts they need."""
    completions_M = completions_M.to(batch.lengths_N.device)
    chosen_N = torch.zeros(len(batch.lengths_N), dtype=torch.bool, device=completions_M.device)
    chosen_N[completions_M] = True
    tokens = chosen_N[batch.sequence_T].nonzero()[:, 0]
    used, prompt_M = torch.unique_consecutive(batch.prompt_N[completions_M], return_inverse=True)
    lengths_M = batch.lengths_N[completions_M]
    by_shape = {"N": completions_M, "T": tokens}
    values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "prompts"}
    selected: dict[str, Any] = {
        name: None if value is None else value[by_shape[name.rpartition("_")[2]]] for name, value in values.items()
    }
    selected["prompts"] = tuple(batch.prompts[prompt] for prompt in used.tolist())
    selected["prompt_N"] = prompt_M
    selected["sequence_T"] = torch.arange(len(lengths_M), device=lengths_M.device).repeat_interleave(lengths_M)
    return replace(batch, **selected)


def minibatches(
    completions: PackedCompletions,
    count: int,
    *,
    advantages_N: Tensor,
    old_logprobs_T: Tensor | None,
    of: MinibatchOf = "groups",
    normalization: Normalization,
    max_tokens: int,
    seed: int,
    all_tokens: bool,
) -> Iterator[Batch]:
    """Cut one epoch into `count` minibatches of whole groups or of completions, in an order drawn from `seed`.

    Fewer where there are fewer of them. The weights of a minibatch are fixed over all its completions; those without
    signal are then left out, unless `all_tokens` (a KL or entropy term needs every token).
    """
    lengths_N, prompt_N = completions.lengths_N, completions.prompt_N
    unit_N = prompt_N if of == "groups" else torch.arange(len(prompt_N), device=prompt_N.device)
    present = torch.unique(unit_N)
    if not len(present):
        return
    order = present[torch.randperm(len(present), generator=torch.Generator().manual_seed(seed)).to(present.device)]
    members = [torch.isin(unit_N, units).nonzero()[:, 0] for units in order.tensor_split(min(count, len(order)))]
    weights_N = torch.empty(len(lengths_N), device=lengths_N.device)
    for indices in members:
        weights_N[indices] = completion_weights(lengths_N[indices], normalization, max_tokens=max_tokens)
    epoch = completions.to_batch(advantages_N=advantages_N, weights_N=weights_N, old_logprobs_T=old_logprobs_T)
    signal_N = weights_N > 0 if all_tokens else (weights_N > 0) & (advantages_N != 0)
    for indices in members:
        yield take(epoch, indices[signal_N[indices]])


def micro_batches(batch: Packed, token_budget: int, *, padded: bool = False) -> Iterator[Packed]:
    """Cut a batch into micro-batches of at most `token_budget` tokens, prompts included, between completions.

    A group that fits into one is not split; a completion longer than the budget has one of its own. `padded`: for a
    pass that reads each completion with a prompt of its own, padded to the longest, and these tokens are counted.
    """
    cuts = _padded_cuts(batch, token_budget) if padded else _packed_cuts(batch, token_budget)
    count = len(batch.lengths_N)
    for start, stop in pairwise([*cuts, count]):
        if start < stop:
            yield batch if stop - start == count else take(batch, torch.arange(start, stop))


def _packed_cuts(batch: PackedCompletions, token_budget: int) -> list[int]:
    """First completions of the micro-batches, in each of which a prompt counts once."""
    prompts, lengths = batch.prompt_N.tolist(), batch.lengths_N.tolist()
    group_tokens = [len(prompt) for prompt in batch.prompts]
    for prompt, length in zip(prompts, lengths, strict=True):
        group_tokens[prompt] += length
    cuts, used = [0], 0
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        prompt_tokens = len(batch.prompts[prompt])
        begins_group = index == 0 or prompt != prompts[index - 1]
        whole = group_tokens[prompt] if begins_group and group_tokens[prompt] <= token_budget else 0
        cost = length + (prompt_tokens if begins_group else 0)
        if index > cuts[-1] and used + max(cost, whole) > token_budget:
            cuts.append(index)
            used, cost = 0, length + prompt_tokens
        used += cost
    return cuts


def _padded_cuts(batch: PackedCompletions, token_budget: int) -> list[int]:
    """First completions of the micro-batches, each of which costs its completions times its longest row."""
    cuts, longest = [0], 0
    for index, (prompt, length) in enumerate(zip(batch.prompt_N.tolist(), batch.lengths_N.tolist(), strict=True)):
        row = len(batch.prompts[prompt]) + length
        longest = max(longest, row)
        if index > cuts[-1] and (index + 1 - cuts[-1]) * longest > token_budget:
            cuts.append(index)
            longest = row
    return cuts


def _flat(rows: Sequence[Sequence[float]], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([item for row in rows for item in row], dtype=dtype, device=device)
