"""A model's buffers at one moment, so that a repeated pass begins where the first one did and leaves no trace."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
