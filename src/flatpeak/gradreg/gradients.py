"""Gradients of whole updates: accumulate them in `.grad`, take them out, put them back, clip and combine them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatpeak.gradreg.shards import pairwise_dots


def backward(losses: Iterable[Tensor]) -> int:
    """Add the gradients of all losses to `.grad`, one graph at a time; return the number of losses."""
    count = 0
    try:
        for count, loss in enumerate(losses, start=1):  # noqa: B007
            loss.backward()
    finally:
        # Close the generator now: it may be inside `no_sync`, and an error would keep it there until it is collected.
        if isinstance(losses, Generator):
            losses.close()
    return count


def add_gradients(gradients: dict[nn.Parameter, Tensor]) -> None:
    """Add gradients to `.grad` that were taken out before an update and take no part in its difference."""
    for parameter, held in gradients.items():
        parameter.grad = held if parameter.grad is None else held + parameter.grad


def take_gradients(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Move the gradients out of `.grad`; copy them if a reducer may own their memory."""
    owned = dist.is_available() and dist.is_initialized()
    taken = {p: p.grad.clone() if owned else p.grad for p in parameters if p.grad is not None}
    for parameter in taken:
        parameter.grad = None
    return taken


def clip_to_norm(gradients: dict[nn.Parameter, Tensor], limit: float | None) -> dict[nn.Parameter, Tensor]:
    """Scale to at most this norm, as published code does before the difference; no change without a limit."""
    if limit is None:
        return gradients
    norm = pairwise_dots([(gradients.values(), gradients.values())])[0] ** 0.5
    factor = min(1.0, limit / (norm + 1e-6))
    return {p: grad * factor for p, grad in gradients.items()}


def combine(
    first: dict[nn.Parameter, Tensor],
    penalty: Mapping[nn.Parameter, Tensor],
    *,
    strength: float,
    outside: Mapping[nn.Parameter, Tensor],
) -> dict[nn.Parameter, Tensor]:
    """g1 + strength * penalty, with `outside` replacing g1; parameters that no pass used have no entry."""
    total = {**first, **outside}
    for parameter, gradient in penalty.items():
        if parameter in first:
            total[parameter] = torch.add(first[parameter], gradient, alpha=strength)
        elif gradient.any():
            total[parameter] = strength * gradient
    return total
