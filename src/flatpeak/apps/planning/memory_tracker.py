"""The bytes of tensors while they are alive, counted operation by operation: of tensors with data or without."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """A context in which the bytes of new tensors are counted as long as they are alive; those of `before` are not."""

    def __init__(self, before: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen = {id(tensor.untyped_storage()) for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the memory of its results."""
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._count(result)
        self.peak = max(self.peak, self.live + _scratch(func, args))
        return results

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.live += size
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def _scratch(func: Any, args: Any) -> int:
    """Bytes that an operation needs while it runs: oneDNN copies a transposed input into its rows' order."""
    if getattr(func, "_opname", "") == "_linear_pointwise" and not args[0].is_contiguous():
        size: int = args[0].nbytes
        return size
    return 0
