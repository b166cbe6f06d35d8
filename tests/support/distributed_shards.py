"""8-bit moments of parts of weights beside those of the whole, and letters that ranks rank together; run on a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flatpeak.gradreg.shards import full_tensor
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.master_weights import MasterWeights
from flatpeak.training.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors

SHAPES = ((128, 64), (16,), (5, 1024), (1, 8192), (96, 48), (3, 16))
"""Weights that are cut evenly, in float32, unevenly, not at all, and after 48 rows of 48, which is 9 blocks; and small
ones."""


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Stepped:
    """The weights of SHAPES under an optimizer, sharded over all ranks or whole."""

    def __init__(self, config: OptimizerConfig, *, sharded: bool, values: Sequence[Tensor] = ()) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
        self.place = lambda value: value if mesh is None else distribute_tensor(value, mesh, [Shard(0)])
        weights = [nn.Parameter(self.place(value.clone())) for value in values or drawn(0)]
        self.masters = MasterWeights({weight: weight for weight in weights}, by_rank=True)
        self.optimizer = build_optimizer(self.masters.stepped, config, self.masters.shards)

    def take(self, steps: range) -> None:
        for step in steps:
            for weight, gradient in zip(self.masters.weights, drawn(step), strict=True):
                weight.grad = self.place(gradient)
            self.masters.take_gradients()
            self.optimizer.step()

    @property
    def weights(self) -> list[Tensor]:
        return [full_tensor(weight.detach()).clone() for weight in self.masters.weights]

    def state(self) -> dict[str, Tensor]:
        return {n: t.clone() for n, t in optimizer_tensors(self.optimizer, self.masters.shards).items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        load_optimizer_tensors(self.optimizer, tensors, shards=self.masters.shards)


def eight_bit_steps() -> dict[str, bool]:
    """What of six steps on shards has the bits of one process: weights, saved states, and what is resumed from them."""
    config = OptimizerConfig(name="adamw_8bit", learning_rate=1e-2)
    whole, shards = Stepped(config, sharded=False), Stepped(config, sharded=True)
    for stepped in (whole, shards):
        stepped.take(range(1, 4))
    saved, parts = whole.state(), shards.state()
    resumed = Stepped(config, sharded=True, values=whole.weights)  # of what one process has saved
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
