"""Decoding steps captured as CUDA graphs, one per number of rows, and replayed: no host work between kernels.

A graph repeats the launches of the step it was captured from, on the same addresses and with the same host values.
Weights may change in place, as the optimizer changes them: replays read what is there. What must never happen between
a capture and a replay is that a tensor moves: `parameter.data = ...`, `load_state_dict(assign=True)`, `model.to(...)`,
a new parameter, buffer, cache or history. `GraphedStep.begin` notices, for the tensors it is told of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class GraphedStep:
    """Calls `step(rows)`, by replaying a graph of it where the device is a GPU and the step can be captured.

    The step works in place on the first `rows` slots, never waits for the device, and draws its randomness from tensors
    (a torch generator would be replayed with the same numbers). What it does on the host happens at captures only.
    """

    def __init__(
        self,
        step: Callable[[int], None],
        *,
        device: torch.device | str,
        state: Callable[[], Sequence[Tensor]],
        fixed: Callable[[], Iterable[Tensor]] = tuple,
        enabled: bool = True,
    ) -> None:
        """A step is not idempotent, and has to run before it is captured. It must become so once `state()` is put back.

        `state`: the tensors that say what comes next (lengths, positions, last tokens, ended flags). What else the step
        writes (a key at its column, a token in a history) it then writes to the same places again. `fixed`: every
        tensor whose address a graph keeps: weights, buffers, caches, histories.
        """
        self._step = step
        self._device = torch.device(device)
        self._state = state
        self._fixed = fixed
        self._enabled = enabled and self._device.type == "cuda"
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None
        self._begun_with: tuple[Hashable, tuple[int, ...]] | None = None
        self.reason: str | None = None
        """Why steps run without graphs although they were wanted; None where they do not."""
        self.capture_seconds = 0.0
        """Spent on warm-up and capture so far."""

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows captured so far."""
        return sorted(self._graphs)

    def begin(self, *, constants: Hashable = None) -> None:
        """Before a rollout: drop the graphs if a tensor has moved, or a host value of the step (a temperature) changed.

        `constants`: those host values.
        """
        if not self._enabled:
            return
        now = (constants, tuple(tensor.data_ptr() for tensor in self._fixed()))
        if now != self._begun_with:
            self.invalidate()
        self._begun_with = now

    def prepare(self, sizes: Iterable[int]) -> None:
        """Capture these now, the largest first: smaller ones then fit into memory that it has already."""
        for rows in sorted(set(sizes), reverse=True):
            if self._wants(rows):
                self._capture(rows)

    def __call__(self, rows: int) -> None:
        """One step."""
        if self._wants(rows):
            self._capture(rows)
        if rows in self._graphs:
            self._graphs[rows].replay()
        else:
            self._step(rows)

    def invalidate(self) -> None:
        """Forget all graphs, and a failure to capture them."""
        self._graphs = {}
        self._pool = None
        self._begun_with = None
        self.reason = None

    def _wants(self, rows: int) -> bool:
        return self._enabled and self.reason is None and rows not in self._graphs

    def _capture(self, rows: int) -> None:
        """Leaves the state as it was, whether it worked or not."""
        began = time.perf_counter()
        main = torch.cuda.current_stream(self._device)
        self._side = self._side or torch.cuda.Stream(self._device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        saved = [tensor.clone() for tensor in self._state()]
        # Compiles kernels and lets libraries allocate, which a capture cannot. Errors here are the step's own.
        self._rehearse(rows, saved, main, self._side)
        graph = torch.cuda.CUDAGraph()
        try:
            with _waiting_is_an_error():
                self._rehearse(rows, saved, main, self._side)
            # "thread_local": other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                self._step(rows)
            self._graphs[rows] = graph
        except RuntimeError as error:
            torch.cuda.set_stream(main)  # a capture that breaks off may leave torch on its own
            torch.cuda.synchronize(self._device)
            self._restore(saved)
            line = str(error).strip().partition("\n")[0]
            self.reason = f"decoding runs without CUDA graphs, and is slower: a step of {rows} rows failed ({line})"
        self.capture_seconds += time.perf_counter() - began

    def _rehearse(self, rows: int, saved: Sequence[Tensor], main: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
        """A step on the stream of the capture, undone."""
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self._step(rows)
            self._restore(saved)
        main.wait_stream(side)

    def _restore(self, saved: Sequence[Tensor]) -> None:
        for tensor, before in zip(self._state(), saved, strict=True):
            tensor.copy_(before)


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    """A step that waits for the device is told apart here, where that does no harm, and not within a capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
