"""Several rewards as one: the parts by name, and their weighted total."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatpeak.errors import UserError
from flatpeak.rewards.calls import one_line
from flatpeak.rewards.grading import Grading
from flatpeak.rewards.workers import WorkerError, WorkerPool
from flatpeak.types import Scores

if TYPE_CHECKING:
    from flatpeak.rewards.parts import PartScores, Scorer
    from flatpeak.types import Completion, Group, Prompt, Score


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One reward of a set."""

    name: str
    weight: float
    """0: logged only; it neither enters the total nor makes it missing."""
    scorer: Scorer
    by_group: bool = False
    """Whether each score depends on its group alone, and nothing is kept between groups: workers may find it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """What has gone wrong in one part since the set was made."""

    count: int
    """Completions that have no score because something raised."""
    first_error: str
    """The first thing raised, on one line."""


class RewardSet:
    """total = sum of weight * part, over the parts with a weight; missing where any of those is missing.

    With `workers`, parts that are `by_group` are graded there, the others in this process; the scores are the same.
    """

    def __init__(self, parts: Sequence[Part], *, workers: WorkerPool | None = None) -> None:
        if not parts:
            raise UserError("there is no reward: give at least one")
        for part in parts:
            if not math.isfinite(part.weight):
                raise UserError(f"reward {part.name!r} has weight {part.weight}: give a finite number")
        if not any(part.weight for part in parts):
            raise UserError("every reward has weight 0, so there is nothing to learn from: give one a weight")
        self._parts = {part.name: part for part in parts}
        self._workers = workers
        self._failures: dict[str, Failures] = {}

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part, by name."""
        return {name: part.weight for name, part in self._parts.items()}

    @property
    def failures(self) -> dict[str, Failures]:
        """By name, the parts in which something has raised so far; the counts only grow."""
        return dict(self._failures)

    def __call__(self, groups: Sequence[Group]) -> Scores:
        """Score every completion of every group; groups are told apart by their place.

        A part with a weight that raises on every completion of a call is a UserError: nothing can be learned from it.
        """
        grading = self.grading()
        if grading is not None:
            for index, group in enumerate(groups):
                grading.add(index, group)
        return self.finish(groups, grading)

    def grading(self) -> Grading | None:
        """What takes the groups of a call as they come, to be passed to `finish`; None where no worker would grade."""
        scorers = {name: part.scorer for name, part in self._parts.items() if part.by_group}
        return Grading(scorers, self._workers) if self._workers is not None and scorers else None

    def finish(self, groups: Sequence[Group], grading: Grading | None) -> Scores:
        """The scores of a call, of which `grading`, if there is one, has had every group."""
        elsewhere = grading.names if grading is not None else frozenset()
        scored = {name: part.scorer.score(groups) for name, part in self._parts.items() if name not in elsewhere}
        if grading is not None:
            scored |= grading.scores(groups)
        parts = {name: self._checked(part, scored[name], groups) for name, part in self._parts.items()}
        total: list[list[Score]] = [
            [
                _weighted_sum([(part.weight, parts[name][p][g]) for name, part in self._parts.items() if part.weight])
                for g in range(len(group.completions))
            ]
            for p, group in enumerate(groups)
        ]
        return Scores(total=total, parts=parts)

    def answer(self, name: str, completion: Completion, prompt: Prompt) -> str | None:
        """What a completion answers, as the part of that name reads it: equal answers give equal strings.

        The extracted answer (None if there is none) where the part extracts one, else the stripped text.
        """
        if name not in self._parts:
            raise UserError(f"there is no reward {name!r}: choose one of {', '.join(self._parts)}")
        return self._parts[name].scorer.answer(completion, prompt)

    def _checked(self, part: Part, scored: PartScores, groups: Sequence[Group]) -> list[list[Score]]:
        if scored.first_error is not None:
            self._record(part, scored, scored.first_error)
            if part.weight and scored.failed == sum(len(group.completions) for group in groups):
                raise UserError(
                    f"reward {part.name!r} failed on all {scored.failed} completions: {_line(scored.first_error)}"
                ) from scored.first_error
        return scored.scores

    def _record(self, part: Part, scored: PartScores, error: Exception) -> None:
        before = self._failures.get(part.name, Failures(count=0, first_error=_line(error)))
        self._failures[part.name] = Failures(count=before.count + scored.failed, first_error=before.first_error)


def _line(error: Exception) -> str:
    return str(error) if isinstance(error, WorkerError) else one_line(error)


def _weighted_sum(weighted: Sequence[tuple[float, Score]]) -> Score:
    total = 0.0
    for weight, score in weighted:
        if score is None:
            return None
        total += weight * score
    return total
