"""The regularized gradient as a combination of two gradients, and the exact curvature as its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


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
