"""H d, the curvature along a direction: by forward or central difference, or exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from flatpeak.functional.curvature import hessian_vector_product
from flatpeak.gradreg.shards import Gradients

GradientAt = Callable[[float], dict[nn.Parameter, Tensor]]
"""offset -> the gradient at theta + offset * d, of the same function as g1; theta is back afterwards."""


def forward_difference(g1: Gradients, gradient_at: GradientAt, *, step: float) -> dict[nn.Parameter, Tensor]:
    """(g(theta + h d) - g(theta)) / h; error O(h)."""
    g2 = gradient_at(step)
    return {p: g2[p].sub_(g1[p]).div_(step) for p in g1}


def central_difference(g1: Gradients, gradient_at: GradientAt, *, step: float) -> dict[nn.Parameter, Tensor]:
    """(g(theta + h d) - g(theta - h d)) / 2h; error O(h^2)."""
    ahead, behind = gradient_at(step), gradient_at(-step)
    return {p: ahead[p].sub_(behind[p]).div_(2 * step) for p in g1}


def exact_curvature(
    losses: Callable[[], Iterable[Tensor]], parameters: Sequence[nn.Parameter], direction: Gradients
) -> dict[nn.Parameter, Tensor]:
    """H d by double backward, summed over the micro-batches' losses."""
    vector = [direction[p] for p in parameters]
    total = [torch.zeros_like(v) for v in vector]
    for loss in losses():
        for part, found in zip(total, hessian_vector_product(partial(_itself, loss), parameters, vector), strict=True):
            part.add_(found)
    return dict(zip(parameters, total, strict=True))


def _itself(loss: Tensor) -> Tensor:
    return loss
