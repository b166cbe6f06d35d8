"""The float32 masters of weights in a lower precision, which the optimizer steps in their stead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flatpeak.errors import UserError
from flatpeak.gradreg.shards import distribute_like, gathered
from flatpeak.training.local_shards import local_part, local_shards
from flatpeak.utils.host_memory import HostMemory

PREFIX = "master."
"""Prefix of the masters' names in a checkpoint."""


class MasterWeights:
    """Steps a master in a weight's stead and writes it, rounded, back into the weight.

    Half a bfloat16 step is 1/512 of a weight, far more than most updates: added to the weight itself they would round
    away. Gradients are summed over micro-batches in the master's type too, in `.grad` itself: autograd converts each
    micro-batch's as it adds it, so that a rounded copy of all of them never exists beside the sum.

    Nothing here touches a weight that is its own master, but to round it once to `compute_dtype`.
    """

    def __init__(
        self,
        masters: Mapping[nn.Parameter, Tensor],
        *,
        host: HostMemory | None = None,
        compute_dtype: torch.dtype | None = None,
        by_rank: bool = False,
    ) -> None:
        """Copy the weights as they are: the stage before, or a checkpoint's model, has left nothing else.

        With `host` the masters lie there, and on the device only in `on_device`. `compute_dtype`: the type in which
        passes read, and checkpoints save, weights that are their own masters, as those of a sharded model. `by_rank`:
        the optimizer steps this rank's part of a sharded weight as a tensor of its own.
        """
        self.weights = list(masters)
        """The weights, which the gradients of a loss are accumulated in."""
        self.shards = local_shards(masters) if by_rank else {}
        """The sharded weights of which the optimizer steps this rank's part, by position."""
        parts = {index: shard.view for index, shard in self.shards.items()}
        self.stepped = [parts.get(index, master) for index, master in enumerate(masters.values())]
        """The tensors that the optimizer steps, in the same order."""
        self.precise = list(masters.values())
        """The values that steps add up in, whole where a rank steps its part of them."""
        self.pairs = {index: (w, m) for index, (w, m) in enumerate(masters.items()) if m is not w}
        self.kept = {
            str(index): m for index, (w, m) in enumerate(masters.items()) if m is not w or compute_dtype is not None
        }
        """The masters that a checkpoint keeps beside the model, by the position of their weight."""
        self.host = host
        if compute_dtype is not None:
            with torch.no_grad():
                for weight in self.weights:
                    weight.copy_(weight.to(compute_dtype))
        for weight, master in self.pairs.values():
            weight.grad = None
            weight.grad_dtype = master.dtype
            if host is not None:
                master.data = host.store(weight.detach().to(master.dtype))
                continue
            master.data = master.data.to(weight.device)  # an earlier stage may have offloaded its masters
            master.copy_(weight.detach())
        if host is not None:
            host.wait()

    def zero_grad(self) -> None:
        """Clear the weights' gradients; the optimizer clears the masters'."""
        for weight in self.weights:
            weight.grad = None

    def take_gradients(self, positions: Sequence[int] | None = None) -> None:
        """Move each weight's gradient, or those at these positions, to its master, which is stepped."""
        for weight, master in self._pairs(positions):
            master.grad, weight.grad = weight.grad, None
        for index in self.shards if positions is None else self.shards.keys() & set(positions):
            weight = self.weights[index]
            if weight.grad is not None:
                self.stepped[index].grad, weight.grad = local_part(weight.grad), None

    @torch.no_grad()
    def write(self, positions: Sequence[int] | None = None) -> None:
        """Round the masters into the weights, in place: captured graphs and packed copies know their addresses."""
        for weight, master in self._pairs(positions):
            weight.copy_(master)

    @contextmanager
    def on_device(self, positions: Sequence[int]) -> Iterator[None]:
        """A context with the offloaded masters at these positions on the device; they leave it without gradients."""
        assert self.host is not None
        hosts = [(master, master.data) for _, master in self._pairs(positions)]
        for master, held in hosts:
            master.data = self.host.fetch(held)
        yield
        for master, held in hosts:
            master.grad = None
            master.data = self.host.store(master.data, into=held)

    def _pairs(self, positions: Sequence[int] | None) -> list[tuple[nn.Parameter, Tensor]]:
        if positions is None:
            return list(self.pairs.values())
        return [self.pairs[index] for index in positions if index in self.pairs]

    def tensors(self) -> dict[str, Tensor]:
        """The masters for a checkpoint, by the position of their weight."""
        return {name: gathered(master) for name, master in self.kept.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from saved masters, and round them into the weights."""
        if self.kept.keys() != tensors.keys():
            raise UserError(
                f"the checkpoint holds float32 masters of {len(tensors)} weights and this model needs those of "
                f"{len(self.kept)}: resume with the model and the model.dtype that the run began with"
            )
        for name, master in self.kept.items():
            master.copy_(distribute_like(tensors[name], master))
        self.write()
