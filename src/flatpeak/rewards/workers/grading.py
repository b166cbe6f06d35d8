"""Grading in worker processes: each group as soon as it is sampled, each call with a deadline of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from flatpeak.errors import StoppedError, UserError
from flatpeak.rewards.base import ComponentScores, Isolation, join_scores
from flatpeak.rewards.checked_calls import PATIENCE
from flatpeak.rewards.workers.pool import NOT_CALLED, WorkerError, WorkerPool
from flatpeak.rewards.workers.worker import LIMITS
from flatpeak.utils.user_code import one_line

if TYPE_CHECKING:
    from concurrent.futures import Future

    from flatpeak.rewards.base import Component, GradingBudget
    from flatpeak.types import Group, Score

    Pending = Future[list[ComponentScores | WorkerError | UserError]]


_POLL_SECONDS: Final = 0.2
BATCH: Final = 4
"""Calls sent to a worker at once: a completion that hangs holds up no more than the others of its batch."""
_GIVEN_UP: Final = WorkerError("timeout", f"not called, after {PATIENCE} calls or more that all hung")


class UnloadableError(Exception):
    """A component or a row that cannot be sent to a worker process; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A few calls that one worker makes, and about how many completions each is."""

    results: Pending
    sizes: Sequence[int]


class Grading:
    """The groups of one call of a reward set, and their scores by each component that workers score."""

    def __init__(
        self,
        components: Sequence[Component],
        workers: WorkerPool,
        *,
        unproven: Container[str] = (),
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`unproven` components have never given a score: they are given up where all of their first calls hang.

        Waiting for scores raises StoppedError once `stopping()` is true.
        """
        self._stopping = stopping
        self._components = {component.name: component for component in components}
        self._workers = workers
        self._unproven = unproven
        self._batches: dict[str, dict[int, list[_Batch]]] = {name: {} for name in self._components}
        self._stops = {name: Event() for name in self._components}

    @property
    def names(self) -> frozenset[str]:
        """The components that workers score."""
        return frozenset(self._components)

    def add(self, index: int, group: Group) -> None:
        """Start grading group `index` of the call."""
        for name, component in self._components.items():
            if not _isolation(component).single_call:
                self._batches[name][index] = self._submit(component, [group])

    def scores(
        self, groups: Sequence[Group], budget: GradingBudget | None = None
    ) -> Mapping[str, ComponentScores | UnloadableError]:
        """Wait for every component. Completions of a call without an answer are missing, or score `on_timeout`.

        A component is given up once waiting for calls that ran out of time or memory has spent the budget; a call that
        covers all completions has its own limit only.
        """
        for name, component in self._components.items():
            if _isolation(component).single_call:
                self._batches[name][0] = self._submit(component, groups)
        return {name: self._wait(component, groups, budget) for name, component in self._components.items()}

    def _submit(self, component: Component, groups: Sequence[Group]) -> list[_Batch]:
        calls = component.scorer.worker_calls(groups)
        function, timeout = _Portable(calls.function), _isolation(component).timeout
        return [
            _Batch(
                self._workers.submit_each(
                    function,
                    calls.arguments[start : start + BATCH],
                    timeout=timeout,
                    stop=self._stops[component.name],
                ),
                calls.sizes[start : start + BATCH],
            )
            for start in range(0, len(calls.arguments), BATCH)
        ]

    def _wait(
        self, component: Component, groups: Sequence[Group], budget: GradingBudget | None
    ) -> ComponentScores | UnloadableError:
        name, isolation = component.name, _isolation(component)
        batches = [batch for _, batches in sorted(self._batches[name].items()) for batch in batches]
        calls: list[ComponentScores] = []
        given_up, hanging = _GIVEN_UP, 0
        for batch in batches:
            started = time.monotonic()
            cancelled = batch.results.cancelled()
            results = [given_up] * len(batch.sizes) if cancelled else self._result(batch)
            seconds = time.monotonic() - started
            for result, size in zip(results, batch.sizes, strict=True):
                if isinstance(result, UserError):
                    raise result
                if isinstance(result, ComponentScores):
                    calls.append(result)
                elif result.reason == "unloadable":
                    return UnloadableError(str(result))
                else:
                    hanging += result.reason == "timeout"
                    calls.append(_without_result(result, size, isolation.on_timeout))
            charged = budget is not None and not cancelled and not isolation.single_call
            if budget is not None and charged and any(map(_ran_out, results)):
                budget.spend(seconds)
                if budget.spent:
                    given_up = NOT_CALLED
                    self._stops[name].set()
                    _cancel(batches)
            if name in self._unproven and hanging == len(calls) >= PATIENCE:
                _cancel(batches)
        return join_scores(calls, groups)

    def _result(self, batch: _Batch) -> list[ComponentScores | WorkerError | UserError]:
        while True:
            try:
                return batch.results.result(timeout=_POLL_SECONDS)
            except TimeoutError:
                if self._stopping():
                    raise StoppedError("a signal asked to stop while answers were graded") from None


def _isolation(component: Component) -> Isolation:
    return component.scorer.isolation or Isolation()


def _cancel(batches: Sequence[_Batch]) -> None:
    """Cancel the batches that no worker has begun."""
    for batch in batches:
        batch.results.cancel()


def _ran_out(result: object) -> bool:
    return isinstance(result, WorkerError) and result.reason in LIMITS


def _without_result(error: WorkerError, size: int, on_timeout: Score) -> ComponentScores:
    """The scores of a call about so many completions that ended without a result."""
    score = on_timeout if _ran_out(error) else None
    return ComponentScores(
        scores=[[score] * size],
        timed_out=[[score is not None] * size],
        failed=size if score is None else 0,
        ungraded=size if error.reason == "budget" else 0,
        first_error=error,
    )


@dataclass(frozen=True, slots=True)
class _Portable:
    """A function that workers call. An exception in its scores travels as a line of text: tracebacks do not pickle."""

    function: Callable[..., ComponentScores]

    def __call__(self, *arguments: Any) -> ComponentScores:
        scored = self.function(*arguments)
        if scored.first_error is None:
            return scored
        if isinstance(scored.first_error, MemoryError):
            raise scored.first_error  # the pool knows it, and replaces the worker
        return replace(scored, first_error=WorkerError("raised", one_line(scored.first_error)))
