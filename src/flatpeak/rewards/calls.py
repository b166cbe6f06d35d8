"""Calling what a user wrote: plain or async, one failure at a time, and checking what comes back."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from flatpeak.errors import UserError
from flatpeak.rewards.workers.process import WorkerError

if TYPE_CHECKING:
    from flatpeak.rewards.base import Part, PartScores
    from flatpeak.types import Group, Score


@dataclass(frozen=True, slots=True)
class Failed:
    """Stands where a call has no result."""

    error: Exception


class BadResultError(Exception):
    """What a function returned is no score; as text, one line that says what was expected."""


def call_each(function: Callable[..., Any], calls: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The result of each call, or `Failed` where it raised; a UserError passes through.

    Awaitable results are awaited together, on an event loop that lives as long as the process: clients that a user
    keeps between calls stay usable, and a loop that already runs (a notebook's) is not in the way.
    """
    results = [_attempt(function, arguments) for arguments in calls]
    waiting = [position for position, result in enumerate(results) if inspect.isawaitable(result)]
    if waiting:
        awaited = _run_together([results[position] for position in waiting])
        for position, result in zip(waiting, awaited, strict=True):
            results[position] = result
    return results


def _attempt(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except UserError:
        raise
    except Exception as error:
        return Failed(error)


async def _attempt_async(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except UserError:
        raise
    except Exception as error:
        return Failed(error)


def _run_together(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    async def gather() -> list[Any]:
        tasks = [asyncio.ensure_future(_attempt_async(awaitable)) for awaitable in awaitables]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # a run that stops must not keep paying for answers
                task.cancel()

    future = asyncio.run_coroutine_threadsafe(gather(), _background_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


@cache
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="flatpeak-async-rewards", daemon=True).start()
    return loop


def as_list(result: object, *, expected: int, name: str) -> list[Any]:
    """The scores of one call as a list of the expected length: a list, tuple, array or tensor.

    Anything else is a BadResultError.
    """
    need = f"return a list of {expected} scores, one per completion and in their order"
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise BadResultError(f"reward function {name!r} returned {describe(result)}: {need}")
    try:
        scores = list(result)
    except TypeError:  # a tensor or array of no dimension says so only when iterated
        raise BadResultError(f"reward function {name!r} returned {describe(result)}: {need}") from None
    except UserError:
        raise
    except Exception as error:  # a generator is the function's own code
        raise BadResultError(f"reward function {name!r}: its scores cannot be read: {one_line(error)}") from error
    if len(scores) != expected:
        raise BadResultError(
            f"reward function {name!r} returned {len(scores)} scores for {expected} completions: {need}"
        )
    return scores


def as_score(value: object, *, name: str, index: int) -> Score:
    """One score as a float: any finite real number, NumPy's and torch's included; None stays missing.

    Anything else is a BadResultError.
    """
    if value is None:
        return None
    try:
        number = value.item() if hasattr(value, "item") else value
        score = float(number) if isinstance(number, bool | int | float | Fraction | Decimal) else math.nan
    except Exception:  # more than one element, too large for a float, or an `item` of another kind
        score = math.nan
    if math.isfinite(score):
        return score
    raise BadResultError(
        f"reward function {name!r} returned {describe(value)} for completion {index}: "
        "return a finite number, or None where there is no score"
    )


def describe(value: object) -> str:
    """A value and its type, short enough for one line."""
    if value is None:
        return "None"
    try:
        shown = " ".join(repr(value).split())[:60]
    except Exception:  # an integer of too many digits, an object of the user's
        shown = "(it cannot be shown)"
    return f"{type(value).__name__} {shown}"


def one_line(error: Exception) -> str:
    """An exception as one line: its type, its message, and the line of code that raised it.

    The package's own say by themselves what is wrong and where.
    """
    if isinstance(error, BadResultError | WorkerError):
        return str(error)
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = "" if frame is None else f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})"
    try:
        message = " ".join(str(error)[:3000].split())[:300]
    except Exception:  # of an exception class of the user's
        message = "(its message cannot be read)"
    return f"{type(error).__name__}: {message}{place}"


PATIENCE: Final = 16
"""So many completions in a row without a success end a run."""
_FIXES: Final = {
    "timeout": "make it faster, or give it a longer `timeout`",
    "budget": "make it faster, or raise run.grading_budget",
    "memory": "let it use less memory, or raise run.grading_memory",
    "died": "find out what ends its process, or keep it in this one with `timeout: null`",
    "unloadable": "let it use only what its process can import",
    "raised": "correct it, or give it weight 0",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """What has gone wrong in one part since the set was made."""

    count: int
    """Completions that have no score because something raised, or ended without an answer."""
    first_error: str
    """The first thing that went wrong, on one line."""


class FailureLog:
    """The failures of every part of a set, over all calls."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.found: dict[str, Failures] = {}
        self.proven: set[str] = set()
        """The parts that have worked at least once."""
        self._notice = notice
        self._in_a_row: dict[str, int] = {}
        self._timed_out: dict[str, int] = {}
        self._short_calls: dict[str, int] = {}

    def record(self, part: Part, scored: PartScores, groups: Sequence[Group]) -> None:
        """Count the failures of one call, and say so the first time and then at powers of ten.

        A UserError where a part with a weight works for nothing: it has failed on PATIENCE completions in a row, or has
        raised on all of its very first call, if that is about several questions. Completions that were not graded for
        want of time say nothing of the part: one hard question that spends the step's budget stops no run, and neither
        do failures that the part itself tolerates.
        """
        size = sum(len(group.completions) for group in groups)
        if not size:
            return
        first = part.name not in self._in_a_row
        timed_out = sum(scored.flags)
        fruitless = scored.failed + timed_out == size and not scored.tolerated
        in_a_row = self._in_a_row.get(part.name, 0) + size - scored.unasked if fruitless else 0
        self._in_a_row[part.name] = in_a_row
        if not fruitless:
            self.proven.add(part.name)
        if scored.first_error is None:
            return
        error = scored.first_error
        if scored.failed:
            self._count(part.name, scored.failed, one_line(error))
        self._count_limits(part.name, timed_out, scored.unasked)
        reason = error.reason if isinstance(error, WorkerError) else "raised"
        at_once = first and len(groups) > 1 and reason == "raised"
        if part.weight and in_a_row >= (1 if at_once else PATIENCE):
            over = f"all {in_a_row} completions" if in_a_row == size else f"all of the last {in_a_row} completions"
            raise UserError(f"reward {part.name!r} failed on {over}: {one_line(error)}; {_FIXES[reason]}") from error

    def _count(self, name: str, failed: int, line: str) -> None:
        before = self.found.get(name, Failures(count=0, first_error=line))
        count = before.count + failed
        self.found[name] = Failures(count=count, first_error=before.first_error)
        if passes_power_of_ten(before.count, count):
            counted = "1 completion has" if count == 1 else f"{count} completions have"
            self._notice(f"reward {name!r}: {counted} had no score so far because of an error; now {line}")

    def _count_limits(self, name: str, timed_out: int, unasked: int) -> None:
        found = _grown(self._timed_out, name, timed_out)
        if found is not None:
            answers = "1 answer" if found == 1 else f"{found} answers"
            self._notice(f"reward {name!r}: {answers} so far ran out of time or memory; the score stands for wrong")
        if unasked and _grown(self._short_calls, name, 1) is not None:
            self._notice(
                f"reward {name!r}: {unasked} completions of this step were not graded and count as timed out: answers "
                "that ran out of time had used up run.grading_budget"
            )


def _grown(counts: dict[str, int], name: str, more: int) -> int | None:
    """Add to a count; the new count where it is time to say so."""
    before = counts.get(name, 0)
    counts[name] = before + more
    return counts[name] if more and passes_power_of_ten(before, counts[name]) else None


def passes_power_of_ten(before: int, now: int) -> bool:
    """Whether a count that grew to `now` reached 1, 10, 100, ... on the way."""
    return len(str(now)) > len(str(before)) or before == 0 < now
