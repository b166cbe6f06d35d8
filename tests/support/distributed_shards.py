"""8-bit moments of parts of weights beside those of the whole, and letters that ranks rank together; run on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.errors import UserError
from flatpeak.gradreg.shards import full_tensor, reshard
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.master_weights import MasterWeights
from flatpeak.training.optimizer import (
    build_optimizer,
    check_blocks,
    is_offloaded,
    load_optimizer_tensors,
    optimizer_tensors,
    step_in_buckets,
)
from support.distributed_training import Case, distance, make_trainer
from support.host_memory import SimulatedHost

SHAPES = ((128, 64), (16,), (5, 1024), (1, 8192), (128, 72), (3, 16))
"""Weights that are cut evenly, unevenly, not at all, or after rows that are no blocks by themselves; and small ones."""


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Stepped:
    """The weights of SHAPES under an optimizer, sharded over all ranks or whole."""

    def __init__(
        self,
        config: OptimizerConfig,
        *,
        sharded: bool,
        values: Sequence[Tensor] = (),
        host: SimulatedHost | None = None,
        replicas: int = 1,
    ) -> None:
        self.host = host
        mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas)) if sharded else None
        self.place = lambda value: value if mesh is None else distribute_tensor(value, mesh, [Replicate(), Shard(0)])
        weights = [nn.Parameter(self.place(value.clone())) for value in values or drawn(0)]
        self.masters = MasterWeights({weight: weight for weight in weights}, by_rank=True, host=host)
        self.optimizer = build_optimizer(self.masters.stepped, config, self.masters.shards)

    def take(self, steps: range) -> None:
        for step in steps:
            for weight, gradient in zip(self.masters.weights, drawn(step), strict=True):
                weight.grad = self.place(gradient)
            if self.host is not None:
                step_in_buckets(self.optimizer, self.masters, self.host, size=4000)
                continue
            self.masters.take_gradients()
            self.optimizer.step()

    @property
    def weights(self) -> list[Tensor]:
        return [full_tensor(weight.detach()).clone() for weight in self.masters.weights]

    def state(self) -> dict[str, Tensor]:
        return {n: t.clone() for n, t in optimizer_tensors(self.optimizer, self.masters.shards).items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        load_optimizer_tensors(self.optimizer, tensors, host=self.host, shards=self.masters.shards)


def eight_bit_steps(replicas: int = 1) -> dict[str, bool]:
    """What of six steps on shards has the bits of one process: weights, saved states, and what is resumed from them."""
    config = OptimizerConfig(name="adamw_8bit", learning_rate=1e-2)
    whole, shards = Stepped(config, sharded=False), Stepped(config, sharded=True, replicas=replicas)
    for stepped in (whole, shards):
        stepped.take(range(1, 4))
    saved, parts = whole.state(), shards.state()
    resumed = Stepped(config, sharded=True, values=whole.weights, replicas=replicas)  # of what one process has saved
    resumed.load(saved)
    again = resumed.state()
    for stepped in (whole, shards, resumed):
        stepped.take(range(4, 7))
    first = dist.get_rank() == 0  # which alone has what is gathered
    return {
        "quantized": {saved[f"{index}.state1"].dtype for index in (0, 2, 3, 4)} == {torch.uint8},
        "names": parts.keys() == saved.keys() == again.keys(),
        "states": not first or all(torch.equal(parts[name], saved[name]) for name in saved),
        "states again": not first or all(torch.equal(again[name], saved[name]) for name in saved),
        "weights": all(map(torch.equal, shards.weights, whole.weights)),
        "resumed weights": all(map(torch.equal, resumed.weights, whole.weights)),
    }


def offloaded_steps() -> dict[str, bool]:
    """What of steps with states on a host has the bits of steps without, saved and resumed in between."""
    config = OptimizerConfig(learning_rate=1e-2)
    plain = Stepped(config, sharded=False)
    plain.take(range(1, 5))
    begun = Stepped(config, sharded=True, host=SimulatedHost(torch.device("cpu")))
    begun.take(range(1, 3))
    saved = [begun.state()]
    dist.broadcast_object_list(saved, src=0)  # which alone has what is gathered
    resumed = Stepped(config, sharded=True, values=begun.weights, host=SimulatedHost(torch.device("cpu")))
    resumed.load(saved[0])
    resumed.take(range(3, 5))
    large = [value for state in resumed.optimizer.state.values() for value in state.values() if is_offloaded(value)]
    return {
        "weights": all(map(torch.equal, resumed.weights, plain.weights)),
        "large": len(large) >= 4,
        "on the host": resumed.host is not None and all(resumed.host.holds(value) for value in large),
    }


def crossed(case: Case, begin: str, end: str) -> dict[str, Any]:
    """Three steps under one layout, and two more under another from what those have saved."""
    together = Ranks(rank=dist.get_rank(), size=dist.get_world_size())
    layouts = {"alone": (case, ALONE), "fsdp2": (replace(case, strategy="fsdp2"), together)}
    layouts["ddp"] = (replace(case, strategy="ddp"), together)
    first, straight, second = (make_trainer(*layouts[name]) for name in (begin, "alone", end))
    start = {name: weight.detach().clone() for name, weight in straight.learner.policy.model.named_parameters()}
    for trainer, steps in ((first, (1, 2, 3)), (straight, (1, 2, 3, 4, 5))):
        for step in steps:
            trainer.train_step(step)
    kept = [(first.learner.state(), first.learner.tensors())]
    dist.broadcast_object_list(kept, src=0)  # which alone has what is gathered
    state, tensors = kept[0]
    second.learner.load(state, tensors)
    again = {name: tensor.clone() for name, tensor in second.learner.tensors().items()}
    for step in (4, 5):
        second.train_step(step)
    reshard(second.learner.policy.model)
    weights = {n: full_tensor(w.detach()) for n, w in second.learner.policy.model.named_parameters()}
    wanted = {n: w.detach() for n, w in straight.learner.policy.model.named_parameters()}
    return {
        "same": dist.get_rank() > 0 or all(torch.equal(again[name], tensors[name]) for name in tensors),
        "masters": sum(name.startswith("master.") for name in tensors),
        "apart": distance(weights, wanted, start) / distance(wanted, start, start),
    }


def refusals() -> list[str]:
    """The messages about 8-bit moments of weights that are cut within a block, by shape; empty where there is none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    messages = []
    for shape in ((130, 33), (3, 24), (1, 5000)):
        weight = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]))
        try:
            check_blocks({"layer.weight": weight}, OptimizerConfig(name="adamw_8bit"), where="optimizer")
            messages.append("")
        except UserError as error:
            messages.append(str(error))
    return messages
