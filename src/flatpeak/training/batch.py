"""From groups of completions to packed batches, and from a batch to minibatches, micro-batches and ranks' shares.

On several ranks every rank has the whole minibatch, computes the passes of its share, and adds up. The weights of
completions are fixed over the whole minibatch, so the ranks' losses sum to its loss, whatever is whose. Each rank
multiplies its losses by the number of ranks and gradients are averaged, as DistributedDataParallel and FSDP2 do: an
average leaves alone what the ranks have in common already, such as the gradient of an earlier pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.functional.kept_tokens import ALL_BUT, KeptTokens, TokenSet
from flatpeak.functional.weights import completion_weights
from flatpeak.training.config import MinibatchOf
from flatpeak.training.objective import SamplerStatistics, TokenStatistics
from flatpeak.training.objective_config import Normalization
from flatpeak.types import Batch, Completion, Group, PackedCompletions

Packed = TypeVar("Packed", bound=PackedCompletions)
Statistics = TypeVar("Statistics", TokenStatistics, SamplerStatistics)


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
        sampler_logprobs_T=_flat([_logprobs(one) for _, one in kept], dtype=torch.float32, device=device),
        kept_T=_kept_tokens([one for _, one in kept], device),
        trained_T=_flat(
            [completion.trained or (True,) * len(completion.token_ids) for _, completion in kept],
            dtype=torch.bool,
            device=device,
        ),
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
    advantages_T: Tensor,
    old_logprobs_T: Tensor | None,
    of: MinibatchOf = "groups",
    normalization: Normalization,
    max_tokens: int,
    seed: int,
    all_tokens: bool,
    whole_groups: bool = False,
) -> Iterator[Batch]:
    """Cut one epoch into `count` minibatches of whole groups or of completions, in an order drawn from `seed`.

    Fewer where there are fewer of them. The weights of a minibatch are fixed over all its completions; those without an
    advantage are then left out, unless `all_tokens` (a KL or entropy term needs every token). With `whole_groups` only
    those of groups without any advantage are.
    """
    prompt_N = completions.prompt_N
    unit_N = prompt_N if of == "groups" else torch.arange(len(prompt_N), device=prompt_N.device)
    present = torch.unique(unit_N)
    if not len(present):
        return
    order = present[torch.randperm(len(present), generator=torch.Generator().manual_seed(seed)).to(present.device)]
    members = [torch.isin(unit_N, units).nonzero()[:, 0] for units in order.tensor_split(min(count, len(order)))]
    trained_N = trained_lengths(completions)
    weights_N = torch.empty(len(trained_N), dtype=torch.float32, device=trained_N.device)
    for indices in members:
        weights_N[indices] = completion_weights(trained_N[indices], normalization, max_tokens=max_tokens)
    epoch = completions.to_batch(advantages_T=advantages_T, weights_N=weights_N, old_logprobs_T=old_logprobs_T)
    signal_N = torch.ones_like(prompt_N, dtype=torch.bool) if all_tokens else has_advantage(epoch)
    if whole_groups:
        signal_N = torch.isin(prompt_N, prompt_N[signal_N])
    signal_N &= weights_N > 0
    for indices in members:
        yield take(epoch, indices[signal_N[indices]])


def per_token(values_N: Tensor, completions: PackedCompletions) -> Tensor:
    """Each completion's value for each of its tokens, [T] on the completions' device."""
    return values_N.to(completions.sequence_T.device).index_select(0, completions.sequence_T)


def of_first_tokens(values_T: Tensor, completions: PackedCompletions, *, without_N: Tensor) -> Tensor:
    """The value [N] of each completion's first token; that of `without_N` for a completion without tokens."""
    lengths_N = completions.lengths_N
    some_N = lengths_N > 0
    first_N = lengths_N.cumsum(0) - lengths_N
    return without_N.to(values_T.device).masked_scatter(some_N, values_T[first_N[some_N]])


def mean_of_trained(values_T: Tensor, completions: PackedCompletions) -> Tensor:
    """The mean [N] over the trained tokens of each completion, on the CPU, in a fixed order; 0 without any."""
    own_T = values_T if completions.trained_T is None else values_T.masked_fill(~completions.trained_T, 0.0)
    sums_N = torch.zeros(len(completions.lengths_N)).index_add(0, completions.sequence_T.cpu(), own_T.cpu())
    return sums_N / trained_lengths(completions).cpu().clamp(min=1)


