"""Gradients of whole updates: accumulated in `.grad`, taken out of it, put back, clipped and combined."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatpeak.gradreg.shards import pairwise_dots


def backward(losses: Iterable[Tensor]) -> int:
    """Add the gradients of all losses to `.grad`, one graph at a time; returns the number of losses."""
    count = 0
    try:
        for count, loss in enumerate(losses, start=1):  # noqa: B007
            loss.backward()
    finally:
        # A generator may be inside `no_sync`; left to the garbage collector, it would stay there while an error lives.
        if isinstance(losses, Generator):
            losses.close()
    return count


def add_gradients(gradients: dict[nn.Parameter, Tensor]) -> None:
    """Add gradients to `.grad`: those that were taken out before an update, whose difference leaves them out."""
    for parameter, held in gradients.items():
        parameter.grad = held if parameter.grad is None else held + parameter.grad


def take_gradients(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Move the gradients out of `.grad`: copies of them where a reducer may own their memory."""
    owned = dist.is_available() and dist.is_initialized()
    taken = {p: p.grad.clone() if owned else p.grad for p in parameters if p.grad is not None}
    for parameter in taken:
        parameter.grad = None
    return taken


def clip_to_norm(gradients: dict[nn.Parameter, Tensor], limit: float | None) -> dict[nn.Parameter, Tensor]:
    """Scale to at most this norm, as published code does before it takes a difference; no change without a limit."""
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
    """The sum g1 + strength * penalty, with `outside` in place of g1's; nothing for parameters that no pass used."""
    total = {**first, **outside}
    for parameter, gradient in penalty.items():
        if parameter in first:
            total[parameter] = torch.add(first[parameter], gradient, alpha=strength)
        elif gradient.any():
            total[parameter] = strength * gradient
    return total
