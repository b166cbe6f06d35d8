"""Which way the perturbed parameters move, and how far."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flatpeak.errors import UserError
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.perturbation import Perturbation
from flatpeak.gradreg.shards import Gradients, inner_products

ASAM_ETA = 0.01
"""What ASAM adds to |w|, so that weights at zero can move (Kwon et al. 2021, arXiv 2102.11600)."""
DEFAULT_STEP = {torch.float64: 3e-5, torch.float32: 3e-5, torch.bfloat16: 3e-4, torch.float16: 3e-4}


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
    masters = [perturbation.master(p) for p in perturbation.parameters]
    size = math.sqrt(inner_products([(masters, masters)])[0])
    if size == 0:
        raise UserError("every perturbed parameter is 0, so a relative step is none: set step_scale=radius or absolute")
    return step * size / way.norm


def default_step(perturbation: Perturbation) -> float:
    """By the coarsest type that a weight passes through on its way into the forward pass."""
    dtypes = {p.dtype for p in perturbation.parameters} | {perturbation.compute_dtype or torch.float32}
    return max(DEFAULT_STEP[dtype] for dtype in dtypes)
