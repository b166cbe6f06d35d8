"""A model's linear layers, multiplied by the library that functional.products finds the faster one.

Classes are exchanged and nothing else: weights, names, hooks and what is saved stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flatpeak.functional.products import linear, multiply, onednn_is_faster, pack, served


class FastLinear(nn.Linear):
    """nn.Linear through functional.products; reads a packed copy of its weight while there is one."""

    packed: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """input W^T + b."""
        if self.packed is not None and not torch.is_grad_enabled():
            return multiply(input, self.packed, self.bias)
        return linear(input, self.weight, self.bias)

    def pack(self) -> None:
        """Make the copy of the weight as it is now."""
        self.packed = pack(self.weight)


class FastConv1D(Conv1D):
    """GPT-2's linear layer, whose weight is transposed, likewise."""

    packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x W + b."""
        if self.packed is not None and not torch.is_grad_enabled():
            return multiply(x, self.packed, self.bias)
        return linear(x, self.weight.t(), self.bias)

    def pack(self) -> None:
        """Make the copy of the weight as it is now."""
        self.packed = pack(self.weight.t().contiguous())


_FAST: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FastLinear, Conv1D: FastConv1D}
_PLAIN = {fast: plain for plain, fast in _FAST.items()}


def make_fast(model: nn.Module) -> None:
    """Exchange the class of every layer that oneDNN serves; on other machines, of none."""
    if not onednn_is_faster():
        return
    for module in model.modules():
        fast = _FAST.get(type(module))
        if fast is not None and isinstance(module.weight, Tensor) and served(module.weight):
            module.__class__ = fast


def make_plain(model: nn.Module) -> None:
    """Give every layer its own class back."""
    for module in model.modules():
        if type(module) in _PLAIN:
            module.__class__ = _PLAIN[type(module)]


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Copies of the weights in the layout that oneDNN's kernels read: one more model in memory, for decoding.

    The weights must not change before the copies are gone.
    """
    layers = [module for module in model.modules() if isinstance(module, FastLinear | FastConv1D)]
    try:
        for layer in layers:
            layer.pack()
        yield
    finally:
        for layer in layers:
            layer.packed = None
