"""Perturbation directions and steps, and Hessian-vector products by differences or double backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from flatpeak.errors import UserError
from flatpeak.functional.curvature import hessian_vector_product
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.parameters import is_below_float32
from flatpeak.gradreg.perturbation import Perturbation
from flatpeak.gradreg.shards import DotAccumulator, Gradients, distribute_like, pairwise_dots

FLOAT32_STEP, HALF_PRECISION_STEP, ADAPTER_STEP = 3e-5, 3e-4, 3e-3
"""Default relative steps: all in float32, half precision somewhere, adapters of a model in half precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """The direction d of the perturbation: the gradient g, which gives a penalty gradient of H g, or a random
    vector."""

    vector: Gradients
    norm: float
    """||d||, equal to ||g||."""


def gradient_direction(g1: Gradients) -> Direction:
    """The direction of the gradient."""
    grads = list(g1.values())
    return Direction(vector=g1, norm=pairwise_dots([(grads, grads)])[0] ** 0.5)


def random_direction(gradient: Direction, *, seed: int, update: int) -> Direction:
    """A Gaussian direction with the norm of the gradient, as a function of seed and update.

    It is drawn parameter by parameter from separate generators: every rank has the same direction, or its shard of it,
    and torch's generators do not change.
    """
    generators: dict[torch.device, torch.Generator] = {}
    (state,) = np.random.SeedSequence((seed % 2**64, update)).generate_state(1, np.uint64)
    drawn: dict[nn.Parameter, Tensor] = {}
    for parameter, along in gradient.vector.items():
        if parameter.device not in generators:
            generators[parameter.device] = torch.Generator(parameter.device).manual_seed(int(state >> np.uint64(1)))
        precise = torch.float64 if along.dtype == torch.float64 else torch.float32
        whole = torch.randn(
            parameter.shape, generator=generators[parameter.device], dtype=precise, device=parameter.device
        )
        drawn[parameter] = distribute_like(whole.to(along.dtype), parameter)
    size = pairwise_dots([(drawn.values(), drawn.values())])[0] ** 0.5
    return replace(gradient, vector={p: vector.mul_(gradient.norm / size) for p, vector in drawn.items()})


def step_size(direction: Direction, perturbation: Perturbation, config: GradientRegularizationConfig) -> float:
    """The step h: the parameters move by h * d."""
    step = config.step if config.step is not None else default_step(perturbation)
    if config.step_scale == "absolute":
        return step
    if config.step_scale == "radius":
        return step / direction.norm
    size = weight_norm(perturbation)
    if size == 0:
        raise UserError("every perturbed parameter is 0, so a relative step is 0: set step_scale=radius or absolute")
    return step * size / direction.norm


def default_step(perturbation: Perturbation) -> float:
    """The relative step for the coarsest type in the forward pass, and for adapters.

    The step divides the rounding errors of both gradients, so half precision needs a longer step. Adapters are a small
    part of a model in half precision, and have to move further for the same effect.
    """
    if not is_below_float32(perturbation.coarsest_dtype):
        return FLOAT32_STEP
    return ADAPTER_STEP if perturbation.adapters else HALF_PRECISION_STEP


def relative_step(step: float, direction: Direction, perturbation: Perturbation) -> float:
    """The norm of a perturbation by this step, relative to the norm of the perturbed parameters."""
    size = weight_norm(perturbation)
    return abs(step) * direction.norm / size if size else math.inf


def weight_norm(perturbation: Perturbation) -> float:
    """||theta|| over the perturbed parameters."""
    squares = DotAccumulator(1)
    for parameter in perturbation.parameters:
        master = perturbation.master(parameter)  # one at a time: this copies offloaded masters to the device
        squares.add(0, master, master)
    return math.sqrt(squares.totals()[0])


def forward_difference(g1: Gradients, ahead: Gradients, *, step: float) -> dict[nn.Parameter, Tensor]:
    """H d as (g(theta + h d) - g(theta)) / h, with error O(h). Overwrites `ahead`."""
    return {p: ahead[p].sub_(g1[p]).div_(step) for p in g1}


def central_difference(ahead: Gradients, behind: Gradients, *, step: float) -> dict[nn.Parameter, Tensor]:
    """H d as (g(theta + h d) - g(theta - h d)) / 2h, with error O(h^2). Overwrites `ahead`."""
    return {p: ahead[p].sub_(behind[p]).div_(2 * step) for p in ahead}


def step_consistency(g1: Gradients, ahead: Gradients, behind: Gradients) -> float:
    """The cosine of g(theta + h d) - g(theta) with g(theta) - g(theta - h d).

    1 if the gradient is linear over the step, or if both differences are 0; NaN if a difference is not finite.
    Independent errors of the three gradients give -1/2, because both differences contain the error of g(theta), with
    opposite signs. Curvature that changes over the step lowers the cosine too.
    """
    sums = DotAccumulator(3)
    for parameter, grad in g1.items():
        forward, backward = ahead[parameter] - grad, grad - behind[parameter]
        sums.add(0, forward, forward)
        sums.add(1, backward, backward)
        sums.add(2, forward, backward)
    forward_square, backward_square, dot = sums.totals()
    if forward_square == backward_square == 0:
        return 1.0
    norms: float = forward_square**0.5 * backward_square**0.5
    return dot / norms if norms else 0.0


def exact_curvature(
    losses: Callable[[], Iterable[Tensor]], parameters: Sequence[nn.Parameter], direction: Gradients
) -> dict[nn.Parameter, Tensor]:
    """H d by double backward, summed over the losses of the micro-batches."""
    vector = [direction[p] for p in parameters]
    total = [torch.zeros_like(v) for v in vector]
    for loss in losses():
        if not loss.requires_grad:  # a micro-batch without tokens, because another rank has more
            continue
        curvature = hessian_vector_product(partial(_itself, loss), parameters, vector)
        for accumulated, of_loss in zip(total, curvature, strict=True):
            accumulated.add_(of_loss)
    return dict(zip(parameters, total, strict=True))


def _itself(loss: Tensor) -> Tensor:
    return loss
