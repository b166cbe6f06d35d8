"""Calls of a user's functions, plain or async: checks their results, and counts the failures of components."""

from __future__ import annotations

import inspect
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from flatpeak.errors import StoppedError, UserError
from flatpeak.rewards.background_loop import BackgroundLoop, gather
from flatpeak.rewards.base import ComponentScores
from flatpeak.rewards.workers.worker import WorkerError
from flatpeak.utils.user_code import OneLineError, as_metric, describe_value, one_line

if TYPE_CHECKING:
    from flatpeak.rewards.base import Component
    from flatpeak.types import Group, Score


_LOOP: Final = BackgroundLoop("flatpeak-async-rewards")
LOG_METRIC: Final = "log_metric"
"""The parameter of a function that logs metrics."""
COUNTS: Final = frozenset({"failed", "timeouts"})
"""Metrics that the run logs for every component."""
SLOW_SECONDS: Final = 10.0
"""Seconds after which a notice says that a call of a user's function in this process has not ended."""
PATIENCE: Final = 16
"""Failed completions in a row that end a run."""
_FIXES: Final = {
    "timeout": "make it faster, or give it a longer `timeout`",
    "budget": "make it faster, or raise run.grading_budget",
    "memory": "let it use less memory, or raise run.grading_memory",
    "died": "find out what ends its process, or keep it in this one with `timeout: null`",
    "unloadable": "let it use only what its process can import",
    "raised": "correct it, or give it weight 0",
}


@dataclass(frozen=True, slots=True)
class Failed:
    """The outcome of a call that raised."""

    error: Exception


class BadResultError(OneLineError):
    """A function's result that is not a score; the text says what was expected."""


