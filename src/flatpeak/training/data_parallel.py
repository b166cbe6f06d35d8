"""One update on several ranks: every rank has the whole minibatch, computes the passes of its share, and adds up.

The weights of completions are fixed over the whole minibatch, so the ranks' losses sum to its loss, whatever is whose.
Each rank multiplies its losses by the number of ranks and gradients are averaged, as DistributedDataParallel and
FSDP2 do: an average leaves alone what the ranks have in common already, such as the gradient of an earlier pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.training.batch import micro_batches, take
from flatpeak.training.objective import SamplerStatistics, TokenStatistics
from flatpeak.types import PackedCompletions

Packed = TypeVar("Packed", bound=PackedCompletions)
Statistics = TypeVar("Statistics", TokenStatistics, SamplerStatistics)


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
        if self.ranks.size == 1:
            yield from micro_batches(batch, token_budget, padded=padded)
            return
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
