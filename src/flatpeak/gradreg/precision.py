"""What type the forward pass really computes in, seen from inside it: autocast and sharding policies round weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def watched(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[set[torch.dtype]]:
    """The types that the weight of one linear layer with a perturbed parameter has, while its module runs."""
    seen: set[torch.dtype] = set()
    layer = _a_linear_layer(model, set(parameters))

    def look(module: nn.Module, _: Any) -> None:
        weight: Any = module.weight
        kind = weight.device.type
        seen.add(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype)

    hook = layer.register_forward_pre_hook(look) if layer is not None else None
    try:
        yield seen
    finally:
        if hook is not None:
            hook.remove()


def coarsest(seen: set[torch.dtype], own: torch.dtype) -> torch.dtype | None:
    """The least precise of these types; None where that is the weights' own or nothing was seen."""
    found = max(seen, key=lambda dtype: torch.finfo(dtype).eps, default=own)
    return found if torch.finfo(found).eps > torch.finfo(own).eps else None


def _a_linear_layer(model: nn.Module, parameters: set[nn.Parameter]) -> nn.Module | None:
    for module in model.modules():
        weight = getattr(module, "weight", None)
        # By its shape: norms have vectors, and embeddings are not cast.
        matrix = isinstance(weight, nn.Parameter) and weight.ndim == 2 and not isinstance(module, nn.Embedding)
        if matrix and weight in parameters:
            return module
    return None
