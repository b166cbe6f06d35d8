"""FSDP2 for a policy: each rank holds a share of the weights, and a whole copy while it decodes or saves.

Each decoder layer is a unit; the rest of the model (embeddings, norm, output layer) is the root. A pass of the policy
enters through the root, which gathers its weights for the whole pass; layers gather their weights one after the other.
The native engine reads weights by address, outside forward passes, so it decodes with the copy.

Trainable bfloat16 weights become float32 shards and serve as their own masters: FSDP2 rounds them when it gathers them,
and sums gradients over the ranks in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from operator import call

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from flatpeak.distributed.config import DistributedConfig
from flatpeak.distributed.ranks import Ranks
from flatpeak.errors import UserError
from flatpeak.gradreg.shards import full_tensor, reshard
from flatpeak.policy.model import Policy


def shard(policy: Policy, replica: Replica, config: DistributedConfig, ranks: Ranks) -> None:
    """Shard a policy's weights over the ranks, in place and layer by layer, before an optimizer refers to them.

    `replica` is the policy's copy, which is empty from now on outside of `present`.

    UserError if the model has no layers to use as units: it would be gathered as a whole.
    """
    causal = policy.causal
    layers = [module for module in causal.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"distributed.strategy={config.strategy}: transformers marks no decoder layers in {type(causal).__name__}, "
            "so it cannot be sharded by layer: use distributed.strategy=ddp"
        )
    compute_dtype = rounded_dtype(policy)
    replica.free()  # it may share the policy's memory, which sharding frees
    policy.forget_weights()
    mesh = make_mesh(config, ranks, device=policy.device)
    for unit in (*layers, causal):
        if compute_dtype is None:
            fully_shard(unit, mesh=mesh)
        else:
            _shard_as_masters(unit, mesh, compute_dtype)
    _check_sharded(causal)
    causal.enter = call
    register_fsdp_forward_method(causal, "enter")
    policy.attach_sharding(causal.enter, replica.present, compute_dtype)


def rounded_dtype(policy: Policy) -> torch.dtype | None:
    """The type of trainable weights below float32; None if they are float32, as adapters are.

    UserError if a model trained below float32 has weights of several types: FSDP2 rounds a unit to one type.
    """
    dtypes = {weight.dtype for weight in policy.parameters()}
    if all(torch.promote_types(dtype, torch.float32) == dtype for dtype in dtypes):
        return None
    (lowest, *others) = dtypes | {weight.dtype for weight in policy.model.parameters()}
    if others:
        raise UserError(
            f"the model has {', '.join(sorted(str(one)[6:] for one in (lowest, *others)))} weights, which "
            "distributed.strategy shards only if trainable ones are float32: set model.dtype=float32 or strategy=ddp"
        )
    return lowest


def _shard_as_masters(unit: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shard float32 copies of a unit's trainable weights; gathering rounds them to `compute_dtype`."""
    for weight in unit.parameters():
        if weight.requires_grad and not isinstance(weight, DTensor):
            weight.data = weight.data.to(torch.float32)
    # Inputs keep their type, as in a single process, which does not round rotary tables.
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(unit, mesh=mesh, mp_policy=precision)


def make_mesh(config: DistributedConfig, ranks: Ranks, *, device: torch.device) -> DeviceMesh:
    """The mesh of ranks for FSDP2: one row, or rows of `shard_size` ranks that each hold the whole model."""
    if config.shard_size is None:
        return init_device_mesh(device.type, (ranks.size,))
    shape = (ranks.size // config.shard_size, config.shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _check_sharded(causal: nn.Module) -> None:
    whole = [name for name, weight in causal.named_parameters() if not isinstance(weight, DTensor)]
    if whole:
        raise UserError(f"distributed.strategy: {whole[0]} is not sharded; use distributed.strategy=ddp")


class Replica(Policy):
    """A whole copy of a policy that is sharded; its memory exists only inside `present`."""

    def __init__(self, policy: Policy) -> None:
        """Copy the policy, including adapters; `policy` must not be sharded yet, and shares its weights until it is."""
        shared = {
            id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in policy.model.parameters()
        }
        with policy.plain_attention() as model:
            duplicate = copy.deepcopy(model, memo=shared)
        super().__init__(duplicate, policy.tokenizer, kernels=policy.kernels)
        self.batch_invariant = policy.batch_invariant
        self._policy = policy
        self._depth = 0

    @contextmanager
    def present(self) -> Iterator[Replica]:
        """A context with the policy's current weights; may be nested. All ranks must enter it."""
        if self._depth == 0:
            self.gather()
        self._depth += 1
        try:
            yield self
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.free()

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the weights from all ranks, one by one."""
        reshard(self._policy.model)  # after a pass the root may still be gathered, with placeholder parameters
        sources = dict(self._policy.model.named_parameters())
        for name, weight in self.model.named_parameters():
            weight.data = full_tensor(sources[name].detach().to(weight.dtype))  # round before communication
        for own, source in zip(self.model.buffers(), self._policy.model.buffers(), strict=True):
            own.copy_(source)

    def free(self) -> None:
        """Free the memory of the weights and of their packed copy, because later weights have the same version
        numbers."""
        self.kernels.release()
        for weight in self.model.parameters():
            weight.data = weight.data.new_empty(0)
