"""LookSAM's memory: between second passes, the part of the last penalty that is orthogonal to the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flatpeak.gradreg.shards import Gradients, laid_out_like, whole


class PenaltyMemory:
    """Keeps P - (P . g1 / ||g1||^2) g1, and gives it back in proportion to the gradient of the day.

    Liu et al. 2022, arXiv 2203.02714: the component along g1 changes fast, the orthogonal one slowly.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.orthogonal: dict[nn.Parameter, Tensor] | None = None
        self.grad_norm = 0.0

    def keep(self, penalty: Gradients, g1: Gradients, *, along: float, grad_norm: float) -> None:
        """Remember a penalty; `along` is its inner product with g1."""
        share = along / grad_norm**2
        self.orthogonal = {p: penalty[p].sub(g1[p], alpha=share) for p in self.parameters}
        self.grad_norm = grad_norm

    def recall(self, *, grad_norm: float) -> dict[nn.Parameter, Tensor] | None:
        """The remembered component at the scale of a gradient of this norm; None before anything was kept."""
        if self.orthogonal is None:
            return None
        return {p: kept * (grad_norm / self.grad_norm) for p, kept in self.orthogonal.items()}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, whole, by the parameter's position in the perturbed set; every rank has to ask."""
        held = self.orthogonal or {}
        return {str(index): whole(held[p]) for index, p in enumerate(self.parameters) if p in held}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], *, grad_norm: float) -> None:
        """Go on from `tensors`."""
        # In the parameters' order, which a file of tensors does not keep: "10" comes before "2".
        owners = {index: self.parameters[int(index)] for index in sorted(tensors, key=int)}
        self.orthogonal = {p: laid_out_like(tensors[index], p) for index, p in owners.items()} or None
        self.grad_norm = grad_norm
