"""From a recipe, or from what a Python caller passes, to a reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from flatpeak.errors import UserError
from flatpeak.rewards.calls import describe
from flatpeak.rewards.combine import Part, RewardSet
from flatpeak.rewards.config import CountdownConfig, FormatConfig, FunctionConfig, LengthConfig, NumberConfig
from flatpeak.rewards.countdown import CountdownReward
from flatpeak.rewards.format import FormatReward
from flatpeak.rewards.functions import FunctionReward, function_name, load_function
from flatpeak.rewards.length import LengthReward
from flatpeak.rewards.numbers import NumberReward
from flatpeak.rewards.parts import Rule, RuleScorer

if TYPE_CHECKING:
    from flatpeak.protocols import Reward
    from flatpeak.rewards.config import RewardConfig
    from flatpeak.rewards.workers import WorkerPool

_RULES = (NumberReward, FormatReward, LengthReward, CountdownReward)


def build_reward(configs: Mapping[str, RewardConfig], *, workers: WorkerPool | None = None) -> RewardSet:
    """The rewards of a recipe, by part name; `workers` grade the built-in ones and functions that are `by_group`."""
    return RewardSet([_configured(name, config) for name, config in configs.items()], workers=workers)


def as_reward(obj: object, *, name: str | None = None, workers: WorkerPool | None = None) -> Reward:
    """What a caller passes as `reward`, as a Reward.

    - a RewardSet, or any callable with a parameter `groups`: itself;
    - a function in one of the users' signatures, or a built-in rule: a set of one part, called `name`, or after the
      function;
    - a mapping from part names to such functions or rules, or to (function, weight): a set of them.

    Of a set made here, `workers` grade rules, and functions with an attribute `by_group = True`.
    """
    if isinstance(obj, Mapping):
        return RewardSet([_part(str(key), value) for key, value in obj.items()], workers=workers)
    if not callable(obj):
        raise UserError(
            f"reward is {describe(obj)}: pass a function, a mapping from names to functions, or a RewardSet"
        )
    if _takes_groups(obj):
        return cast("Reward", obj)
    return RewardSet([_part(name or function_name(obj), obj)], workers=workers)


def _configured(name: str, config: RewardConfig) -> Part:
    match config:
        case NumberConfig():
            rule: Rule = NumberReward(extraction=config.extraction)
        case FormatConfig():
            rule = FormatReward()
        case LengthConfig():
            rule = LengthReward(target=config.target, limit=config.limit)
        case CountdownConfig():
            rule = CountdownReward()
        case FunctionConfig():
            try:
                function = load_function(config.function)
                scorer = FunctionReward(function, name=function_name(function), arguments=config.arguments)
            except UserError as error:
                raise UserError(f"rewards.{name}: {error}") from error
            return Part(name=name, weight=config.weight, scorer=scorer, by_group=_by_group(function))
    return Part(name=name, weight=config.weight, scorer=RuleScorer(rule=rule), by_group=True)


def _part(name: str, value: object) -> Part:
    function, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    if not callable(function) or isinstance(weight, bool) or not isinstance(weight, int | float):
        raise UserError(f"reward {name!r} is {describe(value)}: give a function, or a pair (function, weight)")
    if isinstance(function, _RULES):
        return Part(name=name, weight=float(weight), scorer=RuleScorer(rule=function), by_group=True)
    return Part(name=name, weight=float(weight), scorer=FunctionReward(function), by_group=_by_group(function))


def _by_group(function: Callable[..., Any]) -> bool:
    """Only the user knows what a function keeps and what it looks at: it has to say so."""
    return getattr(function, "by_group", False) is True


def _takes_groups(function: Callable[..., Any]) -> bool:
    try:
        return "groups" in inspect.signature(function).parameters
    except (ValueError, TypeError):
        return False
