"""Gradients as passes leave them: made, taken out of `.grad`, put back, clipped."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatpeak.gradreg.distributed import inner_products


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


class Buffers:
    """The tensor of each buffer and its value: a forward pass may write into a buffer or rebind it."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._places = [(module, name, held) for module in model.modules() for name, held in module._buffers.items()]
        self.values: list[tuple[Tensor, Tensor]] = [
            (held, held.clone()) for _, _, held in self._places if held is not None
        ]
        """Each tensor with a copy of its value."""

    def rebind(self) -> None:
        """Put the same tensors back in their places."""
        for module, name, held in self._places:
            module._buffers[name] = held

    @torch.no_grad()
    def restore(self) -> None:
        """The same tensors with the same values."""
        self.rebind()
        for held, value in self.values:
            held.copy_(value)


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators of the CPU and of every CUDA device in use."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        """As they are."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(cpu=torch.get_rng_state(), cuda=tuple(cuda))

    def restore(self) -> None:
        """As they were."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
