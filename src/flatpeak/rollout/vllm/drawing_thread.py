"""Rollouts ahead over servers: they get the weights of now, and a thread asks them while the trainer updates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from flatpeak.protocols import Sampler
from flatpeak.rollout.ahead import Background, answer_request
from flatpeak.rollout.vllm.sampler import VLLMSampler
from flatpeak.rollout.vllm.weight_versions import WeightVersion
from flatpeak.types import Group, Prompt, SamplingParams

STOP_PATIENCE: Final = 10.0
"""Seconds that a drawing may go on once the run is to stop: what is whole by then is in the checkpoint."""


class DrawingThread(Background):
    """The background of `RolloutsAhead` over servers: a thread that draws one request at a time.

    Until its result is fetched nothing else may ask the servers, which have one set of weights.
    """

    def __init__(self, sampler: VLLMSampler) -> None:
        self._sampler = sampler
        self._stopping: Callable[[], bool] = lambda: False
        self._stopping_since: float | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._answer: Future[dict[str, Any]] = Future()

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Break a drawing off, with StoppedError as its result, some seconds after `stopping()`."""
        self._stopping = stopping

    def begin(self, request: dict[str, Any]) -> None:
        """Give the servers the weights of now, then start the thread."""
        version = self._sampler.update(freeze=True)
        self._closed.clear()
        self._stopping_since = None
        self._sampler.stop_when(self._given_up)
        self._answer = Future()
        # A daemon: a trainer that ends without `close` does not wait for servers.
        self._thread = threading.Thread(
            target=self._draw, args=(request, version, self._answer), name="rollouts-ahead", daemon=True
        )
        self._thread.start()

    def result(self) -> dict[str, Any]:
        """Wait for the groups. Raises what the thread has raised."""
        answer = self._answer.result()
        self._end()
        return answer

    def close(self) -> None:
        """Break off what is drawn, and wait for the thread."""
        self._closed.set()
        self._end()

    def _draw(self, request: dict[str, Any], version: WeightVersion, answer: Future[dict[str, Any]]) -> None:
        try:
            answer.set_result(answer_request(_ByVersion(self._sampler, version), request))
        except BaseException as error:  # raised by `result`, in the thread that trains
            answer.set_exception(error)

    def _given_up(self) -> bool:
        """Whether the drawing is closed, or was to stop some seconds ago."""
        if self._closed.is_set() or not self._stopping():
            return self._closed.is_set()
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
        return time.monotonic() - self._stopping_since > STOP_PATIENCE

    def _end(self) -> None:
        """Wait for the thread to end; from then on waiting for servers ends at once where the run is to stop."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._sampler.stop_when(self._stopping)


@dataclass(frozen=True)
class _ByVersion(Sampler):
    """The servers with weights that were published before."""

    sampler: VLLMSampler
    version: WeightVersion

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        return self.sampler.stream_by(self.version, prompts, group_size=group_size, sampling=sampling, seed=seed)
