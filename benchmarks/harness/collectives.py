"""Bytes that collectives move in a training step: counted at the calls, and computed from the model's size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
}
"""Kinds by a part of the operation's name, in c10d and in its functional form."""
VALUES = "values"
"""The kind of everything except floating-point tensors: pickled values, flags."""
BYTES = 4
"""Bytes of a float32 weight or gradient."""


class CountedCollectives(TorchDispatchMode):
    """A context that sums the payloads of all collectives called in it, by kind.

    A payload is the whole tensor of a collective: the reduced tensor, or the total that is gathered or scattered. torch
    dispatches collectives like other operations, including those of FSDP2 and of pickled values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.lstrip("_")
            kind = next((kind for part, kind in COLLECTIVES.items() if name.startswith(part)), None)
            if kind is not None:
                tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
                whole = max(tensors, key=lambda tensor: tensor.nbytes)
                gathered = sum(t.nbytes for t in tree_leaves(args[0]) if isinstance(t, Tensor))  # a list of parts
                kind = kind if torch.is_floating_point(whole) else VALUES
                self.bytes[kind] += max(whole.nbytes, gathered)
        return result


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The model and the passes of a step, which determine its traffic."""

    strategy: str
    weights: int
    """Weights of the whole model, all trained, in float32."""
    root: int
    """Weights outside the decoder layers: the root stays gathered between a forward and its backward pass."""
    updates: int
    """Passes over a minibatch, including a second pass by gradient regularization."""
    micro_batches: int
    """Forward and backward passes of a step in total."""
    outside: int = 0
    """Weights that gradient regularization does not perturb: its second passes compute no gradients for them."""
    requests: int = 1
    """Requests for completions."""

    def payloads(self) -> Mapping[str, int]:
        """Bytes by kind of collective."""
        second = 0.5 if self.outside else 0.0  # the share of passes
        trained = BYTES * round(self.weights - second * self.outside)
        if self.strategy == "ddp":
            return {"all_reduce": trained * self.updates}
        passes = (2 * (self.weights - self.root) + self.root) * self.micro_batches
        return {
            "all_gather": BYTES * (passes + self.weights * self.requests),
            "reduce_scatter": trained * self.micro_batches,
        }
