"""Calls of functions, and of instances between whose calls only their pickled state is kept, in worker processes.

Each takes the class or function by `partial`: its module is loaded off the clock of the call, and before its instances
are unpickled.
"""

from __future__ import annotations

import inspect
import math
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatpeak.episodes.tools import answer_text
from flatpeak.utils.user_code import OneLineError, describe_value

if TYPE_CHECKING:
    from flatpeak.types import Completion

Advance = tuple[bytes, str | None, float | None, bool]
"""The state after `reset` or `step`, the text that the policy reads, the reward, and whether the episode is over."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of an action in a game."""

    observation: str
    reward: float | None = None
    """The rewards of an episode's steps are added up."""
    done: bool = False
    """Whether the game is over."""


def _call(function: Callable[..., Any], arguments: bytes, longest: int) -> tuple[str, str | None]:
    """The answer of a function, and `raised` if it is an exception's text."""
    try:
        return answer_text(function(**pickle.loads(arguments)))[:longest], None
    except MemoryError:
        raise  # the pool knows it, and replaces the worker
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return answer_text(f"error: {type(error).__name__}: {error}".removesuffix(": "))[:longest], "raised"


def call_each(
    target: Any, state: bytes | None, calls: Sequence[tuple[str, bytes]], longest: int
) -> tuple[bytes | None, list[tuple[str, str | None]], bool]:
    """The answers of a function, or without a function of an instance's methods, and its next state."""
    if state is None:
        return None, [_call(target, arguments, longest) for _, arguments in calls], False
    instance = pickle.loads(state)
    answers = [_call(getattr(instance, name), arguments, longest) for name, arguments in calls]
    return _dump(instance), answers, _is_done(instance)


def reset_instance(actor: type[Any], arguments: Mapping[str, Any], seed: int, longest: int) -> Advance:
    """The first state of a new instance, and what it shows."""
    random.seed(seed)  # for a class that draws without a generator of its own
    instance = actor()
    observation = instance.reset(**arguments) if hasattr(actor, "reset") else None
    return (
        _dump(instance),
        None if observation is None else answer_text(observation)[:longest],
        None,
        _is_done(instance),
    )


def step_instance(actor: type[Any], state: bytes, action: str, longest: int) -> Advance:
    """The state after an action, and what it led to."""
    instance = pickle.loads(state)
    result = instance.step(action)
    if isinstance(result, tuple) and len(result) == 3:
        result = Step(*result)
    if not isinstance(result, Step):
        raise OneLineError(f"returned {describe_value(result)}: return Step(observation, reward, done)")
    text = answer_text(result.observation)[:longest]
    return _dump(instance), text, _as_reward(result.reward), bool(result.done)


def reward_of(actor: type[Any] | None, state: bytes, episode: Completion) -> float | None:
    """The reward that an instance gives an episode."""
    instance = pickle.loads(state)
    takes_episode = bool(inspect.signature(instance.reward).parameters)
    return _as_reward(instance.reward(episode) if takes_episode else instance.reward())


def _dump(instance: Any) -> bytes:
    try:
        return pickle.dumps(instance)
    except MemoryError:
        raise
    except Exception as error:
        raise OneLineError(
            f"its state cannot be pickled: {type(error).__name__}: {error}; keep only values that pickle in its "
            "attributes, or leave the others out in __getstate__"
        ) from error


def _is_done(instance: Any) -> bool:
    done = getattr(instance, "done", False)
    return not callable(done) and bool(done)  # a tool may have that name


def _as_reward(value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise OneLineError(f"the reward is {describe_value(value)}: give a finite number, or None")
    return number
