"""From groups of completions to packed batches, and from a batch to minibatches and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from flatpeak.functional.weights import completion_weights
from flatpeak.training.config import MinibatchOf, Normalization
from flatpeak.types import Batch, Group


def collate(groups: Sequence[Group], valid_PG: Tensor, *, device: torch.device) -> Batch:
    """Lay the valid completions of all groups end to end; advantages and weights are zero until they are known.

    valid_PG (bool) leaves out what is missing. Prompt p of the batch is group p.
    """
    kept = [
        (index, completion)
        for index, group in enumerate(groups)
        for completion, valid in zip(group.completions, valid_PG[index].tolist(), strict=True)
        if valid
    ]
    lengths_N = torch.tensor([len(completion.token_ids) for _, completion in kept], dtype=torch.int64, device=device)
    zeros_N = torch.zeros(len(kept), device=device)
    logprobs_T = _flat([completion.logprobs for _, completion in kept], dtype=torch.float32, device=device)
    return Batch(
        prompts=tuple(group.prompt.token_ids for group in groups),
        prompt_N=torch.tensor([index for index, _ in kept], dtype=torch.int64, device=device),
        lengths_N=lengths_N,
        tokens_T=_flat([completion.token_ids for _, completion in kept], dtype=torch.int64, device=device),
        sequence_T=torch.arange(len(kept), device=device).repeat_interleave(lengths_N),
        advantages_N=zeros_N,
        weights_N=zeros_N,
        old_logprobs_T=logprobs_T,
        sampler_logprobs_T=logprobs_T,
    )


def take(batch: Batch, completions_M: Tensor) -> Batch:
    """The sub-batch of these completions (int64, ascending), with only the prompts they need."""
    completions_M = completions_M.to(batch.lengths_N.device)
    chosen_N = torch.zeros(len(batch.lengths_N), dtype=torch.bool, device=completions_M.device)
    chosen_N[completions_M] = True
    tokens = chosen_N[batch.sequence_T].nonzero()[:, 0]
    used, prompt_M = torch.unique_consecutive(batch.prompt_N[completions_M], return_inverse=True)
    lengths_M = batch.lengths_N[completions_M]
    return Batch(
        prompts=tuple(batch.prompts[prompt] for prompt in used.tolist()),
        prompt_N=prompt_M,
        lengths_N=lengths_M,
        tokens_T=batch.tokens_T[tokens],
        sequence_T=torch.arange(len(completions_M), device=completions_M.device).repeat_interleave(lengths_M),
        advantages_N=batch.advantages_N[completions_M],
        weights_N=batch.weights_N[completions_M],
        old_logprobs_T=_chosen(batch.old_logprobs_T, tokens),
        reference_logprobs_T=_chosen(batch.reference_logprobs_T, tokens),
        sampler_logprobs_T=_chosen(batch.sampler_logprobs_T, tokens),
    )


def minibatches(
    batch: Batch,
    count: int,
    *,
    of: MinibatchOf = "groups",
    normalization: Normalization,
    max_tokens: int,
    seed: int,
    all_tokens: bool,
) -> Iterator[Batch]:
    """Cut the batch into `count` minibatches of whole groups or of completions, in an order drawn from `seed`.

    Fewer where there are fewer of them. A minibatch's weights are fixed here, over all its completions; those without
    signal are then left out, unless `all_tokens` (a KL or entropy term needs every token).
    """
    unit_N = batch.prompt_N if of == "groups" else torch.arange(len(batch.prompt_N), device=batch.prompt_N.device)
    present = torch.unique(unit_N)
    if not len(present):
        return
    order = present[torch.randperm(len(present), generator=torch.Generator().manual_seed(seed)).to(present.device)]
    for units in order.tensor_split(min(count, len(order))):
        completions = torch.isin(unit_N, units).nonzero()[:, 0]
        weights = completion_weights(batch.lengths_N[completions], normalization, max_tokens=max_tokens)
        signal = weights > 0 if all_tokens else (weights > 0) & (batch.advantages_N[completions] != 0)
        weighted = replace(batch, weights_N=batch.weights_N.index_copy(0, completions, weights))
        yield take(weighted, completions[signal])


def micro_batches(batch: Batch, token_budget: int, *, padded: bool = False) -> Iterator[Batch]:
    """Cut a batch into pieces of at most `token_budget` tokens, prompts included, between completions.

    A group that fits into one piece is not split; a completion longer than the budget is a piece of its own. `padded`:
    for a pass that reads each completion with a prompt of its own, padded to the longest, so that is what is counted.
    """
    cuts = _padded_cuts(batch, token_budget) if padded else _packed_cuts(batch, token_budget)
    count = len(batch.lengths_N)
    for start, stop in pairwise([*cuts, count]):
        if start < stop:
            yield batch if stop - start == count else take(batch, torch.arange(start, stop))


def _packed_cuts(batch: Batch, token_budget: int) -> list[int]:
    """Where pieces begin, each prompt counted once in a piece."""
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


def _padded_cuts(batch: Batch, token_budget: int) -> list[int]:
    """Where pieces begin, of which each takes its completions times its longest row."""
    cuts, longest = [0], 0
    for index, (prompt, length) in enumerate(zip(batch.prompt_N.tolist(), batch.lengths_N.tolist(), strict=True)):
        row = len(batch.prompts[prompt]) + length
        longest = max(longest, row)
        if index > cuts[-1] and (index + 1 - cuts[-1]) * longest > token_budget:
            cuts.append(index)
            longest = row
    return cuts


def _chosen(values_T: Tensor | None, tokens: Tensor) -> Tensor | None:
    return None if values_T is None else values_T[tokens]


def _flat(rows: Sequence[Sequence[float]], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([item for row in rows for item in row], dtype=dtype, device=device)
