"""H d, the curvature along a direction: by forward or central difference, or exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from flatpeak.functional.curvature import hessian_vector_product
from flatpeak.gradreg.shards import Gradients, InnerProducts


def forward_difference(g1: Gradients, ahead: Gradients, *, step: float) -> dict[nn.Parameter, Tensor]:
    """(g(theta + h d) - g(theta)) / h; error O(h). Takes the memory of `ahead`."""
    return {p: ahead[p].sub_(g1[p]).div_(step) for p in g1}


def central_difference(ahead: Gradients, behind: Gradients, *, step: float) -> dict[nn.Parameter, Tensor]:
    """(g(theta + h d) - g(theta - h d)) / 2h; error O(h^2). Takes the memory of `ahead`."""
    return {p: ahead[p].sub_(behind[p]).div_(2 * step) for p in ahead}


def step_consistency(g1: Gradients, ahead: Gradients, behind: Gradients) -> float:
    """The cosine of g(theta + h d) - g(theta) with g(theta) - g(theta - h d).

    1 where the gradient is linear over the step, or where both differences are 0; NaN where one is not finite.
    Independent errors of the three gradients give -1/2, since both differences contain that of g(theta), with opposite
    signs. Curvature that changes over the step lowers the cosine too.
    """
    sums = InnerProducts(3)
    for parameter, grad in g1.items():
        forward, backward = ahead[parameter] - grad, grad - behind[parameter]
        sums.add(0, forward, forward)
        sums.add(1, backward, backward)
        sums.add(2, forward, backward)
    forwards, backwards, both = sums.totals()
    if forwards == backwards == 0:
        return 1.0
    norms: float = forwards**0.5 * backwards**0.5
    return both / norms if norms else 0.0


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
