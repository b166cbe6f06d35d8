"""The memory of one of several processes: what a rank holds of each item of a plan, by `distributed.strategy`.

ddp           everything, and a bucket of gradients as they are averaged
fsdp2, hsdp   1 / shards of weights, gradients, moments and copies of them; the root and two layers gathered; a whole
              copy of the weights while it samples. Trained weights below float32 are float32 shards, their own masters
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from torch import nn

from flatpeak.apps.planning.inventory import FLOAT32, Inventory
from flatpeak.apps.planning.planned_model import PlannedModel, causal_of
from flatpeak.apps.planning.workload import Workload
from flatpeak.distributed.config import DistributedConfig
from flatpeak.distributed.ranks import BUCKET

SHARDED: Final = frozenset({"weights", "adapters", "masters", "optimizer", "gradients", "regularization"})
"""The items of which a rank of fsdp2 and hsdp has a share; the reference, and what depends on tokens, it has whole."""
COPY: Final = "whole copy"
PREFETCHED: Final = 2
"""Layers that are gathered at once: the one that computes, and the next."""


def per_rank(
    phase: str, items: Mapping[str, int], config: DistributedConfig, model: PlannedModel, inventory: Inventory
) -> dict[str, int]:
    """The items of a phase as one rank has them; bytes."""
    if config.processes == 1:
        return dict(items)
    if not config.sharded:
        averaged = FLOAT32 * min(BUCKET, inventory.trained_parameters)
        return {**items, "averaged gradients": averaged} if "gradients" in items else dict(items)
    if phase == "loading":  # shards are cut from the whole, layer by layer
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


def share_of_rollouts(work: Workload, processes: int) -> Workload:
    """The work with the prompts that one rank samples and evaluates at most: the longest of them."""

    def share(lengths: tuple[int, ...]) -> tuple[int, ...]:
        return lengths[: -(-len(lengths) // processes)]

    evaluation = replace(work.evaluation, prompt_lengths=share(work.evaluation.prompt_lengths))
    return replace(work, prompt_lengths=share(work.prompt_lengths), evaluation=evaluation)


def gathered_bytes(model: PlannedModel, *, gradients: bool) -> int:
    """Bytes of weights outside of the layers and of the layers gathered at once, with one layer's gradient in a
    backward pass."""
    causal = causal_of(model.modules)
    stacks = [child for child in causal.modules() if isinstance(child, nn.ModuleList) and len(child) == model.layers]
    whole: int = sum(weight.nbytes for weight in causal.parameters())
    layers: list[int] = [sum(weight.nbytes for weight in layer.parameters()) for layer in stacks[0]] if stacks else []
    return whole - sum(layers) + (PREFETCHED + gradients) * max(layers, default=0)
