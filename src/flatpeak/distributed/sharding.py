"""FSDP2 over a policy: shares of its weights on every rank, and a whole copy of it while it decodes or is saved.

Each decoder layer is a unit, and the rest of the model (embeddings, norm, output layer) the root. A pass of the policy
enters through the root, which gathers its weights for the pass; layers gather theirs one after the other. The native
engine reads weights by their addresses and outside of any forward pass, so it decodes with the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from flatpeak.distributed.config import DistributedConfig
from flatpeak.distributed.ranks import Ranks
from flatpeak.errors import UserError
from flatpeak.gradreg.shards import full_tensor, reshard
from flatpeak.policy.model import Policy


def shard(policy: Policy, replica: Replica, config: DistributedConfig, ranks: Ranks) -> None:
    """Shard the weights of a policy over the ranks, in place; before an optimizer knows them.

    `replica` is its copy, whose memory is given back.

    UserError where the model has no layers that could be units: a model in one piece would be gathered whole.
    """
    causal = policy.causal
    layers = [module for module in causal.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"distributed.strategy={config.strategy}: {type(causal).__name__} has no decoder layers that transformers "
            "marks, so nothing would be sharded by layer: use distributed.strategy=ddp"
        )
    mesh = make_mesh(config, ranks, device=policy.device)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(causal, mesh=mesh)
    _check_sharded(causal)
    causal.enter = _call
    register_fsdp_forward_method(causal, "enter")
    policy.enter = causal.enter
    policy.gathered = replica.present
    policy.forget_masters()
    replica.free()


def _call(run: Callable[[], Any]) -> Any:
    return run()


def make_mesh(config: DistributedConfig, ranks: Ranks, *, device: torch.device) -> DeviceMesh:
    """The ranks as FSDP2 sees them: in a row, or in rows of `shard_size` that hold the same."""
    if config.shard_size is None:
        return init_device_mesh(device.type, (ranks.size,))
    shape = (ranks.size // config.shard_size, config.shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _check_sharded(causal: nn.Module) -> None:
    whole = [name for name, weight in causal.named_parameters() if not isinstance(weight, DTensor)]
    if whole:
        raise UserError(f"distributed.strategy: {whole[0]} is not sharded; use distributed.strategy=ddp")


class Replica(Policy):
    """A whole copy of a policy that is sharded afterwards: in memory inside `present` alone."""

    def __init__(self, policy: Policy) -> None:
        """Copy the policy, adapters included; `policy` has to be whole yet."""
        with policy.plain_attention() as model:
            duplicate = copy.deepcopy(model)
        duplicate.requires_grad_(False)
        super().__init__(duplicate, policy.tokenizer, kernels=policy.kernels)
        self.batch_invariant = policy.batch_invariant
        self._policy = policy
        self._depth = 0

    @contextmanager
    def present(self) -> Iterator[Replica]:
        """A context with the policy's present weights; may be nested. Every rank has to enter it."""
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
        reshard(self._policy.model)  # the root may still be gathered, and its parameters stand-ins, after a pass
        sources = dict(self._policy.model.named_parameters())
        for name, weight in self.model.named_parameters():
            weight.data = full_tensor(sources[name].detach()).to(weight.dtype)
        for own, source in zip(self.model.buffers(), self._policy.model.buffers(), strict=True):
            own.copy_(source)

    def free(self) -> None:
        """Give the memory of the weights back."""
        for weight in self.model.parameters():
            weight.data = weight.data.new_empty(0)
