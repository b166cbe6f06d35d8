"""The inventory of a planned model: its parameters, and the bytes that they keep in memory on each rank.

ddp           everything, and a bucket of gradients as they are averaged
fsdp2, hsdp   1 / shards of weights, gradients, moments and copies of them; the root and two layers gathered; a whole
              copy of the weights while it samples. Trained weights below float32 are float32 shards, their own masters
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from flatpeak.apps.planning.planned_model import PlannedModel, causal_of
from flatpeak.distributed.config import DistributedConfig
from flatpeak.distributed.ranks import BUCKET
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.master_weights import FLOAT32, SMALLEST_QUANTIZED, TrainedWeight, trained_weights
from flatpeak.training.optimizer import BUCKET_SIZE
from flatpeak.utils.adapter_base import is_of_adapter
from flatpeak.utils.buckets import in_buckets

NF4_BLOCK, NF4_SUPERBLOCK = 64, 256
"""Weights per scale, and scales per second-level scale (Dettmers et al. 2023, arXiv 2305.14314, section 3)."""
NF4_TABLES: Final = 4 * (16 + 256 + 1)
"""Bytes of a layer's tables of 4-bit and 8-bit codes, and of the mean of its scales."""
SHARDED: Final = frozenset({"weights", "adapters", "masters", "optimizer", "gradients", "regularization"})
"""The items of which a rank of fsdp2 and hsdp has a share; it has the reference and token-dependent items whole."""
COPY: Final = "whole copy"
PREFETCHED: Final = 2
"""Layers gathered at once: the layer that computes, and the next."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Bytes and numbers of parameters of a model, each tied weight once."""

    parameters: int
    """Parameters of the model without adapters."""
    weights: int
    """Bytes of the model's own weights that are not quantized."""
    quantized: int
    """Bytes of the weights in 4 bits, with their scales."""
    scales: int = 0
    """Bytes of these scales, with their tables."""
    adapters: int
    """Bytes of adapters, and of modules that are trained whole with them."""
    files: int
    """Bytes of the files from which the weights are read; 0 if they are created."""
    trained: tuple[TrainedWeight, ...]

    @property
    def stored(self) -> int:
        """Bytes of all weights."""
        return self.weights + self.quantized + self.adapters

    @property
    def trained_parameters(self) -> int:
        """Elements of the trained weights."""
        return sum(one.elements for one in self.trained)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained weights as they are stored."""
        return sum(one.stored for one in self.trained)

    @property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return sum(one.gradient for one in self.trained)

    @property
    def masters(self) -> int:
        """Bytes of the float32 copies of trained weights in a lower precision."""
        return sum(one.master for one in self.trained)

    def moments(self, optimizer: OptimizerConfig) -> int:
        """Bytes of the optimizer's moments."""
        return sum(one.moments(optimizer) for one in self.trained)

    def bucket(self, optimizer: OptimizerConfig) -> int:
        """Bytes of masters and moments that `optimizer.offload` has on the device at once: its largest bucket."""
        buckets = in_buckets(self.trained, lambda one: one.elements, most=BUCKET_SIZE)
        return max((sum(one.master + one.moments(optimizer) for one in bucket) for bucket in buckets), default=0)

    def pinned(self, optimizer: OptimizerConfig) -> int:
        """Bytes of host memory for offloaded masters and moments: torch rounds each pinned tensor to a power of 2."""
        return sum(_power_of_two(one.master) + 2 * _power_of_two(one.moments(optimizer) // 2) for one in self.trained)

    def step_scratch(self, optimizer: OptimizerConfig, *, on_cpu: bool) -> int:
        """Bytes that a step of the optimizer needs in addition to moments and gradients.

        On a CPU, bitsandbytes expands both moments of a tensor to float32, scales a copy of the gradient, and makes the
        denominator from two more copies.
        """
        if optimizer.name != "adamw_8bit" or not on_cpu:
            return 0
        return 5 * max((one.gradient for one in self.trained if one.elements >= SMALLEST_QUANTIZED), default=0)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def nf4_bytes(elements: int) -> int:
    """Bytes of a weight matrix in NF4 with double quantization: 4.127 bits per weight of a large matrix.

    Half a byte per weight, a byte per block of 64, four bytes per 256 blocks, and tables.
    """
    blocks = -(-elements // NF4_BLOCK)
    return -(-elements // 2) + blocks + FLOAT32 * -(-blocks // NF4_SUPERBLOCK) + NF4_TABLES


def take_inventory(model: PlannedModel) -> Inventory:
    """Count the parameters of a model, and the bytes that they take."""
    parameters = dict(model.modules.named_parameters())
    quantized = {id(layer.weight) for layer in quantized_layers(model)}
    own = [p for name, p in parameters.items() if not is_of_adapter(name)]
    return Inventory(
        parameters=sum(p.numel() for p in own),
        weights=sum(p.nbytes for p in own if id(p) not in quantized),
        quantized=sum(nf4_bytes(p.numel()) for p in own if id(p) in quantized),
        scales=sum(nf4_bytes(p.numel()) - -(-p.numel() // 2) for p in own if id(p) in quantized),
        adapters=sum(p.nbytes for name, p in parameters.items() if is_of_adapter(name)),
        files=_file_bytes(model, elements=sum(p.numel() for p in own)),
        trained=trained_weights(model.modules),
    )


def quantized_layers(model: PlannedModel, modules: Any = None) -> Iterator[Any]:
    """The linear layers that transformers quantizes: all except the output layer."""
    if model.config.quantization is None:
        return
    causal = causal_of(model.modules if modules is None else modules)
    head = set(causal.get_output_embeddings().modules())
    for name, module in causal.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module not in head and not is_of_adapter(f"{name}."):
            yield module


def _file_bytes(model: PlannedModel, *, elements: int) -> int:
    if model.config.new is not None:
        return 0
    directory = Path(model.config.path or "").expanduser()
    files = list(directory.glob("*.safetensors")) if directory.is_dir() else []
    if files:
        return sum(file.stat().st_size for file in files)
    stored = getattr(model.shape, "dtype", None)
    return elements * (stored if isinstance(stored, torch.dtype) else model.dtype).itemsize


def per_rank(
    phase: str, items: Mapping[str, int], config: DistributedConfig, model: PlannedModel, inventory: Inventory
) -> dict[str, int]:
    """The items of a phase on one rank, in bytes."""
    if config.processes == 1:
        return dict(items)
    if not config.sharded:
        averaged = FLOAT32 * min(BUCKET, inventory.trained_parameters)
        return {**items, "averaged gradients": averaged} if "gradients" in items else dict(items)
    if phase == "loading":  # shards are cut from the whole model, layer by layer
        return dict(items)
    shards = config.shard_size or config.processes
    rounded = sum(one.stored for one in inventory.trained if one.master)
    shared = {**items, "weights": items["weights"] - rounded, "masters": inventory.masters}
    held = {item: -(-size // shards) if item in SHARDED else size for item, size in shared.items()}
    held["4-bit weights"] = -(-(inventory.quantized - inventory.scales) // shards) + inventory.scales
    if phase == "rollout":
        return {**held, COPY: inventory.stored}
    if "activations" in items and phase != "rewards":
        held["gathered layers"] = gathered_bytes(model, gradients="gradients" in items)
    return held


def gathered_bytes(model: PlannedModel, *, gradients: bool) -> int:
    """Bytes of weights outside of the layers and of the layers gathered at once, with one layer's gradient in a
    backward pass."""
    causal = causal_of(model.modules)
    stacks = [child for child in causal.modules() if isinstance(child, nn.ModuleList) and len(child) == model.layers]
    whole: int = sum(weight.nbytes for weight in causal.parameters())
    layers: list[int] = [sum(weight.nbytes for weight in layer.parameters()) for layer in stacks[0]] if stacks else []
    return whole - sum(layers) + (PREFETCHED + gradients) * max(layers, default=0)