def trained_lengths(batch: PackedCompletions) -> Tensor:
    """int64 [N]: the trained tokens of each completion."""
    if batch.trained_T is None:
        return batch.lengths_N
    return torch.zeros_like(batch.lengths_N).index_add(0, batch.sequence_T, batch.trained_T.long())


def has_advantage(batch: Batch) -> Tensor:
    """bool [N]: whether any token of a completion has an advantage."""
    return torch.zeros_like(batch.lengths_N).index_add(0, batch.sequence_T, (batch.advantages_T != 0).long()) > 0


def on_trained_tokens(batch: Packed, *values_T: Tensor) -> tuple[Any, ...]:
    """(batch, *values_T) without the tokens that were read and are not trained on, which also leave `lengths_N`."""
    if batch.trained_T is None or bool(batch.trained_T.all()):
        return batch, *values_T
    tokens = batch.trained_T.nonzero()[:, 0]
    values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name.endswith("_T")}
    selected: dict[str, Any] = {
        name: value.index_select(0, tokens) for name, value in values.items() if value is not None
    }
    shorter = replace(batch, lengths_N=trained_lengths(batch), **selected)
    return shorter, *(value_T.index_select(0, tokens) for value_T in values_T)


def at_trained_tokens(batch: PackedCompletions, values_T: Tensor) -> Tensor:
    """Values of the trained tokens at their places among all tokens, 0 elsewhere."""
    if batch.trained_T is None:
        return values_T
    return values_T.new_zeros(len(batch.tokens_T)).masked_scatter(batch.trained_T, values_T)


def micro_batches(
    batch: Packed, token_budget: int, *, padded: bool = False, parallel: DataParallel | None = None
) -> Iterator[Packed]:
    """Cut a batch into micro-batches of at most `token_budget` tokens, prompts included, between completions.

    A group that fits into one is not split; a completion longer than the budget has one of its own. `padded`: for a
    pass that reads each completion with a prompt of its own, padded to the longest, and these tokens are counted.
    `parallel`: on several ranks, those of this rank.
    """
    if parallel is not None and parallel.ranks.size > 1:
        yield from parallel.micro_batches(batch, token_budget, padded=padded)
        return
    count = len(batch.lengths_N)
    cuts = _cuts(batch, token_budget, padded=padded)
    for start, stop in pairwise([*cuts, count]):
        if start < stop:
            yield batch if stop - start == count else take(batch, torch.arange(start, stop))


def count_micro_batches(batch: PackedCompletions, token_budget: int, *, padded: bool) -> int:
    """The number of micro-batches of a batch, counted without a tensor on the device."""
    return len(_cuts(batch, token_budget, padded=padded))


def _cuts(batch: PackedCompletions, token_budget: int, *, padded: bool) -> list[int]:
    """First completions of the micro-batches."""
    return _padded_cuts(batch, token_budget) if padded else _packed_cuts(batch, token_budget)


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


def _logprobs(completion: Completion) -> Sequence[float]:
    """The log-probabilities over the tokens that were drawn from, where these are known."""
    if completion.kept is None or completion.filtered_logprobs is None:
        return completion.logprobs
    return completion.filtered_logprobs


def _kept_tokens(completions: Sequence[Completion], device: torch.device) -> KeptTokens | None:
    """The tokens that each token was drawn from; None where they are not known."""
    if all(completion.kept is None for completion in completions):
        return None
    sets: list[TokenSet] = []
    for completion in completions:
        everything = ((ALL_BUT,),) * len(completion.token_ids)
        sets += [one for _, one in zip(completion.token_ids, completion.kept or everything, strict=True)]
    return KeptTokens.of(sets, device=device)


