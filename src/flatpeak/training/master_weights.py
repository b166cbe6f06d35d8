"""The tensors that the optimizer steps in place of a weight: float32 masters, a rank's shard; and their bytes.

bitsandbytes' 8-bit AdamW knows nothing of sharded weights, and neither does an optimizer whose states
`optimizer.offload` moves: each rank steps its own part, and checkpoints hold whole states. 8-bit moments have a scale
per block of 256 elements, counted from the beginning of a weight. Where every rank's part begins with a block, the
parts' states put together are those of one process, and any number of ranks goes on from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatpeak.errors import UserError
from flatpeak.gradreg.shards import distribute_like, gathered
from flatpeak.policy.config import ReferenceConfig
from flatpeak.training.config import OptimizerConfig
from flatpeak.utils.adapter_base import is_of_adapter
from flatpeak.utils.host_memory import HostMemory

PREFIX = "master."
"""Prefix of the masters' names in a checkpoint."""
BLOCK = 256
"""Elements of a weight whose 8-bit moments share a scale."""
SMALLEST_QUANTIZED = 4096
"""The fewest elements of a tensor whose moments bitsandbytes keeps in 8 bits."""
FLOAT32 = 4
"""Bytes of a number in float32."""
PER_BLOCK = ("absmax1", "absmax2")
COMMON = ("step", "qmap1", "qmap2")
"""Entries of an optimizer's state that do not depend on the part of a weight; all others have its shape."""


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of a weight, as an optimizer steps it."""

    weight: DTensor

    @property
    def view(self) -> Tensor:
        """The part, in the weight's own memory."""
        return local_part(self.weight.detach())

    @property
    def blocks(self) -> int:
        """Blocks of a part that is not cut short by the weight's end."""
        return math.ceil(self._rows * self.weight[:1].numel() / BLOCK)

    @property
    def begins_blocks(self) -> bool:
        """Whether the parts of all ranks begin with a block."""
        return self._rows >= len(self.weight) or not self._rows * self.weight[:1].numel() % BLOCK

    def whole(self, name: str, value: Any) -> Tensor:
        """A state of the whole weight, of those of all parts; see `gathered`. Every rank has to call it."""
        own = torch.as_tensor(value)
        if name in COMMON:
            return own
        own = own.to(self.weight.device)
        if name not in PER_BLOCK:
            return gathered(self._joined(own, shape=self.weight.shape, stride=self.weight.stride()))
        padded = torch.cat([own, own.new_zeros(self.blocks - len(own))])
        return gathered(self._joined(padded))[: math.ceil(self.weight.numel() / BLOCK)]

    def local(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a whole weight's state."""
        if name in COMMON:
            return value.clone()
        if name not in PER_BLOCK:
            return local_part(distribute_like(value, self.weight))
        first = self._rank * self.blocks
        return value[first : first + math.ceil(self.view.numel() / BLOCK)].clone()

    def _joined(self, own: Tensor, **size: Any) -> DTensor:
        return DTensor.from_local(own, self.weight.device_mesh, self.weight.placements, run_check=False, **size)

    @property
    def _dimension(self) -> int:
        """The dimension of the mesh over which weights are cut."""
        return next(index for index, place in enumerate(self.weight.placements) if place.is_shard())

    @property
    def _rank(self) -> int:
        coordinate = self.weight.device_mesh.get_coordinate()
        assert coordinate is not None
        return int(coordinate[self._dimension])

    @property
    def _rows(self) -> int:
        """Rows of every part but the last ones, which may be shorter or empty."""
        return math.ceil(len(self.weight) / self.weight.device_mesh.size(self._dimension))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded, in its own memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
        sharded = {index: weight for index, weight in enumerate(masters) if by_rank and isinstance(weight, DTensor)}
        self.shards = {index: LocalShard(weight) for index, weight in sharded.items()}
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


@dataclass(frozen=True, kw_only=True)
class TrainedWeight:
    """A parameter that the optimizer steps."""

    elements: int
    stored: int
    """Bytes as stored in the model."""

    @property
    def gradient(self) -> int:
        """Bytes of its gradient: always float32, as the optimizer uses it."""
        return FLOAT32 * self.elements

    @property
    def master(self) -> int:
        """Bytes of its float32 copy; 0 if it is float32 itself."""
        return FLOAT32 * self.elements if self.stored < FLOAT32 * self.elements else 0

    def moments(self, optimizer: OptimizerConfig) -> int:
        """Bytes of its moments."""
        if optimizer.name == "sgd":
            return 0
        if optimizer.name == "adamw" or self.elements < SMALLEST_QUANTIZED:
            return 2 * FLOAT32 * self.elements
        return 2 * self.elements + 2 * FLOAT32 * -(-self.elements // BLOCK)


@dataclass(frozen=True, kw_only=True)
class CheckpointSize:
    """Bytes of a checkpoint."""

    model: int
    """The weights as saved: under adapters these alone."""
    optimizer: int
    """Masters and moments."""
    reference: int = 0
    """A reference that moves."""

    @classmethod
    def of(
        cls, model: nn.Module, optimizer: OptimizerConfig, *, reference: ReferenceConfig | None = None
    ) -> CheckpointSize:
        """The size of the checkpoints of a model that this optimizer trains, with this rule of the reference."""
        weights = dict(model.named_parameters())
        adapters = sum(weight.nbytes for name, weight in weights.items() if is_of_adapter(name))
        return cls(
            model=adapters or sum(weight.nbytes for weight in weights.values()),
            optimizer=sum(one.master + one.moments(optimizer) for one in trained_weights(model)),
            reference=0 if reference is None else moved_reference_bytes(trained_weights(model), reference),
        )

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return self.model + self.optimizer + self.reference


def moved_reference_bytes(trained: Iterable[TrainedWeight], reference: ReferenceConfig) -> int:
    """Bytes of the reference in a checkpoint: none while it stays the initial one, float32 for an average."""
    if not reference.moves:
        return 0
    return sum(one.stored if reference.ema is None else FLOAT32 * one.elements for one in trained)


def trained_weights(model: nn.Module) -> tuple[TrainedWeight, ...]:
    """The weights that an optimizer steps, each tied one once."""
    trained = (weight for weight in model.parameters() if weight.requires_grad)
    return tuple(TrainedWeight(elements=weight.numel(), stored=weight.nbytes) for weight in trained)
