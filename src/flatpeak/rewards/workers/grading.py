"""Grading in worker processes: each group as soon as it is sampled, each call with a deadline of its own."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from flatpeak.errors import UserError
from flatpeak.rewards.base import Isolation, Part, PartScores, Scorer, joined, stopwatch
from flatpeak.rewards.calls import PATIENCE
from flatpeak.rewards.functions import FunctionReward
from flatpeak.rewards.workers.pool import UNASKED, WorkerError, WorkerPool
from flatpeak.rewards.workers.process import LIMITS

if TYPE_CHECKING:
    from concurrent.futures import Future

    from flatpeak.rewards.base import GradingBudget
    from flatpeak.types import Group, Score

    Pending = Future[list[PartScores | WorkerError | UserError]]


BATCH: Final = 4
"""So many calls go to a worker at once: a completion that hangs holds up no more than the others of its batch."""
_GIVEN_UP: Final = WorkerError("timeout", f"not called, after {PATIENCE} calls or more that all hung")


class CannotTravelError(Exception):
    """A part or a row cannot be sent to a worker process; as text, why."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A few calls that one worker makes, and about how many completions each is."""

    results: Pending
    sizes: list[int]


class Grading:
    """The groups of one call of a reward set, and what workers find of each part that they grade."""

    def __init__(self, parts: Sequence[Part], workers: WorkerPool, *, unproven: Container[str] = ()) -> None:
        """`unproven` parts have never given a score: they are given up where all of their first calls hang."""
        self._parts = {part.name: part for part in parts}
        self._workers = workers
        self._unproven = unproven
        self._batches: dict[str, dict[int, list[_Batch]]] = {part.name: {} for part in parts}
        self._stops = {part.name: Event() for part in parts}

    @property
    def names(self) -> frozenset[str]:
        """The parts that workers grade."""
        return frozenset(self._parts)

    def add(self, index: int, group: Group) -> None:
        """Start grading group `index` of the call."""
        for part in self._parts.values():
            if not _isolation(part).whole:
                self._batches[part.name][index] = self._submit(part, [group])

    def scores(
        self, groups: Sequence[Group], budget: GradingBudget | None = None
    ) -> Mapping[str, PartScores | CannotTravelError]:
        """Wait for every part, by name. What a call that had no answer covers is missing, or `Part.on_timeout`.

        A part is given up once waiting for calls that ran out of time or memory has spent the budget; a call that
        covers all completions has its own limit only.
        """
        for part in self._parts.values():
            if _isolation(part).whole:
                self._batches[part.name][0] = self._submit(part, groups)
        return {name: self._part(part, groups, budget) for name, part in self._parts.items()}

    def _submit(self, part: Part, groups: Sequence[Group]) -> list[_Batch]:
        function, calls, sizes = _calls(part.scorer, groups)
        timeout = _isolation(part).timeout
        starts = range(0, len(calls), BATCH)
        return [
            _Batch(
                self._workers.submit_each(
                    function, calls[start : start + BATCH], timeout=timeout, stop=self._stops[part.name]
                ),
                sizes[start : start + BATCH],
            )
            for start in starts
        ]

    def _part(
        self, part: Part, groups: Sequence[Group], budget: GradingBudget | None
    ) -> PartScores | CannotTravelError:
        batches = [batch for _, batches in sorted(self._batches[part.name].items()) for batch in batches]
        found: list[PartScores] = []
        given_up, hanging = _GIVEN_UP, 0
        for batch in batches:
            with stopwatch() as seconds:
                cancelled = batch.results.cancelled()
                results = [given_up] * len(batch.sizes) if cancelled else batch.results.result()
            for result, size in zip(results, batch.sizes, strict=True):
                if isinstance(result, UserError):
                    raise result
                if isinstance(result, PartScores):
                    found.append(result)
                elif result.reason == "unloadable":
                    return CannotTravelError(str(result))
                else:
                    hanging += result.reason == "timeout"
                    found.append(_without_result(result, size, part.on_timeout))
            charged = budget is not None and not cancelled and not _isolation(part).whole
            if budget is not None and charged and any(map(_ran_out, results)):
                budget.spend(seconds[0])
                if budget.spent:
                    given_up = UNASKED
                    self._stops[part.name].set()
                    _cancel(batches)
            if part.name in self._unproven and hanging == len(found) >= PATIENCE:
                _cancel(batches)
        return joined(found, groups)


def _cancel(batches: Sequence[_Batch]) -> None:
    """Give up those that no worker has begun."""
    for waiting in batches:
        waiting.results.cancel()


def _ran_out(result: object) -> bool:
    return isinstance(result, WorkerError) and result.reason in LIMITS


def _without_result(error: WorkerError, size: int, on_timeout: Score) -> PartScores:
    """The scores of a call about so many completions that ended without a result."""
    score = on_timeout if _ran_out(error) else None
    return PartScores(
        scores=[[score] * size],
        timed_out=[[score is not None] * size],
        failed=size if score is None else 0,
        unasked=size if error.reason == "budget" else 0,
        first_error=error,
    )


@dataclass(frozen=True, slots=True)
class _ByCompletion:
    """A function that is called by workers. An exception travels as what is said of it: tracebacks do not pickle."""

    call: Callable[[Mapping[str, Any], int, int], PartScores]

    def __call__(self, arguments: Mapping[str, Any], size: int, index: int) -> PartScores:
        return _portable(self.call(arguments, size, index))


@dataclass(frozen=True, slots=True)
class _ByGroup:
    """Any other part, called by workers with one group at a time."""

    scorer: Scorer

    def __call__(self, group: Group) -> PartScores:
        return _portable(self.scorer.score([group]))


def _calls(
    scorer: Scorer, groups: Sequence[Group]
) -> tuple[Callable[..., PartScores], list[tuple[Any, ...]], list[int]]:
    """What a worker calls, with which arguments, and about how many completions."""
    if isinstance(scorer, FunctionReward):
        calls = scorer.calls(groups)
        return _ByCompletion(scorer.call), [*calls], [size for _, size, _ in calls]
    if getattr(scorer, "by_completion", False):
        groups = [replace(group, completions=(one,)) for group in groups for one in group.completions]
    return _ByGroup(scorer), [(group,) for group in groups], [len(group.completions) for group in groups]


def _portable(scored: PartScores) -> PartScores:
    if scored.first_error is None:
        return scored
    if isinstance(scored.first_error, MemoryError):
        raise scored.first_error  # the pool knows it, and replaces the worker
    from flatpeak.rewards.calls import one_line  # loads asyncio, which few workers need

    return replace(scored, first_error=WorkerError("raised", one_line(scored.first_error)))


def _isolation(part: Part) -> Isolation:
    return part.isolation or Isolation()
