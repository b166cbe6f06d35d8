"""The base classes of rewards: scorers and rules, the components of a reward, and the scores that they return."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from flatpeak.types import Completion, Example, Group, Prompt, Score


NumberExtraction = Literal["whole", "answer_tag", "gsm8k_strict", "gsm8k_flexible", "last_number", "boxed"]
ChoiceExtraction = Literal["robust", "letter", "official"]
MathExtraction = Literal["auto", "any", "boxed", "r1_zero"]


class GradingBudget:
    """Seconds that one step may lose to calls that run out of time or memory; calls that give a score cost nothing."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """The budget at its beginning."""
        self.left = seconds
        """Seconds not lost yet, never below 0."""

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0

    def spend(self, seconds: float) -> None:
        """Subtract seconds that were lost."""
        self.left = max(0.0, self.left - seconds)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """A context whose duration is subtracted."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.spend(time.monotonic() - started)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentScores:
    """The scores of one component for a list of groups."""

    scores: list[list[Score]]
    """[p][g] is completion g of group p."""
    timed_out: Sequence[Sequence[bool]] = ()
    """[p][g], whether a score stands for an answer that ran out of time or memory; empty where none does."""
    failed: int = 0
    """Completions without a score because something raised, or ended without an answer."""
    ungraded: int = 0
    """Of those that timed out or failed: completions that were not graded, because the step's budget was spent."""
    first_error: Exception | None = None
    """The first exception or limit."""
    tolerated: bool = False
    """Whether the failures are a grader's limits on single texts, not faults of the reward: all may fail at once."""

    @property
    def flags(self) -> list[bool]:
        """`timed_out` of all completions in order."""
        rows = self.timed_out or [[False] * len(row) for row in self.scores]
        return [flag for row in rows for flag in row]


def join_scores(calls: Sequence[ComponentScores], groups: Sequence[Group]) -> ComponentScores:
    """The scores of calls that cover all completions of the groups in order, arranged by group."""
    flat = iter([score for call in calls for row in call.scores for score in row])
    flags = iter([flag for call in calls for flag in call.flags])
    return ComponentScores(
        scores=[[next(flat) for _ in group.completions] for group in groups],
        timed_out=[[next(flags) for _ in group.completions] for group in groups],
        ungraded=sum(call.ungraded for call in calls),
        failed=sum(call.failed for call in calls),
        # Of a failure where there is one: a score that stands for a timeout is none.
        first_error=next(
            (call.first_error for call in sorted(calls, key=lambda call: not call.failed) if call.first_error), None
        ),
        tolerated=any(call.tolerated for call in calls),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """Limits under which worker processes call a scorer that is someone else's code."""

    timeout: float | None = None
    """Seconds for one call; None is the pool's."""
    single_call: bool = False
    """Whether one call covers all completions, which then have to be sampled first."""
    required: bool = False
    """Whether the user asked for a worker: a scorer that cannot be sent to one is an error then, else a notice."""
    on_timeout: Score = None
    """The score of completions whose call ran out of time or memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCalls:
    """Calls of one function that together score all completions of some groups in order."""

    function: Callable[..., ComponentScores]
    arguments: Sequence[tuple[Any, ...]]
    sizes: Sequence[int]
    """Completions of each call."""


class SelfCheck(Protocol):
    """The result of a scorer's check of itself."""

    @property
    def summary(self) -> str:
        """One sentence for the user."""
        ...


class Scorer(ABC):
    """Base class of a component's scorer: `score` is to be written, and every other hook may stay as it is."""

    by_completion: ClassVar[bool] = False
    """Whether each score depends on its completion and prompt alone: workers are then sent one completion at a time."""
    parallel: ClassVar[bool] = False
    """Whether workers may score groups one by one, for speed: nothing is kept between groups."""
    may_hang: ClassVar[bool] = False
    """Whether a notice is due when a call in this process takes very long."""
    is_function: ClassVar[bool] = False
    """Whether scores are those of a function of the user's, which need not be 0 or 1 and say nothing of an answer."""
    is_judge: ClassVar[bool] = False
    """Whether scores are a model's opinions, each of which costs a call."""
    unprotected: str | None = None
    """The reason why this process calls code that would otherwise be called by a worker; None where there is none."""
    shadow: str | None = None
    """The name of a component that knows the truth, for `shadow_metrics`."""

    @property
    def isolation(self) -> Isolation | None:
        """The limits under which workers, where there are any, call it to protect this process; None: it needs none."""
        return None

    @abstractmethod
    def score(self, groups: Sequence[Group]) -> ComponentScores:
        """Score every completion of every group."""

    def score_within(self, groups: Sequence[Group], budget: GradingBudget | None) -> ComponentScores:
        """The scores of `score`; a budget that is spent may end waiting for them, as timeouts. None is no limit."""
        return self.score(groups)

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The completion's answer in a form that equal answers share, None if it has none: here the stripped text."""
        return completion.text.strip()

    def worker_calls(self, groups: Sequence[Group]) -> WorkerCalls:
        """The calls by which worker processes score the groups."""
        if self.by_completion:
            groups = [replace(group, completions=(one,)) for group in groups for one in group.completions]
        sizes = [len(group.completions) for group in groups]
        return WorkerCalls(function=self.score, arguments=[([group],) for group in groups], sizes=sizes)

    def prepare(self, examples: Sequence[Example]) -> SelfCheck | None:
        """Check itself on a few examples before a run: UserError where it is unfit."""
        return None

    def run_canaries(self) -> SelfCheck | None:
        """Check itself again, after some training: UserError where it has become unfit."""
        return None

    def attach(self, directory: Path, *, stopping: Callable[[], bool]) -> None:
        """Write into a run's directory from now on, and raise StoppedError instead of waiting when `stopping()`."""
        return

    def metrics(self) -> Mapping[str, float]:
        """Measurements since the last call, by metric."""
        return {}

    def notices(self) -> Sequence[str]:
        """Sentences for the user, each given once."""
        return ()

    def close(self) -> None:
        """Release processes and connections."""
        return


class Rule(Scorer):
    """Base class of rewards that score one completion at a time, in any process."""

    by_completion: ClassVar[bool] = True
    parallel: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """The completion's score; missing where it cannot be graded."""

    def score(self, groups: Sequence[Group]) -> ComponentScores:
        """Apply the rule to each completion; what it raises is a fault of the data, and not caught."""
        return ComponentScores(
            scores=[[self(completion, group.prompt) for completion in group.completions] for group in groups]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """A scorer with its name and its weight in a reward."""

    name: str
    weight: float
    """0: logged only; it neither enters the total nor makes it missing."""
    scorer: Scorer
