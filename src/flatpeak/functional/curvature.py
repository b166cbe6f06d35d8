"""The regularized gradient as a combination of two gradients, exact curvature, and its largest eigenvalue."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SETTLED = 1.1
"""Growth of ||H v|| in one iteration below which its size counts as known."""
ALIGNED = 0.9
"""Cosine of v and H v above which a positive eigenvalue may be the dominant one."""
STAGNANT = 0.99
"""Ratio of successive residuals above which the iteration does not converge: eigenvalues of both signs are tied."""


def regularized_gradient(grad: Tensor, perturbed_grad: Tensor, *, strength: float, step: float) -> Tensor:
    """g + strength / step * (g' - g), with g' the gradient at theta + step * g.

    By forward difference the gradient of L + strength / 2 * ||grad L||^2, whose penalty term is strength * H g; the
    error is O(step). Elementwise, so shards of a gradient combine apart. At strength = step it is g' (SAM).
    """
    if step == 0:
        raise ValueError("step=0: the difference quotient needs a perturbation, give a step above 0")
    return grad + strength / step * (perturbed_grad - grad)


def hessian_vector_product(
    loss_fn: Callable[[], Tensor], params: Sequence[Tensor], vector: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """H v, exact by double backward (Pearlmutter 1994): the gradient of sum_j <dL/dp_j, v_j>; zeros where L is linear.

    `loss_fn` returns the scalar loss at the current `params`; `vector` has one tensor of the same shape per parameter.
    Every operation of the loss has to be twice differentiable: attention through SDPA's MATH backend, and
    log-probabilities not through `token_logprobs`. A test reference: it costs two backward passes and their memory.
    """
    if [v.shape for v in vector] != [p.shape for p in params]:
        raise ValueError("vector does not match params: give one tensor of the same shape per parameter")
    with torch.enable_grad():
        grads = torch.autograd.grad(loss_fn(), params, create_graph=True, materialize_grads=True)
        slopes = [(grad * v.detach()).sum() for grad, v in zip(grads, vector, strict=True) if grad.requires_grad]
    if not slopes:
        return tuple(torch.zeros_like(param) for param in params)
    return torch.autograd.grad(torch.stack(slopes).sum(), params, materialize_grads=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eigenvalue:
    """An estimate of the largest eigenvalue of a symmetric operator H, and how far it can be trusted."""

    value: float
    """The largest Rayleigh quotient v^T H v of a unit vector that was met: never above the largest eigenvalue, rounding
    aside. NaN where a product was not finite."""
    residual: float
    """||H v - value v|| over the largest ||H v|| that was met; an eigenvalue is no further from `value`."""
    iterations: int
    """Products H v that were computed."""
    converged: bool
    """Whether the residual is within the tolerance."""


def top_eigenvalue(
    product: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    like: Sequence[Tensor],
    *,
    iterations: int = 100,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Eigenvalue:
    """The largest (algebraic, not absolute) eigenvalue of a symmetric H, by power iteration on v -> H v.

    `product` returns H v for v of the shapes of `like`, at least float32. Power iteration finds the eigenvalue of the
    largest magnitude; where that is negative, or one of each sign is tied, it goes on with H + s, s the largest ||H v||
    so far, of which the largest eigenvalue dominates (von Mises and Pollaczek-Geiringer 1929; Saad 2011, chapter 4).
    The start is drawn from `seed`. ValueError for fewer than one iteration, or a tolerance that is not positive.
    """
    if iterations < 1 or not tolerance > 0:
        raise ValueError(f"iterations={iterations}, tolerance={tolerance}: give at least 1, and more than 0")
    generator = torch.Generator().manual_seed(seed)
    iteration = _PowerIteration(vector=_unit(_random_like(like, generator)))
    for count in range(1, iterations + 1):
        if not iteration.advance(product(iteration.vector), tolerance=tolerance):
            return Eigenvalue(value=math.nan, residual=math.nan, iterations=count, converged=False)
        if iteration.converged:
            break
        if iteration.needs_start:
            iteration.vector = _unit(_random_like(like, generator))
    return Eigenvalue(
        value=iteration.best,
        residual=iteration.best_residual / iteration.radius if iteration.radius else 0.0,
        iterations=count,
        converged=iteration.converged,
    )


@dataclass(kw_only=True, slots=True)
class _PowerIteration:
    """The state of a power iteration on H + shift."""

    vector: list[Tensor]
    """The unit vector whose product is wanted next."""
    shift: float = 0.0
    radius: float = 0.0
    """The largest ||H v|| so far: at most the spectral radius, which it approaches."""
    last_residual: float = math.inf
    best: float = -math.inf
    """The largest v^T H v so far."""
    best_residual: float = math.inf
    """||H v - best v|| for the same v."""
    converged: bool = False
    needs_start: bool = False
    """Whether to go on from a fresh vector: before the shift, H may have removed what leads to the largest one."""

    def advance(self, product: Sequence[Tensor], *, tolerance: float) -> bool:
        """Take in H v and move on to the next vector; False where a product is not finite."""
        image = [at_least_float32(one) for one in product]
        value, norm = _dot(self.vector, image), math.sqrt(_dot(image, image))
        if not math.isfinite(value + norm):
            return False
        off_axis = [one - value * v for one, v in zip(image, self.vector, strict=True)]
        settled, self.radius = norm <= SETTLED * self.radius, max(self.radius, norm)
        residual = math.sqrt(_dot(off_axis, off_axis))
        if value >= self.best:
            self.best, self.best_residual = value, residual
        small = residual <= tolerance * self.radius
        # A larger quotient was met before: this eigenvector is not that of the largest eigenvalue.
        highest = value >= self.best - tolerance * self.radius
        self.converged = small and highest and (self.shift > 0 or value > 0 or not self.radius)
        if self.converged:
            self.best, self.best_residual = value, residual
            return True
        undecided = settled and (value < ALIGNED * norm or residual > STAGNANT * self.last_residual)
        self.needs_start = small or (undecided and not self.shift)
        if self.shift or self.needs_start:
            self.shift = self.radius
        self.last_residual = residual
        if not self.needs_start:
            self.vector = _unit([one + self.shift * v for one, v in zip(image, self.vector, strict=True)])
        return True


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor, in float32 where its own type is less precise."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _random_like(like: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Standard normal numbers, drawn on the CPU so that every device has the same."""
    return [at_least_float32(torch.randn(one.shape, generator=generator).to(one)) for one in like]


def _unit(vector: Sequence[Tensor]) -> list[Tensor]:
    norm = math.sqrt(_dot(vector, vector))
    return [one / norm for one in vector] if norm else list(vector)


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return sum(float((a * b).sum(dtype=torch.float64)) for a, b in zip(left, right, strict=True))
