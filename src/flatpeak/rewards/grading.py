"""Grading in worker processes: each group as soon as it is sampled, while the others still decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flatpeak.errors import UserError
from flatpeak.rewards.parts import PartScores, Scorer
from flatpeak.rewards.workers import WorkerError, WorkerPool

if TYPE_CHECKING:
    from concurrent.futures import Future

    from flatpeak.types import Group, Score


class Grading:
    """The groups of one call of a reward set, and what workers find of each part that they may grade."""

    def __init__(self, scorers: Mapping[str, Scorer], workers: WorkerPool) -> None:
        self._scorers = dict(scorers)
        self._workers = workers
        self._found: dict[str, dict[int, Future[PartScores]]] = {name: {} for name in scorers}

    @property
    def names(self) -> frozenset[str]:
        """The parts that workers grade."""
        return frozenset(self._scorers)

    def add(self, index: int, group: Group) -> None:
        """Start grading group `index` of the call."""
        # One call for each part: where one fails, the others still have their scores.
        for name, scorer in self._scorers.items():
            self._found[name][index] = self._workers.submit(score_group, scorer, group)

    def scores(self, groups: Sequence[Group]) -> dict[str, PartScores]:
        """Wait for every part, by name. Where a worker had no answer, a group's scores are missing."""
        return {name: self._part(name, groups) for name in self._scorers}

    def _part(self, name: str, groups: Sequence[Group]) -> PartScores:
        scores: list[list[Score]] = []
        failed, first_error = 0, None
        for index, group in enumerate(groups):
            graded = self._group(name, index, len(group.completions))
            scores += graded.scores
            failed += graded.failed
            first_error = first_error or graded.first_error
        return PartScores(scores=scores, failed=failed, first_error=first_error)

    def _group(self, name: str, index: int, size: int) -> PartScores:
        try:
            return self._found[name][index].result()
        except WorkerError as error:
            if error.reason == "unloadable":
                raise UserError(
                    f"reward {name!r} or a row cannot be sent to a worker process: {error}; define functions with "
                    "by_group in a module that can be imported, or set run.grading_workers=0"
                ) from error
            return PartScores(scores=[[None] * size], failed=size, first_error=error)


def score_group(scorer: Scorer, group: Group) -> PartScores:
    """What a worker runs. An exception travels as the line that is said of it: tracebacks do not pickle."""
    scored = scorer.score([group])
    if scored.first_error is None:
        return scored
    from flatpeak.rewards.calls import one_line  # loads asyncio, which few workers need

    return replace(scored, first_error=WorkerError("raised", one_line(scored.first_error)))
