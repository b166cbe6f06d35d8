"""Sums, checks and layouts of sharded or replicated parameters; every rank computes the same numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from flatpeak.errors import UserError

Gradients = Mapping[nn.Parameter, Tensor]

CHUNK = 2**20
"""Numbers per float32 dot product; the products are summed in float64."""
NOT_FINITE = -1.0
"""Replaces a norm that is not finite when ranks compare norms: no gradient has this norm."""
BELOW_COSINES = -2.0
"""Replaces a NaN cosine when ranks compare cosines."""


class DotAccumulator:
    """Accumulated dot products <a, b> over all shards: one collective per device mesh for any number of tensors.

    Products are summed over about CHUNK numbers at a time. Longer float32 sums lose digits (7e-4 over 2e7 numbers), and
    one operation for each small tensor would cost as much as a small model's backward pass.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._waiting: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        self._lengths: dict[Any, int] = {}
        self._sums: dict[Any, list[Tensor]] = {}

    def add(self, index: int, left: Tensor, right: Tensor) -> None:
        """Add a pair of tensors with the same sharding to sum `index`."""
        where = (left.device_mesh, left.placements) if isinstance(left, DTensor) else left.device
        key, pair = (where, index), (local_vector(left), local_vector(right))
        self._waiting.setdefault(key, []).append(pair)
        self._lengths[key] = self._lengths.get(key, 0) + pair[0].numel()
        if self._lengths[key] >= CHUNK:
            self._flush(key)

    def totals(self) -> list[float]:
        """The sums, the same on every rank."""
        for key in list(self._waiting):
            self._flush(key)
        totals = [0.0] * self.count
        for where in dict.fromkeys(where for where, _ in self._sums):
            sums = self._at(where)
            reduced = _sum_over_shards(sums, *where) if isinstance(where, tuple) else sums
            totals = [total + value for total, value in zip(totals, reduced.tolist(), strict=True)]
        return totals

    def _at(self, where: Any) -> Tensor:
        """This rank's sums for one device or mesh, float64 [count]."""
        sums = {index: torch.stack(dots).sum() for (at, index), dots in self._sums.items() if at == where}
        zero = torch.zeros_like(next(iter(sums.values())))
        return torch.stack([sums.get(index, zero) for index in range(self.count)])

    def _flush(self, key: tuple[Any, int]) -> None:
        pairs = self._waiting.pop(key)
        del self._lengths[key]
        left, right = (torch.cat(side) if len(side) > 1 else side[0] for side in zip(*pairs, strict=True))
        chunks = zip(left.split(CHUNK), right.split(CHUNK), strict=True)
        self._sums.setdefault(key, []).extend(torch.dot(a, b).double() for a, b in chunks)


def pairwise_dots(pairs: Sequence[tuple[Iterable[Tensor], Iterable[Tensor]]]) -> list[float]:
    """The dot product <a, b> of each pair of tensor lists."""
    sums = DotAccumulator(len(pairs))
    for index, (lefts, rights) in enumerate(pairs):
        for left, right in zip(lefts, rights, strict=True):
            sums.add(index, left, right)
    return sums.totals()


def local_vector(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, as a vector in at least float32."""
    here: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if here.layout is torch.sparse_coo:  # an embedding outside the perturbed set: the norm is that of its values
        here = here.coalesce().values()
    here = here.detach().reshape(-1)
    return here if here.dtype in (torch.float32, torch.float64) else here.float()


def check_replicas_agree(norm: float, *, device: torch.device, informative: bool = True) -> bool:
    """Raise UserError if replicas hold different gradients: each would perturb in another direction.

    Returns whether the update is informative on any rank. Every rank must call it, whatever its gradient: a rank that
    skips its update would leave the other ranks waiting.
    """
    if not _several_ranks():
        return informative
    known = norm if math.isfinite(norm) else NOT_FINITE
    bounds = torch.tensor([known, -known, float(informative)], dtype=torch.float64, device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    highest, lowest, any_informative = bounds[0].item(), -bounds[1].item(), bool(bounds[2].item())
    if highest - lowest > 1e-6 * abs(highest):
        least = "not finite" if lowest == NOT_FINITE else f"{lowest:.6g}"
        raise UserError(
            f"the ranks' gradients differ (norms {least} to {highest:.6g}): regularization needs the averaged "
            "gradient; synchronize it in the last micro-batch (use no_sync only before it)"
        )
    return any_informative


def lowest_over_ranks(cosine: float, *, device: torch.device) -> float:
    """The lowest cosine on any rank, NaN if any rank has NaN, so that all decide alike; every rank must call it."""
    if not _several_ranks():
        return cosine
    held = torch.tensor(cosine if math.isfinite(cosine) else BELOW_COSINES, dtype=torch.float64, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MIN)
    lowest = held.item()
    return math.nan if lowest == BELOW_COSINES else lowest


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def reshard(model: nn.Module) -> None:
    """Drop FSDP2's gathered parameters, so that the next forward pass reads the shards again."""
    from torch.distributed.fsdp import FSDPModule  # imported here because torch without distributed support lacks it

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reset_fsdp_state(model: nn.Module) -> None:
    """Reset FSDP2's modules after an interrupted pass, which may leave gathered weights in place of shards."""
    from torch.distributed.fsdp import FSDPModule

    inner: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule) and module not in inner:
            inner.update(module.modules())
            if hasattr(module, "reset_iter_state"):  # missing in some torch versions that we support
                module.reset_iter_state()


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor of a shard; every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """A tensor for a checkpoint: a sharded tensor is gathered into the host memory of the first rank.

    Every rank must call it; only the first gets the tensor.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    whole = full_tensor(tensor)
    return whole.detach().cpu() if dist.get_rank() == 0 else torch.empty(0)


def distribute_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Copy a whole tensor into the sharding and placement of `parameter`."""
    copied = tensor.to(device=parameter.device, copy=True)
    if not isinstance(parameter, DTensor):
        return copied
    return distribute_tensor(copied, parameter.device_mesh, parameter.placements, src_data_rank=None)


def noise_like(parameter: Tensor) -> Tensor:
    """Gaussian noise of a parameter's shape; each rank draws its own shard without communication."""
    noise = torch.empty_like(parameter.detach())
    (noise.to_local() if isinstance(noise, DTensor) else noise).normal_()
    return noise


def collective_device(tensor: Tensor) -> torch.device:
    """The device of collectives over a tensor: that of its mesh, even if its shards are offloaded to the CPU."""
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


def _sum_over_shards(values: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    # Ask the placement: the strided shards of FSDP2 over tensor parallelism are not `Shard`s.
    kinds = [Replicate() if place.is_replicate() else Partial() for place in placements]
    return DTensor.from_local(values.to(mesh.device_type), mesh, kinds, run_check=False).full_tensor()
