"""A set of rewards, its components by name and their weighted total; made from a recipe or a caller's object."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from flatpeak.errors import UserError
from flatpeak.rewards.base import RESERVED_REWARD_NAMES, Component, GradingBudget, Scorer, weighted_sum
from flatpeak.rewards.checked_calls import FailureLog, Failures, notice_if_slow
from flatpeak.rewards.functions import FunctionReward, function_name
from flatpeak.rewards.workers.grading import Grading, UnloadableError
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.types import Scores
from flatpeak.utils.user_code import describe_value

if TYPE_CHECKING:
    from pathlib import Path

    from flatpeak.protocols import Reward
    from flatpeak.rewards.base import ComponentScores
    from flatpeak.rewards.config import RewardConfig
    from flatpeak.types import Completion, Example, Group, Prompt, Score


class RewardSet:
    """total = sum of weight * component, over the components with a weight; missing if any of those is missing.

    With `workers`, components that have limits for workers (`Scorer.isolation`) are scored there, and with `rules` also
    parallel components; all others are scored in this process. The scores are the same. `budget` is the number of
    seconds of each `step_budget`. `notice` is called about failures and about what cannot be sent to a worker.
    """

    delegates: ClassVar[bool] = False
    """Whether it has no components and passes on another object's scores, as some subclasses do."""

    def __init__(
        self,
        components: Sequence[Component],
        *,
        workers: WorkerPool | None = None,
        rules: bool = True,
        budget: float | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        if not self.delegates:
            _check(components)
        self._components = {component.name: component for component in components}
        self._scorers = {component.name: component.scorer for component in components}
        self._workers = workers
        self._rules = rules
        self._unloadable: set[str] = set()
        """Components that a worker could not load; from then on they are scored in this process."""
        self._budget = budget
        self._notice = notice or _ignore
        self._failures = FailureLog(self._notice)
        self._checked = False
        self._stopping: Callable[[], bool] = lambda: False
        self._at_once: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each component; empty for a caller's reward, whose components are named only by its scores."""
        return {name: component.weight for name, component in self._components.items()}

    @property
    def judges(self) -> list[str]:
        """The names of the components that are judges."""
        return [name for name, scorer in self._scorers.items() if scorer.is_judge]

    def is_function(self, name: str) -> bool:
        """Whether the component with that name is a user's function."""
        return self._scorers[name].is_function

    @property
    def failures(self) -> dict[str, Failures]:
        """The failures of each component that has had any so far; the counts only grow."""
        return dict(self._failures.by_component)

    def __call__(self, groups: Sequence[Group], *, budget: GradingBudget | None = None) -> Scores:
        """Score every completion of every group; groups are distinguished by position.

        UserError if a component with a weight fails everywhere (see `FailureLog.record`).
        """
        grading = self.grading()
        if grading is not None:
            for index, group in enumerate(groups):
                grading.add(index, group)
        return self.finish(groups, grading, budget=budget)

    def step_budget(self) -> GradingBudget | None:
        """The seconds that one step of training may lose to answers without a verdict; None: no limit."""
        return None if self._budget is None else GradingBudget(self._budget)

    def grading(self) -> Grading | None:
        """An object for `finish` that sends groups to workers one by one; None if no worker would grade."""
        components = [component for component in self._components.values() if self._in_worker(component)]
        if self._workers is None or not components:
            return None
        unproven = self._components.keys() - self._failures.proven
        return Grading(components, self._workers, unproven=unproven, stopping=self._stopping)

    def finish(
        self, groups: Sequence[Group], grading: Grading | None, *, budget: GradingBudget | None = None
    ) -> Scores:
        """The scores of a call; `grading`, if given, must have received every group."""
        in_workers = grading.names if grading is not None else frozenset()
        scored = {
            name: self._score(component, groups, budget)
            for name, component in self._components.items()
            if name not in in_workers
        }
        if grading is not None:
            for name, result in grading.scores(groups, budget).items():
                if isinstance(result, UnloadableError):
                    scored[name] = self._fall_back(name, result, groups)
                else:
                    scored[name] = result
        for name, component in self._components.items():
            self._failures.record(component, scored[name], groups)
        self._give_notices()
        return Scores(
            total=self._total(scored, groups),
            parts={name: scored[name].scores for name in self._components},
            timed_out={name: [list(row) for row in one.timed_out] for name, one in scored.items() if any(one.flags)},
            logged={f"{name}/{metric}": values for name in scored for metric, values in scored[name].logged.items()},
            turn_weight=sum(one.weight for one in self._components.values() if one.scorer.by_turn),
        )

    def check_rows(self, prompts: Iterable[Prompt]) -> None:
        """UserError if a component cannot score completions of these rows."""
        rows = list(prompts)
        for scorer in self._scorers.values():
            scorer.check_rows(rows)

    def prepare(self, examples: Sequence[Example]) -> None:
        """Let components check themselves before anything is spent on a run; UserError if a component is unfit.

        In that case all components are closed, because no run will use them.
        """
        for name, scorer in self._scorers.items():
            try:
                check = scorer.prepare(examples)
            except BaseException:
                self.close()
                raise
            if check is not None:
                self._notice(f"reward {name!r}: {check.summary}")
        self._give_notices()
        self._checked = True

    def check(self) -> None:
        """Let components check themselves again after some training; UserError if a component has become unfit."""
        if not self._checked:
            for scorer in self._scorers.values():
                scorer.run_canaries()
            self._give_notices()
        self._checked = False

    def attach(
        self, directory: Path, *, stopping: Callable[[], bool], at_once: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Let components write into a run's directory; their waits raise StoppedError once `stopping()` is true.

        `at_once` makes a context in which the signal itself raises it, for functions that are called in this process.
        """
        self._stopping, self._at_once = stopping, at_once

        def asked_to_stop() -> bool:
            self._give_notices()  # a judge that is waited for may have one
            return stopping()

        for scorer in self._scorers.values():
            scorer.attach(directory, stopping=asked_to_stop)

    def measured(self, scores: Scores) -> dict[str, float]:
        """The components' metrics since the last call, and how far judges are from components that know the truth."""
        metrics: dict[str, float] = {}
        for name, scorer in self._scorers.items():
            metrics |= scorer.metrics()
            if scorer.shadow is not None and scorer.shadow in scores.parts:
                prefix = "judge" if name == "judge" else f"judge/{name}"
                gaps = shadow_metrics(scores.parts[name], scores.parts[scorer.shadow])
                metrics |= {f"{prefix}/{key}": value for key, value in gaps.items()}
        return metrics

    def close(self) -> None:
        """Release the components' processes and connections; the pool of workers stays open."""
        with ExitStack() as stack:  # closes all of them, even if some raise
            for scorer in self._scorers.values():
                stack.callback(scorer.close)

    def answer(self, name: str, completion: Completion, prompt: Prompt) -> str | None:
        """The answer that the component with that name extracts from a completion; equal answers give equal strings.

        If the component extracts answers, the extracted answer (None without one), else the stripped text.
        """
        if name not in self._scorers:
            raise UserError(f"there is no reward {name!r}: choose one of {', '.join(self._scorers)}")
        return self._scorers[name].answer(completion, prompt)

    def _in_worker(self, component: Component) -> bool:
        scorer = component.scorer
        return (scorer.isolation is not None or (scorer.parallel and self._rules)) and (
            component.name not in self._unloadable
        )

    def _score(self, component: Component, groups: Sequence[Group], budget: GradingBudget | None) -> ComponentScores:
        """The scores of a component in this process, with a notice if a function does not return."""
        if not component.scorer.may_hang:
            return component.scorer.score_within(groups, budget)
        with notice_if_slow(component.name, self._notice, obstacle=component.scorer.unprotected), self._at_once():
            return component.scorer.score_within(groups, budget)

    def _fall_back(self, name: str, error: UnloadableError, groups: Sequence[Group]) -> ComponentScores:
        """Score a component that no worker can load in this process, now and from now on."""
        component = self._components[name]
        isolation = component.scorer.isolation
        if isolation is None or isolation.required:
            raise UserError(
                f"reward {name!r} or a row cannot be sent to a worker process: {error}; define the function in a "
                "module that can be imported, or keep it here: by_group = False on it, or timeout: null"
            ) from error
        self._unloadable.add(name)
        self._notice(
            f"reward {name!r} is graded in the trainer's own process, which it can hang or end (it cannot be sent to a "
            f"worker process: {error})"
        )
        return self._score(component, groups, None)

    def _total(self, scored: Mapping[str, ComponentScores], groups: Sequence[Group]) -> list[list[Score]]:
        weights = {name: weight for name, weight in self.weights.items() if weight}
        totals = [
            [
                weighted_sum([(weight, scored[name].scores[p][g]) for name, weight in weights.items()])
                for g in range(len(group.completions))
            ]
            for p, group in enumerate(groups)
        ]
        for group, row in zip(groups, totals, strict=True):
            if any(total is not None and not math.isfinite(total) for total in row):
                raise UserError(
                    f"the weighted rewards of prompt {group.prompt.id!r} do not add up to a finite number: bound what "
                    "the rewards return, or lower their weights"
                )
        return totals

    def _give_notices(self) -> None:
        for scorer in self._scorers.values():
            for text in scorer.notices():
                self._notice(text)


class CallersReward(RewardSet):
    """A caller's function of groups, as a reward set whose components are named only by its scores.

    It is scored in this process and extracts no answers; the caller has to close its resources.
    """

    delegates = True

    def __init__(self, function: Reward) -> None:
        super().__init__([])
        self._function = function

    def finish(
        self, groups: Sequence[Group], grading: Grading | None, *, budget: GradingBudget | None = None
    ) -> Scores:
        """The function's scores; `grading` and `budget` apply only to components that flatpeak calls itself."""
        with self._at_once():
            return self._function(groups)

    def is_function(self, name: str) -> bool:
        """True, because all components belong to the caller's function."""
        return True

    def answer(self, name: str, completion: Completion, prompt: Prompt) -> str | None:
        """The stripped text: completions with the same text give the same answer."""
        return completion.text.strip()


def _check(components: Sequence[Component]) -> None:
    """UserError if nothing can be learned from the components."""
    if not components:
        raise UserError("there is no reward: give at least one")
    for component in components:
        if not math.isfinite(component.weight):
            raise UserError(f"reward {component.name!r} has weight {component.weight}: give a finite number")
    if not any(component.weight for component in components):
        raise UserError("every reward has weight 0, so there is nothing to learn from: give one a weight")


def shadow_metrics(
    judged: Sequence[Sequence[Score]], verified: Sequence[Sequence[Score]], *, threshold: float = 0.5
) -> dict[str, float]:
    """`shadow_gap` and `shadow_agreement` over the completions [p][g] that both have scored; empty if there are none.

    gap = mean judge - mean verifier: if it grows while the verifier stays constant, the judge is being gamed.
    agreement = the share of completions for which both are at least `threshold`, or both below.
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


def _ignore(text: str) -> None:
    pass


def build_reward(
    configs: Mapping[str, RewardConfig],
    *,
    workers: WorkerPool | None = None,
    rules: bool = True,
    budget: float | None = None,
    notice: Callable[[str], None] | None = None,
) -> RewardSet:
    """The rewards of a recipe, by component name.

    `workers` grade functions (see `FunctionReward`) and, with `rules`, the built-in rewards. `budget` is the number of
    seconds of `RewardSet.step_budget`. `notice` is called with messages for the user.
    """
    components = [
        Component(name=name, weight=config.weight, scorer=config.build(name)) for name, config in configs.items()
    ]
    return RewardSet(components, workers=workers, rules=rules, budget=budget, notice=notice)


def as_reward(
    obj: object,
    *,
    name: str | None = None,
    workers: WorkerPool | None = None,
    rules: bool = True,
    budget: float | None = None,
    notice: Callable[[str], None] | None = None,
) -> RewardSet:
    """The reward set for an object that a caller passes as `reward`.

    - a RewardSet: itself; any other callable with a parameter `groups`: a set that calls it for all scores;
    - a function with one of the users' signatures, or a Scorer such as a built-in rule: a set of one component, called
      `name`, or named after the function: `length_reward` for a function `length`, as `length` is another metric;
    - a mapping from component names to such functions or scorers, or to (function, weight): a set of them.

    In a set made here, `workers` grade the same kinds of components as for a recipe.
    """
    match obj:
        case RewardSet():
            return obj
        case Mapping():
            components = [_component(str(key), value) for key, value in obj.items()]
            if taken := sorted(RESERVED_REWARD_NAMES & obj.keys()):
                raise UserError(f"reward {taken[0]!r}: metrics of that name exist already; call it something else")
        case Scorer():
            components = [_component(name or _own_name(obj), obj)]
        case _ if not callable(obj):
            raise UserError(
                f"reward is {describe_value(obj)}: pass a function, or several by name, with weights or without: "
                "{'right': f, 'short': (g, 0.1)}"
            )
        case _ if _takes_groups(obj):
            return CallersReward(obj)
        case _:
            components = [_component(name or _own_name(obj), obj)]
    return RewardSet(components, workers=workers, rules=rules, budget=budget, notice=notice)


def _own_name(function: object) -> str:
    name = function_name(function)
    # A lone part called `reward` has the values of the metric of that name.
    return f"{name}_reward" if name in RESERVED_REWARD_NAMES - {"reward"} else name


def _component(name: str, value: object) -> Component:
    function, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    if isinstance(weight, int | float) and not isinstance(weight, bool):
        if isinstance(function, Scorer):
            return Component(name=name, weight=float(weight), scorer=function)
        if callable(function):
            return Component(name=name, weight=float(weight), scorer=FunctionReward(function, timeout="auto"))
    raise UserError(f"reward {name!r} is {describe_value(value)}: give a function, or a pair (function, weight)")


def _takes_groups(function: Callable[..., Any]) -> bool:
    try:
        return "groups" in inspect.signature(function).parameters
    except (ValueError, TypeError):
        return False
