"""From a recipe, or from what a Python caller passes, to a reward set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flatpeak.errors import UserError
from flatpeak.rewards.base import Component, Scorer
from flatpeak.rewards.functions import FunctionReward, function_name
from flatpeak.rewards.reward_set import CallersReward, RewardSet
from flatpeak.utils.user_code import describe_value

if TYPE_CHECKING:
    from flatpeak.rewards.config import RewardConfig
    from flatpeak.rewards.workers.pool import WorkerPool


def build_reward(
    configs: Mapping[str, RewardConfig],
    *,
    workers: WorkerPool | None = None,
    rules: bool = True,
    budget: float | None = None,
    notice: Callable[[str], None] | None = None,
) -> RewardSet:
    """The rewards of a recipe, by component name.

    `workers` grade functions (see `FunctionReward`) and, where `rules`, the built-in ones. `budget` is the number of
    seconds of `RewardSet.step_budget`. `notice` is called with what the user should know.
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
    """The reward set of what a caller passes as `reward`.

    - a RewardSet: itself; any other callable with a parameter `groups`: a set that calls it for all scores;
    - a function in one of the users' signatures, or a Scorer such as a built-in rule: a set of one component, called
      `name`, or after the function;
    - a mapping from component names to such functions or scorers, or to (function, weight): a set of them.

    Of a set made here, `workers` grade what they grade of a recipe's.
    """
    match obj:
        case RewardSet():
            return obj
        case Mapping():
            components = [_component(str(key), value) for key, value in obj.items()]
        case Scorer():
            components = [_component(name or function_name(obj), obj)]
        case _ if not callable(obj):
            raise UserError(
                f"reward is {describe_value(obj)}: pass a function, a mapping from names to functions, or a RewardSet"
            )
        case _ if _takes_groups(obj):
            return CallersReward(obj)
        case _:
            components = [_component(name or function_name(obj), obj)]
    return RewardSet(components, workers=workers, rules=rules, budget=budget, notice=notice)


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
