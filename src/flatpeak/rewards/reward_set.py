"""Several rewards as one: the parts by name, and their weighted total."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flatpeak.errors import UserError
from flatpeak.rewards.base import BudgetedScorer, GradingBudget
from flatpeak.rewards.base import Part as Part
from flatpeak.rewards.calls import FailureLog
from flatpeak.rewards.calls import Failures as Failures
from flatpeak.rewards.functions import FunctionReward
from flatpeak.rewards.workers.grading import CannotTravelError, Grading
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.types import Scores

if TYPE_CHECKING:
    from pathlib import Path

    from flatpeak.protocols import Reward
    from flatpeak.rewards.base import PartScores
    from flatpeak.types import Completion, Example, Group, Prompt, Score


def shadow_metrics(
    judged: Sequence[Sequence[Score]], verified: Sequence[Sequence[Score]], *, threshold: float = 0.5
) -> dict[str, float]:
    """`shadow_gap` and `shadow_agreement` over the completions [p][g] that both have scored; empty if there are none.

    gap = mean judge - mean verifier: where it grows while the verifier stands still, the judge is being gamed.
    agreement = how often both are at least, or both below, `threshold`.
    """
    pairs = [
        (judge, truth)
        for judge_G, truth_G in zip(judged, verified, strict=True)
        for judge, truth in zip(judge_G, truth_G, strict=True)
        if judge is not None and truth is not None
    ]
    if not pairs:
        return {}
    gap = sum(judge - truth for judge, truth in pairs) / len(pairs)
    agreement = sum((judge >= threshold) == (truth >= threshold) for judge, truth in pairs) / len(pairs)
    return {"shadow_gap": gap, "shadow_agreement": agreement}


SLOW_SECONDS = 60.0
"""How long a function of the user's may be at work in this process before the user is told."""


