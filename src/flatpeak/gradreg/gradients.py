"""Gradients as passes leave them: made, taken out of `.grad`, put back, clipped."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import torch.distributed as dist
from torch import Tensor, nn

from flatpeak.gradreg.shards import inner_products


def backward(losses: Iterable[Tensor]) -> int:
    """Add the gradients of all of them to `.grad`, one graph at a time; returns how many there were."""
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
    """Put back what stood in `.grad` before: passes add to it, and it takes no part in their difference."""
    for parameter, held in gradients.items():
        parameter.grad = held if parameter.grad is None else held + parameter.grad


def take_gradients(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Move the gradients out of `.grad`; copies where a reducer may own the memory they are in."""
    owned = dist.is_available() and dist.is_initialized()
    taken = {p: p.grad.clone() if owned else p.grad for p in parameters if p.grad is not None}
    for parameter in taken:
        parameter.grad = None
    return taken


def clipped(gradients: dict[nn.Parameter, Tensor], limit: float | None) -> dict[nn.Parameter, Tensor]:
    """Scaled to at most this norm, as published code does before it takes a difference; unchanged without a limit."""
    if limit is None:
        return gradients
    norm = inner_products([(gradients.values(), gradients.values())])[0] ** 0.5
    factor = min(1.0, limit / (norm + 1e-6))
    return {p: grad * factor for p, grad in gradients.items()}
