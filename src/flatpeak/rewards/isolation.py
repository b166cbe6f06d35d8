"""Which functions of a user's are graded in worker processes, and how."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal

from flatpeak.errors import UserError
from flatpeak.rewards.combine import unprotected
from flatpeak.rewards.functions import FunctionReward
from flatpeak.rewards.parts import Isolation, Part

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
