"""Notices of a run that learns nothing because no group has rewards that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from flatpeak.runs.silence import silence
from flatpeak.training.collect import Rollouts
from flatpeak.types import Group

ANNOUNCED = ("3", "1")
"""Leading digits of the step counts that are announced: 3, 10, 30, 100, ..."""

Unanswered = Callable[[Group], Sequence[bool]]
"""For each completion of a group, whether its grader finds no answer in it."""


@dataclass(kw_only=True, slots=True)
class _Sums:
    """Over the completions of the steps in a row."""

    steps: int = 0
    completions: int = 0
    scored: int = 0
    reward: float = 0.0
    truncated: int = 0
    unanswered: int = 0


class SilentSteps:
    """Counts the steps in a row whose advantages are all 0, and announces the third, the 10th, the 30th, ..."""

    def __init__(
        self, notice: Callable[[str], None], *, limit: int, other_terms: bool, unanswered: Unanswered | None
    ) -> None:
        """`limit` is rollout.max_new_tokens; `other_terms`: whether KL or entropy move the weights all the same."""
        self._notice = notice
        self._limit = limit
        self._effect = "the rewards changed no weight" if other_terms else "no weight changed"
        self._unanswered = unanswered
        self._sums = _Sums()
        self._announced = 0

    def see(self, rollouts: Rollouts, advantages_PG: Tensor) -> None:
        """Take one step in. Steps in which no completion has a score have a notice of their own."""
        scores = [score for row in rollouts.scores.total for score in row if score is not None]
        if not scores:
            return
        if bool(advantages_PG.any()):
            self._sums = _Sums()
            return
        sums = self._sums
        sums.steps += 1
        sums.scored += len(scores)
        sums.reward += sum(scores)
        for group in rollouts.groups:
            sums.completions += len(group.completions)
            sums.truncated += sum(completion.finish_reason == "length" for completion in group.completions)
            sums.unanswered += sum(self._unanswered(group)) if self._unanswered else 0
        if _announced(sums.steps) and sums.steps > self._announced:
            self._announced = sums.steps
            self._notice(self._sentence(sums))

    def _sentence(self, sums: _Sums) -> str:
        return silence(
            f"the last {sums.steps} steps",
            reward=sums.reward / sums.scored,
            truncated=sums.truncated / sums.completions,
            unanswered=sums.unanswered / sums.completions,
            limit=self._limit,
            effect=self._effect,
        )


def _announced(steps: int) -> bool:
    digits = str(steps)
    return steps >= 3 and digits[0] in ANNOUNCED and not digits[1:].strip("0")
