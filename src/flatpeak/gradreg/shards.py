"""Sums over parameters that may be sharded, replicated or whole, so that every rank computes the same numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flatpeak.errors import UserError

Gradients = Mapping[nn.Parameter, Tensor]


class InnerProducts:
    """Running sums of <a, b>, over all shards: one collective per device mesh, whatever the number of tensors."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._local: dict[Any, Tensor] = {}

    def add(self, index: int, left: Tensor, right: Tensor) -> None:
        """Add one pair of tensors, sharded alike, to sum `index`."""
        where = (left.device_mesh, left.placements) if isinstance(left, DTensor) else None
        here = torch.dot(flat(left), flat(right)).double()
        if where not in self._local:
            self._local[where] = here.new_zeros(self.count)
        self._local[where][index] += here

    def totals(self) -> list[float]:
        """The sums."""
        totals = [0.0] * self.count
        for where, sums in self._local.items():
            whole = sums if where is None else _sum_over_shards(sums, *where)
            totals = [total + value for total, value in zip(totals, whole.tolist(), strict=True)]
        return totals


def inner_products(pairs: Sequence[tuple[Iterable[Tensor], Iterable[Tensor]]]) -> list[float]:
    """<a, b> of each pair of lists of tensors."""
    sums = InnerProducts(len(pairs))
    for index, (lefts, rights) in enumerate(pairs):
        for left, right in zip(lefts, rights, strict=True):
            sums.add(index, left, right)
    return sums.totals()


def flat(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, as a vector of at least float32."""
    here: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    here = here.detach().reshape(-1)
    return here if here.dtype == torch.float64 else here.float()


def check_agreement(norm: float, *, device: torch.device) -> None:
    """Raise where replicas hold different gradients: each would perturb its own way, which is another algorithm."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    bounds = torch.tensor([norm, -norm], dtype=torch.float64, device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    highest, lowest = bounds[0].item(), -bounds[1].item()
    if highest - lowest > 1e-6 * abs(highest):
        raise UserError(
            f"the ranks' gradients differ (norms {lowest:.6g} to {highest:.6g}): regularization needs the averaged "
            "gradient; synchronize it in the last micro-batch (no_sync only before it)"
        )


def reshard(model: nn.Module) -> None:
    """Drop gathered copies of FSDP2's parameters, so that the next forward pass reads the shards again."""
    from torch.distributed.fsdp import FSDPModule  # here: torch without distributed support lacks it

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _sum_over_shards(values: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    kinds = [Partial() if isinstance(place, Shard) else Replicate() for place in placements]
    return DTensor.from_local(values.to(mesh.device_type), mesh, kinds, run_check=False).full_tensor()
