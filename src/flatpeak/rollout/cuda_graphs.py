"""Decoding steps captured as CUDA graphs, one per batch size, and replayed without host work between kernels.

A graph repeats the launches of the captured step, with the same addresses and host values. Weights may change in place,
as by the optimizer: replays read the current values. Between a capture and a replay no tensor may move:
`parameter.data = ...`, `load_state_dict(assign=True)`, `model.to(...)`, or a new parameter, buffer, cache or history.
`GraphedStep.begin` checks this for the tensors in `fixed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class GraphedStep:
    """Calls `step(batch_size)`, or replays its graph if the device is a GPU and the step can be captured.

    The step works in place on the first `batch_size` slots, never waits for the device, and draws its randomness from
    tensors (a graph would repeat a torch generator's numbers). Its host code runs only at captures.
    """

    def __init__(
        self,
        step: Callable[[int], None],
        *,
        device: torch.device | str,
        state: Callable[[], Sequence[Tensor]],
        fixed: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        """`step` runs before its capture, so it must be repeatable after the tensors of `state()` are restored.

        `state`: the tensors that determine the next step (lengths, positions, last tokens, ended flags). A repeated
        step writes everything else (a key in its column, a token in a history) to the same addresses. `fixed`: all
        tensors whose addresses a graph uses: weights, buffers, caches, histories.
        """
        self._step = step
        self._device = torch.device(device)
        self._state = state
        self._fixed = fixed
        self._enabled = self._device.type == "cuda"
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None
        self._begun_with: list[int] | None = None
        self.reason: str | None = None
        """The reason why steps on a GPU run without graphs; None if they run with graphs."""

    @property
    def sizes(self) -> list[int]:
        """The batch sizes captured so far."""
        return sorted(self._graphs)

    def begin(self) -> None:
        """Drop the graphs if a tensor has moved; call it before each rollout."""
        if not self._enabled:
            return
        now = [tensor.data_ptr() for tensor in self._fixed()]
        if now != self._begun_with:
            self.invalidate()
        self._begun_with = now

    def __call__(self, batch_size: int) -> None:
        """Run one step over the first `batch_size` slots."""
        if self._enabled and self.reason is None and batch_size not in self._graphs:
            self._capture(batch_size)
        if batch_size in self._graphs:
            self._graphs[batch_size].replay()
        else:
            self._step(batch_size)

    def invalidate(self) -> None:
        """Drop all graphs, and the record of a failed capture."""
        self._graphs = {}
        self._pool = None
        self._begun_with = None
        self.reason = None

    def _capture(self, batch_size: int) -> None:
        """Capture a step of this size. Afterwards the state is unchanged, even if the capture fails."""
        main = torch.cuda.current_stream(self._device)
        self._side = self._side or torch.cuda.Stream(self._device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        saved = [tensor.clone() for tensor in self._state()]
        # Compile kernels and let libraries allocate, which a capture cannot do. Errors here come from the step.
        self._rehearse(batch_size, saved, main, self._side)
        graph = torch.cuda.CUDAGraph()
        try:
            with _waiting_is_an_error():
                self._rehearse(batch_size, saved, main, self._side)
            # "thread_local": other threads may use the device at the same time.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                self._step(batch_size)
            self._graphs[batch_size] = graph
        except RuntimeError as error:
            torch.cuda.set_stream(main)  # a failed capture may leave torch on its stream
            torch.cuda.synchronize(self._device)
            self._restore(saved)
            line = str(error).strip().partition("\n")[0]
            self.reason = (
                f"decoding runs without CUDA graphs, and is slower: a step of {batch_size} slots failed ({line})"
            )

    def _rehearse(
        self, batch_size: int, saved: Sequence[Tensor], main: torch.cuda.Stream, side: torch.cuda.Stream
    ) -> None:
        """Run a step on the capture's stream and undo it."""
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self._step(batch_size)
            self._restore(saved)
        main.wait_stream(side)

    def _restore(self, saved: Sequence[Tensor]) -> None:
        for tensor, before in zip(self._state(), saved, strict=True):
            tensor.copy_(before)


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    """A context in which waiting for the device raises: it is harmless here, but would break a capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
