"""The regularized gradient as a combination of two gradients, exact curvature, and its largest eigenvalue."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 32.0
"""A residual below this many units in the last place of the largest product counts as rounding error."""


def regularized_gradient(grad: Tensor, perturbed_grad: Tensor, *, strength: float, step: float) -> Tensor:
    """g + strength / step * (g' - g), with g' the gradient at theta + step * g.

    With a forward difference this is the gradient of L + strength / 2 * ||grad L||^2. The penalty term is strength * H
    g with error O(step). The formula is elementwise, so each shard of a gradient can be combined separately. With
    strength = step the result is g' (SAM).
    """
    if step == 0:
        raise ValueError("step=0: the difference quotient needs a perturbation, give a step above 0")
    return grad + strength / step * (perturbed_grad - grad)


def hessian_vector_product(
    loss_fn: Callable[[], Tensor], params: Sequence[Tensor], vector: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """H v, exact by double backward (Pearlmutter 1994): the gradient of sum_j <dL/dp_j, v_j>; zeros where L is linear.

    `loss_fn` returns the scalar loss at the current `params`; `vector` has one tensor of the same shape per parameter.
    Every operation of the loss must be twice differentiable: use SDPA's MATH backend for attention instead of fused
    kernels, and full logits instead of `token_logprobs`. A test reference: it costs two backward passes and their
    memory.
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
    """An estimate of the largest eigenvalue of a symmetric operator H, with its accuracy."""

    value: float
    """The Rayleigh quotient v^T H v of a unit vector. It never exceeds the largest eigenvalue by more than rounding.
    NaN if a product was not finite."""
    residual: float
    """||H v - value v|| / |value|: an eigenvalue of H lies within this relative distance of `value`. Infinite if
    `value` is 0 and the numerator is not."""
    iterations: int
    """The number of products H v."""
    converged: bool
    """Whether the residual is within the tolerance or within rounding of the largest product. If only rounding explains
    a residual above 1, one more step must confirm it: the value may then rise by at most the residual."""


def top_eigenvalue(
    product: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    like: Sequence[Tensor],
    *,
    iterations: int = 100,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Eigenvalue:
    """The largest (algebraic, not absolute) eigenvalue of a symmetric H, by locally optimal power iteration.

    `product` returns H v in at least float32, for v with the shapes of `like`. Power iteration replaces v by H v. This
    method takes the best vector in the span of v, its residual and the last step, at the same cost of one product per
    iteration (Knyazev 2001, SIAM J. Sci. Comput. 23, 517-541, without preconditioner).

    Plain power iteration needs a shift, H + s, if a negative eigenvalue of magnitude s dominates. The Hessian of a
    network has many eigenvalues near 0, and the shift moves them close to the wanted eigenvalue. This method needs no
    shift. It holds six vectors and draws the first from `seed`. ValueError for fewer than one iteration, or a tolerance
    that is not positive.
    """
    if iterations < 1 or not tolerance > 0:
        raise ValueError(f"iterations={iterations}, tolerance={tolerance}: give at least 1, and more than 0")
    generator = torch.Generator().manual_seed(seed)
    best = _Mapped.of([_standard_normal(one, generator) for one in like], product)
    step: _Mapped | None = None
    largest, ceiling = best.image_norm, -math.inf
    for count in range(1, iterations + 1):
        value = _dot(best.vector, best.image)
        residual = [image - value * v for image, v in zip(best.image, best.vector, strict=True)]
        distance = math.sqrt(_dot(residual, residual))
        if not math.isfinite(largest + distance):
            return Eigenvalue(value=math.nan, residual=math.nan, iterations=count, converged=False)
        # The rounding error of a much larger negative eigenvalue can hide a larger eigenvalue: one more step reveals
        # it.
        is_rounding = distance <= ROUNDING * _eps(like) * largest
        converged = distance <= tolerance * abs(value) or (is_rounding and (distance <= abs(value) or value <= ceiling))
        if converged or count == iterations:
            break
        ceiling = value + distance if is_rounding else -math.inf
        uphill = _Mapped.of(residual, product, orthogonal_to=best)
        largest = max(largest, uphill.image_norm)
        best, step = _best_combination(best, uphill, step)
    if value:
        relative = distance / abs(value)
    else:
        relative = math.inf if distance else 0.0
    return Eigenvalue(value=value, residual=relative, iterations=count, converged=converged)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mapped:
    """A unit vector v, and H v."""

    vector: list[Tensor]
    image: list[Tensor]

    @classmethod
    def of(
        cls,
        vector: list[Tensor],
        product: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        *,
        orthogonal_to: _Mapped | None = None,
    ) -> _Mapped:
        """Orthogonalize a vector to `orthogonal_to`, normalize it and apply H."""
        if orthogonal_to is not None:
            for _ in range(2):  # the second pass removes the rounding error of the first
                vector = _plus(vector, orthogonal_to.vector, -_dot(vector, orthogonal_to.vector))
        unit = _scaled(vector, 1 / (math.sqrt(_dot(vector, vector)) or 1.0))
        return cls(vector=unit, image=[_at_least_float32(one) for one in product(unit)])

    @property
    def image_norm(self) -> float:
        """||H v||, at most the spectral radius."""
        return math.sqrt(_dot(self.image, self.image))

    def plus(self, other: _Mapped, factor: float) -> _Mapped:
        """v + factor * other, not normalized."""
        return _Mapped(vector=_plus(self.vector, other.vector, factor), image=_plus(self.image, other.image, factor))

    def normalized(self) -> _Mapped:
        """The same direction as a unit vector."""
        scale = 1 / math.sqrt(_dot(self.vector, self.vector))
        return _Mapped(vector=_scaled(self.vector, scale), image=_scaled(self.image, scale))


def _best_combination(best: _Mapped, uphill: _Mapped, step: _Mapped | None) -> tuple[_Mapped, _Mapped | None]:
    """The unit vector of largest Rayleigh quotient in the span of the three, and the step to it (Rayleigh-Ritz)."""
    basis = [best, uphill]
    if step is not None:
        for one in basis:
            step = step.plus(one, -_dot(step.vector, one.vector))
        # A step in the span of the other two vectors leaves only rounding error.
        if _dot(step.vector, step.vector) > _eps(step.vector):
            basis.append(step.normalized())
    quotients = torch.tensor([[_dot(a.vector, b.image) for b in basis] for a in basis], dtype=torch.float64)
    weights = torch.linalg.eigh((quotients + quotients.T) / 2).eigenvectors[:, -1].tolist()
    moved = _Mapped(vector=_scaled(uphill.vector, weights[1]), image=_scaled(uphill.image, weights[1]))
    for one, weight in zip(basis[2:], weights[2:], strict=True):
        moved = moved.plus(one, weight)
    if not _dot(moved.vector, moved.vector):
        return best, None
    return moved.plus(best, weights[0]).normalized(), moved.normalized()


def _at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in its own type if that is more precise."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _standard_normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, drawn on the CPU so that all devices get the same numbers."""
    return torch.randn(like.shape, generator=generator).to(_at_least_float32(like))


def _plus(vector: Sequence[Tensor], other: Sequence[Tensor], factor: float) -> list[Tensor]:
    return [torch.add(one, another, alpha=factor) for one, another in zip(vector, other, strict=True)]


def _scaled(vector: Sequence[Tensor], factor: float) -> list[Tensor]:
    return [factor * one for one in vector]


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return sum(float((a * b).sum(dtype=torch.float64)) for a, b in zip(left, right, strict=True))


def _eps(vector: Sequence[Tensor]) -> float:
    return max(torch.finfo(torch.promote_types(one.dtype, torch.float32)).eps for one in vector)
