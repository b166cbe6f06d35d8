"""What goes wrong in the parts of a reward: counted, told, and after too much of it the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flatpeak.errors import UserError
from flatpeak.rewards.calls import one_line
from flatpeak.rewards.processes import WorkerError

if TYPE_CHECKING:
    from flatpeak.rewards.parts import Part, PartScores
    from flatpeak.types import Group

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
