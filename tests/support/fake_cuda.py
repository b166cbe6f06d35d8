"""Enough of torch.cuda for captures on a CPU: a graph records operations with their tensors and repeats them on demand.

As on a GPU, a capture changes nothing, a replay reads and writes the addresses it was captured with, host values are
those of the capture, and reading a tensor on the host is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Recorder(TorchDispatchMode):
    """Runs operations, lists them, and remembers what stood in the tensors that they change."""

    def __init__(self, waiting: str | None = None) -> None:
        super().__init__()
        self.waiting = waiting
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.waiting and func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(self.waiting)
        for spec, given in zip(func._schema.arguments, args, strict=False):
            if spec.alias_info is not None and spec.alias_info.is_write:
                self.before.append((given, given.clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def undo(self) -> None:
        for tensor, before in reversed(self.before):
            tensor.copy_(before)


class Graph:
    """A stand-in for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_iter(result), tree_iter(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Stream:
    """torch.cuda.Stream; keeps what it waited for."""

    def __init__(self, device: Any = None) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class FakeCuda:
    """Stand-ins for the functions of torch.cuda that captures use, with a log of their calls."""

    def __init__(self) -> None:
        self.main = Stream()
        self.current = self.main
        self.pools: list[Any] = []
        self.graphs: list[Graph] = []
        self.sync_mode = 0
        self.fail_captures = False

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, len(self.graphs) + 1)

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        guard = Recorder("called a synchronizing CUDA operation") if self.sync_mode == "error" else nullcontext()
        try:
            with guard:
                yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Graph, *, pool: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        self.current = stream
        with Recorder("operation not permitted when stream is capturing") as recorder:
            yield
        recorder.undo()
        if self.fail_captures:
            raise RuntimeError("CUDA error: operation failed\nfurther lines")  # like torch, still on the other stream
        graph.calls = recorder.calls
        self.pools.append(pool)
        self.graphs.append(graph)
        self.current = self.main

    def set_sync_debug_mode(self, mode: Any) -> None:
        self.sync_mode = mode


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Put it into torch.cuda."""
    fake = FakeCuda()
    replacements: dict[str, Any] = {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "graph": fake.graph,
        "stream": fake.stream,
        "set_stream": fake.set_stream,
        "current_stream": lambda device=None: fake.current,
        "synchronize": lambda device=None: None,
        "graph_pool_handle": fake.graph_pool_handle,
        "set_sync_debug_mode": fake.set_sync_debug_mode,
        "get_sync_debug_mode": lambda: fake.sync_mode,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return fake