def _flat(rows: Sequence[Sequence[float]], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([item for row in rows for item in row], dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """The division of batches among ranks."""

    ranks: Ranks = ALONE
    undivided_tokens: float = 0.0
    """Tokens of a batch, prompts included, up to which the first rank computes all of it."""

    def micro_batches(self, batch: Packed, token_budget: int, *, padded: bool) -> Iterator[Packed]:
        """This rank's micro-batches: as many as every other's, the last ones without a token where it has fewer.

        The passes of a sharded model are collective: a rank with fewer of them would leave the others waiting.
        """
        cut = [list(micro_batches(take(batch, share), token_budget, padded=padded)) for share in self.shares(batch)]
        own = cut[self.ranks.rank]
        yield from own
        for _ in range(max(map(len, cut)) - len(own)):
            yield filler(batch)

    def scale(self, loss: Tensor) -> Tensor:
        """A micro-batch's loss as it is backpropagated, before the average over the ranks."""
        return loss if self.ranks.size == 1 else loss * self.ranks.size

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average `.grad` over the ranks; those of a sharded model are averaged in its backward pass."""
        self.ranks.average_gradients(p for p in parameters if not isinstance(p, DTensor))

    def is_undivided(self, batch: PackedCompletions) -> bool:
        """Whether a batch is so small that the first rank computes all of it."""
        return len(batch.tokens_T) + sum(map(len, batch.prompts)) <= self.undivided_tokens

    def shares(self, batch: PackedCompletions) -> list[Tensor]:
        """The completions of each rank, ascending: see `divide_evenly`, or a small batch's all on the first rank.

        Its gradient then has the bits of one process where the number of ranks is a power of two: the others add 0 to
        a gradient that is multiplied and divided by it.
        """
        if not self.is_undivided(batch):
            return divide_evenly(batch, self.ranks.size)
        completions = torch.arange(len(batch.lengths_N), device=batch.lengths_N.device)
        return [completions, *(completions[:0] for _ in range(self.ranks.size - 1))]

    def in_order(self, batch: PackedCompletions, own_T: Tensor) -> Tensor:
        """The values [T] of a batch's tokens, of which every rank has those of its micro-batches."""
        if self.ranks.size == 1:
            return own_T
        values_T = own_T.new_zeros(len(batch.tokens_T))
        for share, scores in zip(self.shares(batch), self.ranks.gather(own_T.cpu()), strict=True):
            values_T[torch.isin(batch.sequence_T, share)] = scores.to(values_T.device)
        return values_T

    def joined(self, loss: float, tokens: list[TokenStatistics]) -> tuple[float, list[TokenStatistics]]:
        """An update's loss and statistics over all ranks, of the parts of each."""
        if self.ranks.size == 1:
            return loss, tokens
        by_rank = self.ranks.gather((loss, [_on_cpu(one) for one in tokens]))
        return sum(loss for loss, _ in by_rank), [one for _, tokens in by_rank for one in tokens]


UNDIVIDED = DataParallel()
"""The division among one rank: none."""


def divide_evenly(batch: PackedCompletions, count: int) -> list[Tensor]:
    """Divide a batch's completions into `count` shares of similar numbers of tokens, each ascending.

    Groups stay whole, since a prompt is read once for all of its completions, unless one has more tokens than a share.
    The largest come first, each to the share with the fewest tokens so far.
    """
    lengths, prompts = batch.lengths_N.tolist(), batch.prompt_N.tolist()
    members: dict[int, list[int]] = {}
    for completion, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(completion)
    fair = (sum(lengths) + sum(len(batch.prompts[prompt]) for prompt in members)) / count
    units: list[tuple[int, list[int]]] = []
    for prompt, completions in members.items():
        tokens = len(batch.prompts[prompt]) + sum(lengths[completion] for completion in completions)
        if tokens <= max(1.0, fair):
            units.append((tokens, completions))
        else:
            units += [(len(batch.prompts[prompt]) + lengths[completion], [completion]) for completion in completions]
    loads = [0] * count
    shares: list[list[int]] = [[] for _ in range(count)]
    for tokens, completions in sorted(units, key=lambda unit: (-unit[0], unit[1])):
        lightest = loads.index(min(loads))
        loads[lightest] += tokens
        shares[lightest] += completions
    return [torch.tensor(sorted(share), dtype=torch.int64, device=batch.lengths_N.device) for share in shares]


def filler(batch: Packed) -> Packed:
    """A micro-batch of one prompt token and an empty completion: passes go through the model and add 0."""
    empty = take(batch, torch.tensor([0], device=batch.lengths_N.device))
    none = torch.zeros(0, dtype=torch.int64, device=batch.lengths_N.device)
    values = {field.name: getattr(empty, field.name) for field in fields(empty)}
    tokenless = {name: value[:0] for name, value in values.items() if name.endswith("_T") and value is not None}
    return replace(
        empty,
        prompts=(tuple(batch.prompts[0][:1]),),
        **{**tokenless, "sequence_T": none, "lengths_N": torch.zeros_like(empty.lengths_N)},
    )


def _on_cpu(statistics: Statistics) -> Statistics:
    """The same sums on the CPU, those of the sampler included."""
    moved: dict[str, Any] = {}
    for field in fields(statistics):
        value = getattr(statistics, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.cpu()
        elif isinstance(value, SamplerStatistics):
            moved[field.name] = _on_cpu(value)
    return replace(statistics, **moved)