class RewardSet:
    """total = sum of weight * part, over the parts with a weight; missing where any of those is missing.

    With `workers`, parts that have an isolation are graded there, and where `rules`, those that are `by_group`; the
    others are graded in this process. The scores are the same. `budget` is in seconds, for each of `step_budget`.
    `notice` hears of failures and of what cannot travel.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        workers: WorkerPool | None = None,
        rules: bool = True,
        budget: float | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        if not parts:
            raise UserError("there is no reward: give at least one")
        for part in parts:
            if not math.isfinite(part.weight):
                raise UserError(f"reward {part.name!r} has weight {part.weight}: give a finite number")
        if not any(part.weight for part in parts):
            raise UserError("every reward has weight 0, so there is nothing to learn from: give one a weight")
        self._set(parts, workers=workers, rules=rules, budget=budget, notice=notice)

    def _set(
        self,
        parts: Sequence[Part],
        *,
        workers: WorkerPool | None,
        rules: bool,
        budget: float | None,
        notice: Callable[[str], None] | None,
    ) -> None:
        self._parts = {part.name: part for part in parts}
        self._workers = workers
        self._rules = rules
        self._budget = budget
        self._notice = notice or _say_nothing
        self._failures = FailureLog(self._notice)
        self._checked = False

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part, by name; empty where only the scores of a caller's own reward name its parts."""
        return {name: part.weight for name, part in self._parts.items()}

    @property
    def failures(self) -> dict[str, Failures]:
        """By name, the parts in which something has failed so far; the counts only grow."""
        return dict(self._failures.found)

    def __call__(self, groups: Sequence[Group], *, budget: GradingBudget | None = None) -> Scores:
        """Score every completion of every group; groups are told apart by their place.

        A UserError where a part with a weight works for nothing (see `FailureLog.record`).
        """
        grading = self.grading()
        if grading is not None:
            for index, group in enumerate(groups):
                grading.add(index, group)
        return self.finish(groups, grading, budget=budget)

    def step_budget(self) -> GradingBudget | None:
        """The time that one step of training may lose to answers without a verdict; None is no limit."""
        return None if self._budget is None else GradingBudget(self._budget)

    def grading(self) -> Grading | None:
        """What takes the groups of a call as they come, to be passed to `finish`; None where no worker would grade."""
        parts = [part for part in self._parts.values() if part.isolation is not None or (part.by_group and self._rules)]
        if self._workers is None or not parts:
            return None
        return Grading(parts, self._workers, unproven=self._parts.keys() - self._failures.proven)

    def finish(
        self, groups: Sequence[Group], grading: Grading | None, *, budget: GradingBudget | None = None
    ) -> Scores:
        """The scores of a call, of which `grading`, if there is one, has had every group."""
        elsewhere = grading.names if grading is not None else frozenset()
        scored = {
            name: self._score(part, groups, budget) for name, part in self._parts.items() if name not in elsewhere
        }
        if grading is not None:
            for name, found in grading.scores(groups, budget).items():
                scored[name] = self._here(name, found, groups) if isinstance(found, CannotTravelError) else found
        for name, part in self._parts.items():
            self._failures.record(part, scored[name], groups)
        self._tell()
        parts = {name: scored[name].scores for name in self._parts}
        total: list[list[Score]] = [
            [
                _weighted_sum([(part.weight, parts[name][p][g]) for name, part in self._parts.items() if part.weight])
                for g in range(len(group.completions))
            ]
            for p, group in enumerate(groups)
        ]
        timed_out = {name: [list(row) for row in one.timed_out] for name, one in scored.items() if any(one.flags)}
        return Scores(total=total, parts=parts, timed_out=timed_out)

    def prepare(self, examples: Sequence[Example]) -> None:
        """Let parts that can check themselves do so, before anything is spent on a run: UserError if one is unfit.

        Then all are closed: nobody will use them.
        """
        for part, prepare in self._able("prepare"):
            try:
                report = prepare(examples)
            except BaseException:
                self.close()
                raise
            if report is not None:
                rate = report.false_positive_rate
                self._notice(f"reward {part!r}: {rate:.1%} of {report.judged} worthless answers fooled the judge")
        self._tell()
        self._checked = True

    def check(self) -> None:
        """Let parts check themselves again, where training lies between: UserError if one has become unfit."""
        if not self._checked:
            for _, check in self._able("run_canaries"):
                check()
            self._tell()
        self._checked = False

    def attach(self, directory: Path, *, stopping: Callable[[], bool]) -> None:
        """Let parts write into a run's directory, and raise StoppedError where they wait and `stopping()`."""
        for _, attach in self._able("attach"):
            attach(directory, stopping=stopping)

    def measured(self, scores: Scores) -> dict[str, float]:
        """What parts measured since the last time, and how far judges are from the parts that know the truth."""
        found: dict[str, float] = {}
        for name, metrics in self._able("metrics"):
            found |= metrics()
            truth = getattr(self._parts[name].scorer, "shadow", None)
            if truth is not None and truth in scores.parts:
                prefix = "judge" if name == "judge" else f"judge/{name}"
                gaps = shadow_metrics(scores.parts[name], scores.parts[truth])
                found |= {f"{prefix}/{key}": value for key, value in gaps.items()}
        return found

    def close(self) -> None:
        """Let go of what parts hold: processes, connections. The workers are whose they are."""
        with ExitStack() as stack:  # all of them, whatever one raises
            for _, close in self._able("close"):
                stack.callback(close)

    def answer(self, name: str, completion: Completion, prompt: Prompt) -> str | None:
        """What a completion answers, as the part of that name reads it: equal answers give equal strings.

        The extracted answer (None if there is none) where the part extracts one, else the stripped text.
        """
        if name not in self._parts:
            raise UserError(f"there is no reward {name!r}: choose one of {', '.join(self._parts)}")
        return self._parts[name].scorer.answer(completion, prompt)

    def _able(self, method: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        """The parts whose scorers have an optional method, and the method."""
        for name, part in self._parts.items():
            found = getattr(part.scorer, method, None)
            if found is not None:
                yield name, found

    def _tell(self) -> None:
        for _, notices in self._able("notices"):
            for text in notices():
                self._notice(text)

    def _score(self, part: Part, groups: Sequence[Group], budget: GradingBudget | None) -> PartScores:
        """The scores of a part in this process; a function that does not come back is told of."""
        if isinstance(part.scorer, BudgetedScorer):
            return part.scorer.score_within(groups, budget)
        if not isinstance(part.scorer, FunctionReward):
            return part.scorer.score(groups)
        with _told_if_slow(part.name, self._notice):
            return part.scorer.score(groups)

    def _here(self, name: str, error: CannotTravelError, groups: Sequence[Group]) -> PartScores:
        """Grade in this process, now and from now on, what no worker can load."""
        part = self._parts[name]
        if part.isolation is None or part.isolation.required:
            raise UserError(
                f"reward {name!r} or a row cannot be sent to a worker process: {error}; define the function in a "
                "module that can be imported, or keep it here: by_group = False on it, or timeout: null"
            ) from error
        self._parts[name] = replace(part, isolation=None, by_group=False)
        self._notice(f"reward {name!r} {unprotected(f'it cannot be sent to a worker process: {error}')}")
        return self._score(self._parts[name], groups, None)


class CallersReward(RewardSet):
    """A caller's own function of groups, as a reward set whose components only its scores name.

    It is scored in this process and reads no answers; whatever it holds stays the caller's to close.
    """

    def __init__(self, function: Reward) -> None:
        self._function = function
        self._set([], workers=None, rules=False, budget=None, notice=None)

    def finish(
        self, groups: Sequence[Group], grading: Grading | None, *, budget: GradingBudget | None = None
    ) -> Scores:
        """The function's scores; `grading` and `budget` are for components that flatpeak calls itself."""
        return self._function(groups)

    def answer(self, name: str, completion: Completion, prompt: Prompt) -> str | None:
        """The stripped text: completions with the same text give the same answer."""
        return completion.text.strip()


@contextmanager
def _told_if_slow(name: str, notice: Callable[[str], None]) -> Iterator[None]:
    text = (
        f"reward {name!r} has been at work for {SLOW_SECONDS:g} s, and the run waits for it; `timeout: SECONDS` in a "
        "recipe calls it in a process that can be killed"
    )
    timer = threading.Timer(SLOW_SECONDS, notice, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def unprotected(why: str) -> str:
    """What is said of a reward that could be graded elsewhere, and is not."""
    return f"is graded in the trainer's own process, which it can hang or end ({why})"


def _say_nothing(text: str) -> None:
    pass


def _weighted_sum(weighted: Sequence[tuple[float, Score]]) -> Score:
    total = 0.0
    for weight, score in weighted:
        if score is None:
            return None
        total += weight * score
    return total
