"""Optimizers that know nothing of sharded weights: each rank steps its own part, and checkpoints hold whole states.

bitsandbytes' 8-bit AdamW is one, and so is every optimizer whose states `optimizer.offload` moves. 8-bit moments have a
scale per block of 256 elements, counted from the beginning of a weight. Where every rank's part begins with a block,
the parts' states put together are those of one process, and any number of ranks goes on from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatpeak.errors import UserError
from flatpeak.gradreg.shards import distribute_like, gathered
from flatpeak.training.config import OptimizerConfig

BLOCK = 256
"""Elements of a weight whose 8-bit moments share a scale."""
SMALLEST_QUANTIZED = 4096
"""Elements below which a weight's moments stay in float32."""
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


def check_blocks(weights: Mapping[str, nn.Parameter], config: OptimizerConfig, *, where: str) -> None:
    """UserError for 8-bit moments of a weight that is cut within a block: they would depend on the number of parts."""
    if config.name != "adamw_8bit":
        return
    for name, weight in weights.items():
        if not (isinstance(weight, DTensor) and weight.requires_grad and weight.numel() >= SMALLEST_QUANTIZED):
            continue
        if not LocalShard(weight).begins_blocks:
            raise UserError(
                f"{where}.name=adamw_8bit: {name} of {' x '.join(map(str, weight.shape))} is cut within a block of "
                f"{BLOCK} elements with one scale: shard over another number of processes, or use {where}.name=adamw"
            )


def adamw_8bit(
    parameters: Sequence[Tensor], config: OptimizerConfig, shards: Mapping[int, LocalShard]
) -> torch.optim.Optimizer:
    """AdamW with blockwise quantized moments (Dettmers et al. 2022, arXiv 2110.02861); tensors of fewer than 4,096
    elements keep theirs in float32. `shards` are those of the parameters that are parts, by position."""
    try:
        from bitsandbytes.optim import AdamW8bit  # here, because bitsandbytes is an extra
    except ImportError as error:
        raise UserError("optimizer.name=adamw_8bit needs bitsandbytes: pip install bitsandbytes") from error

    class ShardAdamW8bit(AdamW8bit):
        """It quantizes a part if the whole weight is large, and skips a rank's empty part."""

        def get_config(self, gindex: int, pindex: int, group: Any) -> dict[str, Any]:
            settings: dict[str, Any] = super().get_config(gindex, pindex, group)
            quantized = shards[pindex].weight.numel() >= SMALLEST_QUANTIZED if pindex in shards else None
            return settings if quantized is None else settings | {"min_8bit_size": 0 if quantized else math.inf}

        def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            if p.numel():
                super().update_step(group, p, gindex, pindex)
            else:
                self.state[p]["step"] += 1

    kind = ShardAdamW8bit if shards else AdamW8bit
    optimizer: torch.optim.Optimizer = kind(
        parameters, lr=config.learning_rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    return optimizer


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded, in its own memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shards(weights: Iterable[nn.Parameter]) -> dict[int, LocalShard]:
    """This rank's parts of those weights that are sharded, by position."""
    return {index: LocalShard(weight) for index, weight in enumerate(weights) if isinstance(weight, DTensor)}
