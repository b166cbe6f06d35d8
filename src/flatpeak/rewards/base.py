"""The base classes of rewards: scorers and rules, the components of a reward, and the scores they return."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    from flatpeak.types import Completion, Example, Group, Prompt, Score


T = TypeVar("T")

NumberExtraction = Literal["whole", "answer_tag", "gsm8k_strict", "gsm8k_flexible", "last_number", "boxed"]
TextExtraction = Literal["whole", "answer_tag", "boxed", "last_line"]
ChoiceExtraction = Literal["robust", "letter", "official"]
MathExtraction = Literal["auto", "any", "boxed", "r1_zero"]

RESERVED_REWARD_NAMES = frozenset(
    {"mean", "std", "missing_fraction", "accuracy", "reward", "length", "truncated"}
    | {"extraction_failed", "missing", "timeouts", "robustness"}
)
"""Names that metrics other than those of the reward components use."""


class GradingBudget:
    """Seconds that a step may lose to calls that run out of time or memory; calls that give a score cost nothing."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """The initial budget."""
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
    """[p][g], whether a score stands for an answer that ran out of time or memory; empty if none does."""
    failed: int = 0
    """Completions without a score because a call raised an error or ended without an answer."""
    ungraded: int = 0
    """Among those that timed out or failed: completions not graded because the step's budget was spent."""
    first_error: Exception | None = None
    """The first exception or limit."""
    logged: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Values that a user's function logged, by metric."""
    tolerated: bool = False
    """Whether failures are a grader's limits on single texts and not faults of the reward: all may fail at once."""
    unfit: str | None = None
    """The reason why the component is of no use any more, with what to do; a run ends if it has a weight."""

    @property
    def flags(self) -> list[bool]:
        """`timed_out` of all completions in order."""
        rows = self.timed_out or [[False] * len(row) for row in self.scores]
        return [flag for row in rows for flag in row]


def by_group(values: Iterable[T], groups: Sequence[Group]) -> list[list[T]]:
    """One value per completion, in order, as a row for each group."""
    rest = iter(values)
    return [[next(rest) for _ in group.completions] for group in groups]


def join_logged(calls: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The values of several calls, by metric."""
    joined: dict[str, list[float]] = {}
    for logged in calls:
        for metric, values in logged.items():
            joined.setdefault(metric, []).extend(values)
    return joined


def join_scores(calls: Sequence[ComponentScores], groups: Sequence[Group]) -> ComponentScores:
    """The scores of calls that together cover all completions of the groups in order, arranged by group."""
    return ComponentScores(
        scores=by_group((score for call in calls for row in call.scores for score in row), groups),
        timed_out=by_group((flag for call in calls for flag in call.flags), groups),
        ungraded=sum(call.ungraded for call in calls),
        failed=sum(call.failed for call in calls),
        # The error of a failure if there is one: a score that stands for a timeout is not a failure.
        first_error=next(
            (call.first_error for call in sorted(calls, key=lambda call: not call.failed) if call.first_error), None
        ),
        logged=join_logged(call.logged for call in calls),
        tolerated=any(call.tolerated for call in calls),
    )


def weighted_sum(weighted: Sequence[tuple[float, Score]]) -> Score:
    """The sum of weight * score; missing if any score is."""
    total = 0.0
    for weight, score in weighted:
        if score is None:
            return None
        total += weight * score
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """Limits under which worker processes call a scorer that contains someone else's code."""

    timeout: float | None = None
    """Seconds for one call; None uses the pool's limit."""
    single_call: bool = False
    """Whether one call covers all completions, which then must be sampled first."""
    required: bool = False
    """Whether the user asked for a worker: a scorer that cannot be sent to a worker is then an error, else a notice."""
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
    """The result of a scorer's self-check."""

    @property
    def summary(self) -> str:
        """One sentence for the user."""
        ...


class Scorer(ABC):
    """Base class of a component's scorer: subclasses define `score`; every other hook has a default."""

    by_completion: ClassVar[bool] = False
    """Whether each score depends only on its completion and prompt: workers then get one completion at a time."""
    parallel: ClassVar[bool] = False
    """Whether workers may score groups one by one, for speed: the scorer keeps nothing between groups."""
    may_hang: ClassVar[bool] = False
    """Whether to print a notice when a call in this process takes very long."""
    is_function: ClassVar[bool] = False
    """Whether scores come from a user's function, so that they may differ from 0 and 1 and do not rate an answer."""
    is_judge: ClassVar[bool] = False
    """Whether scores are a model's opinions, each of which costs a call."""
    by_turn: ClassVar[bool] = False
    """Whether a score is the sum of the rewards of an episode's turns."""
    unprotected: str | None = None
    """The reason why no worker can call the user's code that this process calls; None if there is none."""
    shadow: str | None = None
    """The name of a component that knows the truth, for `shadow_metrics`."""

    @property
    def isolation(self) -> Isolation | None:
        """The limits under which workers, if there are any, call it to protect this process; None: no protection."""
        return None

    @abstractmethod
    def score(self, groups: Sequence[Group]) -> ComponentScores:
        """Score every completion of every group."""

    def score_within(self, groups: Sequence[Group], budget: GradingBudget | None) -> ComponentScores:
        """The scores of `score`; once a budget is spent, waiting may end in timeouts. None: no limit."""
        return self.score(groups)

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The completion's answer, the same for equal answers; None without an answer. Here the stripped text."""
        return completion.text.strip()

    def worker_calls(self, groups: Sequence[Group]) -> WorkerCalls:
        """The calls with which worker processes score the groups."""
        if self.by_completion:
            groups = [replace(group, completions=(one,)) for group in groups for one in group.completions]
        sizes = [len(group.completions) for group in groups]
        return WorkerCalls(function=self.score, arguments=[([group],) for group in groups], sizes=sizes)

    def prepare(self, examples: Sequence[Example]) -> SelfCheck | None:
        """Check itself on a few examples before a run; UserError if it is unfit."""
        return None

    def check_rows(self, prompts: Iterable[Prompt]) -> None:
        """UserError if it cannot score completions of these rows, which a run will ask for."""
        return

    def run_canaries(self) -> SelfCheck | None:
        """Check itself again after some training; UserError if it has become unfit."""
        return None

    def attach(self, directory: Path, *, stopping: Callable[[], bool]) -> None:
        """Write into a run's directory from now on; waits raise StoppedError once `stopping()` is true."""
        return

    def metrics(self) -> Mapping[str, float]:
        """Measurements since the last call, by metric."""
        return {}

    def notices(self) -> Sequence[str]:
        """Sentences for the user, each returned once."""
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
        """The completion's score; missing if it cannot be graded."""

    def score(self, groups: Sequence[Group]) -> ComponentScores:
        """Apply the rule to each completion; its errors are faults of the data and are not caught."""
        return ComponentScores(
            scores=[[self(completion, group.prompt) for completion in group.completions] for group in groups]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """A scorer with its name and its weight in a reward."""

    name: str
    weight: float
    """0: logged only; the component neither enters the total nor makes it missing."""
    scorer: Scorer
