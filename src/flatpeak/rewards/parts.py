"""What the reward parts have in common: how one is asked for scores, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from flatpeak.types import Completion, Group, Prompt, Score


@dataclass(frozen=True, kw_only=True, slots=True)
class PartScores:
    """The scores of one part for a list of groups."""

    scores: list[list[Score]]
    """[p][g] is completion g of group p."""
    failed: int = 0
    """How many of them are missing because something raised."""
    first_error: Exception | None = None
    """The first thing raised."""


class Rule(Protocol):
    """A reward that judges one completion at a time. A rule may also have `answer`, as NumberReward does."""

    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """The completion's score; missing where it cannot be judged."""
        ...


class Scorer(Protocol):
    """A reward part: scores every completion of every group."""

    def score(self, groups: Sequence[Group]) -> PartScores:
        """All scores, and what went wrong."""
        ...

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """What the completion answers, in a form that equal answers share; None if it answers nothing."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleScorer:
    """A rule, applied to each completion in turn."""

    rule: Rule

    def score(self, groups: Sequence[Group]) -> PartScores:
        """What the rule raises is the user's to see, so nothing is caught."""
        return PartScores(
            scores=[[self.rule(completion, group.prompt) for completion in group.completions] for group in groups]
        )

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The rule's own extraction where it has one, else the stripped text."""
        extract = getattr(self.rule, "answer", None)
        return completion.text.strip() if extract is None else extract(completion, prompt)
