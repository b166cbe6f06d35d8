"""From a recipe, or from what a Python caller passes, to a reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from flatpeak.errors import UserError
from flatpeak.rewards.calls import describe
from flatpeak.rewards.choices import ChoiceReward
from flatpeak.rewards.combine import Part, RewardSet
from flatpeak.rewards.config import (
    ChoiceConfig,
    CountdownConfig,
    FormatConfig,
    FunctionConfig,
    LengthConfig,
    NumberConfig,
    ReasoningGymRewardConfig,
)
from flatpeak.rewards.countdown import CountdownReward
from flatpeak.rewards.format import FormatReward
from flatpeak.rewards.functions import FunctionReward, function_name, load_function
from flatpeak.rewards.gym import ReasoningGymReward
from flatpeak.rewards.isolation import function_part
from flatpeak.rewards.judge.config import JudgeConfig
from flatpeak.rewards.length import LengthReward
from flatpeak.rewards.math.config import MathConfig, QuestionOnlyConfig, R1ZeroConfig
from flatpeak.rewards.model.config import SequenceClassifierConfig
from flatpeak.rewards.numbers import NumberReward
from flatpeak.rewards.parts import Isolation, Rule, RuleScorer, Scorer

if TYPE_CHECKING:
    from flatpeak.protocols import Reward
    from flatpeak.rewards.config import RewardConfig
    from flatpeak.rewards.workers import WorkerPool

_RULES = (NumberReward, ChoiceReward, FormatReward, LengthReward, CountdownReward)


def build_reward(
    configs: Mapping[str, RewardConfig],
    *,
    workers: WorkerPool | None = None,
    rules: bool = True,
    budget: float | None = None,
    notice: Callable[[str], None] | None = None,
) -> RewardSet:
    """The rewards of a recipe, by part name.

    `workers` grade functions (see `isolation.function_part`) and, where `rules`, the built-in ones. `budget` is the
    number of seconds of `RewardSet.step_budget`. `notice` hears what the user should know.
    """
    parts = [_configured(name, config, notice if workers is not None else None) for name, config in configs.items()]
    return RewardSet(parts, workers=workers, rules=rules, budget=budget, notice=notice)


def as_reward(
    obj: object,
    *,
    name: str | None = None,
    workers: WorkerPool | None = None,
    rules: bool = True,
    budget: float | None = None,
    notice: Callable[[str], None] | None = None,
) -> Reward:
    """What a caller passes as `reward`, as a Reward.

    - a RewardSet, or any callable with a parameter `groups`: itself;
    - a function in one of the users' signatures, or a built-in rule: a set of one part, called `name`, or after the
      function;
    - a mapping from part names to such functions or rules, or to (function, weight): a set of them.

    Of a set made here, `workers` grade what they grade of a recipe's.
    """
    heard = notice if workers is not None else None
    if isinstance(obj, Mapping):
        parts = [_part(str(key), value, heard) for key, value in obj.items()]
        return RewardSet(parts, workers=workers, rules=rules, budget=budget, notice=notice)
    if not callable(obj):
        raise UserError(
            f"reward is {describe(obj)}: pass a function, a mapping from names to functions, or a RewardSet"
        )
    if _takes_groups(obj):
        return cast("Reward", obj)
    parts = [_part(name or function_name(obj), obj, heard)]
    return RewardSet(parts, workers=workers, rules=rules, budget=budget, notice=notice)


def _configured(name: str, config: RewardConfig, notice: Callable[[str], None] | None) -> Part:
    match config:
        case NumberConfig():
            rule: Rule = NumberReward(extraction=config.extraction, evaluated=config.evaluated)
        case ChoiceConfig():
            rule = ChoiceReward(extraction=config.extraction)
        case FormatConfig():
            rule = FormatReward()
        case LengthConfig():
            rule = LengthReward(target=config.target, limit=config.limit)
        case CountdownConfig():
            rule = CountdownReward(format_score=config.format_score)
        case ReasoningGymRewardConfig():
            gym = ReasoningGymReward(extraction=config.extraction)
            isolation = Isolation(timeout=config.timeout)
            return Part(name=name, weight=config.weight, scorer=gym, isolation=isolation, on_timeout=0.0)
        case MathConfig() | R1ZeroConfig() | QuestionOnlyConfig():
            from flatpeak.rewards.math.scorer import build_math_reward  # here, as its like below

            return Part(name=name, weight=config.weight, scorer=build_math_reward(config))
        case FunctionConfig():
            try:
                function = load_function(config.function)
                scorer = FunctionReward(function, name=function_name(function), arguments=config.arguments)
            except UserError as error:
                raise UserError(f"rewards.{name}: {error}") from error
            return function_part(
                name, config.weight, scorer, timeout=config.timeout, on_timeout=config.on_timeout, notice=notice
            )
        case JudgeConfig():
            from flatpeak.rewards.judge.build import build_judge_reward  # here: few runs have a judge

            return Part(name=name, weight=config.weight, scorer=build_judge_reward(name, config))
        case SequenceClassifierConfig():
            from flatpeak.rewards.model.reward import load_scorer  # here, because it loads torch

            return Part(name=name, weight=config.weight, scorer=load_scorer(config, where=f"rewards.{name}"))
    return Part(name=name, weight=config.weight, scorer=RuleScorer(rule=rule), by_group=True)


def _part(name: str, value: object, notice: Callable[[str], None] | None) -> Part:
    function, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    if _is_scorer(function) and isinstance(weight, int | float):
        return Part(name=name, weight=float(weight), scorer=cast("Scorer", function))
    if not callable(function) or isinstance(weight, bool) or not isinstance(weight, int | float):
        raise UserError(f"reward {name!r} is {describe(value)}: give a function, or a pair (function, weight)")
    if isinstance(function, _RULES):
        return Part(name=name, weight=float(weight), scorer=RuleScorer(rule=function), by_group=True)
    if isinstance(function, ReasoningGymReward):
        config = ReasoningGymRewardConfig(weight=float(weight), extraction=function.extraction)
        return _configured(name, config, notice)
    return function_part(name, float(weight), FunctionReward(function), timeout="auto", notice=notice)


def _is_scorer(obj: object) -> bool:
    return not callable(obj) and all(callable(getattr(obj, method, None)) for method in ("score", "answer"))


def _takes_groups(function: Callable[..., Any]) -> bool:
    try:
        return "groups" in inspect.signature(function).parameters
    except (ValueError, TypeError):
        return False
