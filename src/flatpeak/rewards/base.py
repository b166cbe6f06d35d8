"""What the reward parts have in common: how one is asked for scores, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from flatpeak.types import Completion, Group, Prompt, Score


class GradingBudget:
    """Seconds that one step may lose to calls that run out of time or memory; calls that give a score cost nothing."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """The budget as it began."""
        self.left = seconds
        """Seconds not lost yet, never below 0."""

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0

    def spend(self, seconds: float) -> None:
        """Take lost seconds off."""
        self.left = max(0.0, self.left - seconds)


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """A list that holds the seconds of the block once it is over."""
    started, seconds = time.monotonic(), list[float]()
    try:
        yield seconds
    finally:
        seconds.append(time.monotonic() - started)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartScores:
    """The scores of one part for a list of groups."""

    scores: list[list[Score]]
    """[p][g] is completion g of group p."""
    timed_out: Sequence[Sequence[bool]] = ()
    """[p][g], which of them stand for answers that ran out of time or memory; empty where none do."""
    failed: int = 0
    """How many of them are missing because something raised, or ended without an answer."""
    unasked: int = 0
    """How many of those that timed out or failed were not graded, because the step's budget was spent."""
    first_error: Exception | None = None
    """The first thing that went wrong."""
    tolerated: bool = False
    """Whether the failures are a grader's limits on single texts, not faults of the reward: all may fail at once."""

    @property
    def flags(self) -> list[bool]:
        """`timed_out` of all completions in order."""
        rows = self.timed_out or [[False] * len(row) for row in self.scores]
        return [flag for row in rows for flag in row]


def joined(found: Sequence[PartScores], groups: Sequence[Group]) -> PartScores:
    """Scores of calls that cover all completions of the groups in order, as those of the groups."""
    flat = iter([score for scored in found for row in scored.scores for score in row])
    late = iter([flag for scored in found for flag in scored.flags])
    return PartScores(
        scores=[[next(flat) for _ in group.completions] for group in groups],
        timed_out=[[next(late) for _ in group.completions] for group in groups],
        unasked=sum(scored.unasked for scored in found),
        failed=sum(scored.failed for scored in found),
        # Of a failure where there is one: a score that stands for a timeout is none.
        first_error=next(
            (one.first_error for one in sorted(found, key=lambda one: not one.failed) if one.first_error), None
        ),
        tolerated=any(scored.tolerated for scored in found),
    )


class Rule(Protocol):
    """A reward that judges one completion at a time. A rule may also have `answer`, as NumberReward does."""

    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """The completion's score; missing where it cannot be judged."""
        ...


class Scorer(Protocol):
    """A reward part: scores every completion of every group.

    It may have an attribute `by_completion = True`: each score depends on its completion and prompt alone, so that
    workers grade one at a time. It may have `close()`, which lets go of what it holds.
    """

    def score(self, groups: Sequence[Group]) -> PartScores:
        """All scores, and what went wrong."""
        ...

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """What the completion answers, in a form that equal answers share; None if it answers nothing."""
        ...


@runtime_checkable
class BudgetedScorer(Scorer, Protocol):
    """A scorer that lets a step's budget end its waiting for verdicts; having `score_within` is how it says so."""

    def score_within(self, groups: Sequence[Group], budget: GradingBudget | None) -> PartScores:
        """The scores of `score`; what the budget leaves ungraded has run out of time. None is no limit."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleScorer:
    """A rule, applied to each completion in turn."""

    rule: Rule
    by_completion: ClassVar[bool] = True

    def score(self, groups: Sequence[Group]) -> PartScores:
        """What the rule raises is the user's to see, so nothing is caught."""
        return PartScores(
            scores=[[self.rule(completion, group.prompt) for completion in group.completions] for group in groups]
        )

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The rule's own extraction where it has one, else the stripped text."""
        extract = getattr(self.rule, "answer", None)
        return completion.text.strip() if extract is None else extract(completion, prompt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """How worker processes grade a part that is someone else's code."""

    timeout: float | None = None
    """Seconds for one call; None is the pool's."""
    whole: bool = False
    """Whether one call covers all completions, which then have to be there first."""
    required: bool = False
    """Whether the user asked for it: where the part cannot travel, that is an error and not a notice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One reward of a set."""

    name: str
    weight: float
    """0: logged only; it neither enters the total nor makes it missing."""
    scorer: Scorer
    by_group: bool = False
    """Whether each score depends on its group alone, and nothing is kept between groups: workers may find it."""
    isolation: Isolation | None = None
    """Not None: where there are workers, they grade it, so that nothing it does can harm this process."""
    on_timeout: Score = None
    """The score of completions whose call in a worker ran out of time or memory."""
