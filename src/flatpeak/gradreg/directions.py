"""Which way the perturbed parameters move, and how far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flatpeak.errors import UserError
from flatpeak.functional.curvature import hessian_vector_product
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.distributed import Gradients, InnerProducts, inner_products
from flatpeak.gradreg.parameters import rounds
from flatpeak.gradreg.perturbation import Perturbation

ASAM_ETA = 0.01
"""What ASAM adds to |w|, so that weights at zero can move (Kwon et al. 2021, arXiv 2102.11600)."""
FINE_STEP, ROUNDED_STEP, ADAPTER_STEP = 3e-5, 3e-4, 3e-3
"""The default relative steps, by what rounds on the way through the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """d = T^2 g with T = 1, or ASAM's T = |w| + eta: the penalty is that on ||T g||, its gradient H d."""

    vector: Gradients
    grad_norm: float
    """||g||."""
    norm: float
    """||d||."""
    scaled_norm: float
    """||T g||: what is penalized."""


def direction(g1: Gradients, perturbation: Perturbation, *, scaling: str) -> Direction:
    """Along the gradient, or along ASAM's rescaled one."""
    parameters = perturbation.parameters
    grads = [g1[p] for p in parameters]
    if scaling == "none":
        norm = inner_products([(grads, grads)])[0] ** 0.5
        return Direction(vector={p: g1[p] for p in parameters}, grad_norm=norm, norm=norm, scaled_norm=norm)
    scales = [perturbation.master(p).abs().add_(ASAM_ETA) for p in parameters]
    once = [scale * grad for scale, grad in zip(scales, grads, strict=True)]
    twice = [scale * part for scale, part in zip(scales, once, strict=True)]
    plain, scaled, norm = (total**0.5 for total in inner_products([(a, a) for a in (grads, once, twice)]))
    vector = dict(zip(parameters, twice, strict=True))
    return Direction(vector=vector, grad_norm=plain, norm=norm, scaled_norm=scaled)


def offset(way: Direction, perturbation: Perturbation, config: GradientRegularizationConfig) -> float:
    """h, so that the parameters move by h * d."""
    step = config.step if config.step is not None else default_step(perturbation)
    if config.step_scale == "absolute":
        return step
    if config.step_scale == "radius":
        return step / way.scaled_norm
    size = weight_norm(perturbation)
    if size == 0:
        raise UserError("every perturbed parameter is 0, so a relative step is none: set step_scale=radius or absolute")
    return step * size / way.norm


def default_step(perturbation: Perturbation) -> float:
    """By the coarsest type on the way through the model, and by how much of the model moves.

    Rounding errors of the two gradients are divided by the step, so half precision asks for a longer one; adapters are
    a small part of a model that rounds, and have to move further for the same effect.
    """
    if not rounds(perturbation.through):
        return FINE_STEP
    return ADAPTER_STEP if perturbation.adapters else ROUNDED_STEP


def relative_size(step: float, way: Direction, perturbation: Perturbation) -> float:
    """Norm of a perturbation of this step over the norm of the perturbed parameters."""
    size = weight_norm(perturbation)
    return abs(step) * way.norm / size if size else math.inf


def weight_norm(perturbation: Perturbation) -> float:
    """||theta|| over the perturbed parameters."""
    masters = [perturbation.master(p) for p in perturbation.parameters]
    return math.sqrt(inner_products([(masters, masters)])[0])


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