def call_each(function: Callable[..., Any], calls: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The result of each call, or `Failed` if it raised; a UserError passes through.

    Awaitable results are awaited together, on one event loop that lives as long as the process.
    """
    results = [_attempt(function, arguments) for arguments in calls]
    waiting = [position for position, result in enumerate(results) if inspect.isawaitable(result)]
    if waiting:
        awaited = _LOOP.run(gather(_attempt_async(results[position]) for position in waiting))
        for position, result in zip(waiting, awaited, strict=True):
            results[position] = result
    return results


def _attempt(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except (StoppedError, UserError):
        raise
    except Exception as error:
        return Failed(error)


async def _attempt_async(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (StoppedError, UserError):
        raise
    except Exception as error:
        return Failed(error)


def as_list(result: object, *, expected: int, name: str) -> list[Any]:
    """The scores of one call, a list, tuple, array or tensor, as a list of the expected length.

    Anything else is a BadResultError.
    """
    need = f"return a list of {expected} scores, one per completion and in their order"
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise BadResultError(f"reward function {name!r} returned {describe_value(result)}: {need}")
    try:
        scores = list(result)
    except TypeError:  # a tensor or array without dimensions fails only when iterated
        raise BadResultError(f"reward function {name!r} returned {describe_value(result)}: {need}") from None
    except (StoppedError, UserError):
        raise
    except Exception as error:  # a generator runs the function's code
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
    except Exception:  # more than one element, too large for a float, or an `item` with another meaning
        score = math.nan
    if math.isfinite(score):
        return score
    raise BadResultError(
        f"reward function {name!r} returned {describe_value(value)} for completion {index}: "
        "return a finite number, or None where there is no score"
    )


class MetricLog:
    """The function `log_metric(name, value)` of one call."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def __call__(self, name: str, value: float) -> None:
        """Log a value; the metric of a step is the mean of all that its calls log."""
        if name in COUNTS:
            raise UserError(f"log_metric({name!r}, ...): the run logs a metric of that name: choose another")
        number = as_metric(name, value)
        self.values.setdefault(name, []).append(number)


@dataclass(frozen=True, slots=True)
class CheckedFunction:
    """A user's function whose results are checked, in the form sent to worker processes."""

    function: Callable[..., Any]
    name: str
    """The function's name in messages."""
    returns_list: bool
    """Whether a call returns a list of scores; otherwise it returns the score of one completion."""
    logs: bool = False
    """Whether it has a parameter `log_metric`."""

    def __call__(self, arguments: Mapping[str, Any], size: int, index: int) -> ComponentScores:
        """Call it for `size` completions; `index` is the number of the first completion, for messages."""
        return self.call_each([(arguments, size, index)])[0]

    def call_each(self, calls: Sequence[tuple[Mapping[str, Any], int, int]]) -> list[ComponentScores]:
        """The results of several calls, each with its arguments, its size and its index."""
        logs = [MetricLog() for _ in calls]
        given = [
            {**arguments, LOG_METRIC: log} if self.logs else arguments
            for (arguments, _, _), log in zip(calls, logs, strict=True)
        ]
        return [
            replace(self.check(result, size=size, index=index), logged=log.values)
            for result, (_, size, index), log in zip(call_each(self.function, given), calls, logs, strict=True)
        ]

    def check(self, result: object, *, size: int, index: int) -> ComponentScores:
        """The result of a call, or `Failed`, as one row of scores; anything that is not a score is missing."""
        if isinstance(result, Failed):
            return ComponentScores(scores=[[None] * size], failed=size, first_error=result.error)
        try:
            values = as_list(result, expected=size, name=self.name) if self.returns_list else [result]
        except BadResultError as error:
            return ComponentScores(scores=[[None] * size], failed=size, first_error=error)
        scores: list[Score] = []
        errors: list[Exception] = []
        for offset, value in enumerate(values):
            try:
                scores.append(as_score(value, name=self.name, index=index + offset))
            except BadResultError as error:
                scores.append(None)
                errors.append(error)
        return ComponentScores(scores=[scores], failed=len(errors), first_error=errors[0] if errors else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """The failures of one component since the reward set was created."""

    count: int
    """Completions without a score because a call raised an error or ended without an answer."""
    first_error: str
    """The first error, on one line."""


class FailureLog:
    """The failures of every component of a reward set, over all calls."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.by_component: dict[str, Failures] = {}
        self.proven: set[str] = set()
        """The components that have given a score at least once."""
        self._notice = notice
        self._in_a_row: dict[str, int] = {}
        self._unfit: set[str] = set()
        self._counts: Counter[tuple[str, str]] = Counter()

    def record(self, component: Component, scored: ComponentScores, groups: Sequence[Group]) -> None:
        """Count the failures of one call, with a notice at the first and at every power of ten.

        UserError if a component with a weight is broken: it has failed on PATIENCE completions in a row, or has failed
        on its whole first call, if that covers several questions. Completions that were not graded for lack of time do
        not count as failures or successes, so one hard question that spends the step's budget does not stop a run.
        Failures that the component itself tolerates do not count either, until it says that it is unfit.
        """
        size = sum(len(group.completions) for group in groups)
        if not size:
            return
        if scored.unfit is not None:
            self._report_unfit(component, scored.unfit)
        first = component.name not in self._in_a_row
        timed_out = sum(scored.flags)
        fruitless = scored.failed + timed_out == size and not scored.tolerated
        in_a_row = self._in_a_row.get(component.name, 0) + size - scored.ungraded if fruitless else 0
        self._in_a_row[component.name] = in_a_row
        if not fruitless:
            self.proven.add(component.name)
        if scored.first_error is None:
            return
        error = scored.first_error
        reason = error.reason if isinstance(error, WorkerError) else "raised"
        at_once = first and len(groups) > 1 and reason == "raised"
        if component.weight and in_a_row >= (1 if at_once else PATIENCE):
            over = f"all {in_a_row} completions" if in_a_row == size else f"all of the last {in_a_row} completions"
            raise UserError(
                f"reward {component.name!r} failed on {over}: {one_line(error)}; {_FIXES[reason]}"
            ) from error
        if scored.failed:
            self._count(component.name, scored.failed, one_line(error))
        self._count_limits(component.name, timed_out, scored.ungraded)

    def _report_unfit(self, component: Component, reason: str) -> None:
        if component.weight:
            raise UserError(f"reward {component.name!r}: {reason}")
        if component.name not in self._unfit:
            self._unfit.add(component.name)
            self._notice(f"reward {component.name!r}, which has weight 0: {reason}; the run goes on")

    def _count(self, name: str, failed: int, line: str) -> None:
        before = self.by_component.get(name, Failures(count=0, first_error=line))
        count = before.count + failed
        self.by_component[name] = replace(before, count=count)
        if self._reaches_power_of_ten(name, "failed", failed):
            counted = "1 completion has" if count == 1 else f"{count} completions have"
            self._notice(f"reward {name!r}: {counted} had no score so far because of an error; now {line}")

    def _count_limits(self, name: str, timed_out: int, ungraded: int) -> None:
        if self._reaches_power_of_ten(name, "timed out", timed_out):
            total = self._counts[name, "timed out"]
            answers = "1 answer" if total == 1 else f"{total} answers"
            self._notice(f"reward {name!r}: {answers} so far ran out of time or memory; the score stands for wrong")
        if self._reaches_power_of_ten(name, "cut short", min(ungraded, 1)):
            self._notice(
                f"reward {name!r}: {ungraded} completions of this step were not graded and count as timed out: answers "
                "that ran out of time had used up run.grading_budget"
            )

    def _reaches_power_of_ten(self, name: str, kind: str, more: int) -> bool:
        """Add to a count, and whether it reached a power of ten."""
        before = self._counts[name, kind]
        self._counts[name, kind] += more
        return more > 0 and reaches_power_of_ten(before, before + more)


def reaches_power_of_ten(before: int, now: int) -> bool:
    """Whether a count passed 1, 10, 100, ... when it grew to `now`."""
    return len(str(now)) > len(str(before)) or before == 0 < now


@contextmanager
def notice_if_slow(name: str, notice: Callable[[str], None], *, obstacle: str | None) -> Iterator[None]:
    """Give a notice if the block takes long; `obstacle` is the reason why no worker runs it."""
    way_out = "`timeout: SECONDS` in a recipe calls it in a process that can be killed"
    if obstacle is not None:
        way_out = f"no process that can be killed calls it, since {obstacle}"
    text = f"reward {name!r} has been at work for {SLOW_SECONDS:g} s, and the run waits for it; {way_out}"
    timer = threading.Timer(SLOW_SECONDS, notice, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
