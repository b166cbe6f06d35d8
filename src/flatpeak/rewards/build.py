"""From a recipe, or from what a Python caller passes, to a reward."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from flatpeak.errors import UserError
from flatpeak.rewards.base import Isolation, Part, Rule, RuleScorer, Scorer
from flatpeak.rewards.calls import describe
from flatpeak.rewards.config import (
    ChoiceConfig,
    CountdownConfig,
    FormatConfig,
    FunctionConfig,
    LengthConfig,
    MathConfig,
    NumberConfig,
    QuestionOnlyConfig,
    R1ZeroConfig,
    ReasoningGymRewardConfig,
    SequenceClassifierConfig,
)
from flatpeak.rewards.countdown import CountdownReward
from flatpeak.rewards.format import FormatReward, LengthReward
from flatpeak.rewards.functions import FunctionReward, function_name, load_function
from flatpeak.rewards.judge.config import JudgeConfig
from flatpeak.rewards.multiple_choice import ChoiceReward
from flatpeak.rewards.number import NumberReward
from flatpeak.rewards.reasoning_gym import ReasoningGymReward
from flatpeak.rewards.reward_set import CallersReward, RewardSet, unprotected

if TYPE_CHECKING:
    from flatpeak.rewards.config import RewardConfig
    from flatpeak.rewards.workers.pool import WorkerPool

Timeout = float | Literal["auto"] | None


def function_part(
    name: str,
    weight: float,
    scorer: FunctionReward,
    *,
    timeout: Timeout,
    on_timeout: float | None = None,
    notice: Callable[[str], None] | None,
) -> Part:
    """A function as a part: in workers wherever that changes no score, unless the user says otherwise.

    Functions of one completion or one group are graded in workers. Those of all completions (TRL's signature) may
    compare any with any, and async ones wait for many at once: they stay in this process, unless they have an attribute
    `by_group = True` (then one call is one group) or a `timeout` (then one call is all completions).
    `by_group = False` or `timeout=None` keep a function here. What cannot be imported elsewhere stays here too.
    UserError for an `on_timeout` where nothing can time out.
    """
    part = _function_part(name, weight, scorer, timeout=timeout, on_timeout=on_timeout, notice=notice)
    if on_timeout is not None and part.isolation is None:
        raise UserError(
            f"reward {name!r}: on_timeout={on_timeout:g} has no effect in the trainer's own process, which nothing "
            "interrupts: give the function a `timeout` in seconds, or leave on_timeout out"
        )
    return part


def _function_part(
    name: str,
    weight: float,
    scorer: FunctionReward,
    *,
    timeout: Timeout,
    on_timeout: float | None,
    notice: Callable[[str], None] | None,
) -> Part:
    function = scorer.call.function
    by_group = getattr(function, "by_group", None)
    if timeout is None or (by_group is False and timeout == "auto"):
        return Part(name=name, weight=weight, scorer=scorer)
    asked = by_group is True or timeout != "auto"
    if not asked and (scorer.way == "batch" or _is_async(function)):
        return Part(name=name, weight=weight, scorer=scorer)
    why = _cannot_travel(function)
    if why and timeout != "auto":
        raise UserError(f"reward {name!r}: timeout={timeout:g} needs a worker process, but {why}; set timeout: null")
    if why and not asked:
        if notice is not None:
            notice(f"reward {name!r} {unprotected(why)}")
        return Part(name=name, weight=weight, scorer=scorer)
    isolation = Isolation(
        timeout=None if timeout == "auto" else timeout,
        whole=scorer.way == "batch" and by_group is not True,
        required=asked,
    )
    return Part(name=name, weight=weight, scorer=scorer, isolation=isolation, on_timeout=on_timeout)


def _is_async(function: Callable[..., Any]) -> bool:
    method = getattr(type(function), "__call__", None)  # noqa: B004 - what an object's call is, not whether it has one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def _cannot_travel(function: Callable[..., Any]) -> str | None:
    """Why another process cannot import the function; None where it can."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module == "__main__":
        return "it is defined in the script that is run: move it to a module, or name it file.py:name in the recipe"
    found: Any = sys.modules.get(str(module))
    for name in str(path).split("."):
        found = getattr(found, name, None)
    if found is not function:
        return "it is a lambda, a closure or an object: define a function in a module"
    return None


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
) -> RewardSet:
    """The reward set of what a caller passes as `reward`.

    - a RewardSet: itself; any other callable with a parameter `groups`: a set that calls it for all scores;
    - a function in one of the users' signatures, or a built-in rule: a set of one part, called `name`, or after the
      function;
    - a mapping from part names to such functions or rules, or to (function, weight): a set of them.

    Of a set made here, `workers` grade what they grade of a recipe's.
    """
    heard = notice if workers is not None else None
    if isinstance(obj, RewardSet):
        return obj
    if isinstance(obj, Mapping):
        parts = [_part(str(key), value, heard) for key, value in obj.items()]
        return RewardSet(parts, workers=workers, rules=rules, budget=budget, notice=notice)
    if not callable(obj):
        raise UserError(
            f"reward is {describe(obj)}: pass a function, a mapping from names to functions, or a RewardSet"
        )
    if _takes_groups(obj):
        return CallersReward(obj)
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
            from flatpeak.rewards.math.math_reward import build_math_reward

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
            from flatpeak.rewards.reward_model import load_scorer

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
