"""Environments of episodes: they answer a policy's calls and actions in worker processes, and give rewards."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from flatpeak.episodes.instances import Advance, call_each, reset_instance, reward_of, step_instance
from flatpeak.episodes.instances import Step as Step
from flatpeak.episodes.tools import (
    ParsedCall,
    Tool,
    answer_text,
    check_arguments,
    check_importable,
    method_tools,
    read_tools,
)
from flatpeak.errors import UserError, did_you_mean
from flatpeak.rewards.workers.pool import WorkerError
from flatpeak.types import ToolCall
from flatpeak.utils.user_code import check_call, describe_value, load_object

if TYPE_CHECKING:
    from flatpeak.rewards.workers.pool import WorkerPool
    from flatpeak.runs.call_log import CallLog
    from flatpeak.types import Completion, Example, Score

T = TypeVar("T")
LONGEST_ANSWER: Final = 10_000
"""The most characters of an answer that leave a worker process, unless answers may have more tokens."""
_LOST: Final = {
    "timeout": "the call took too long and was ended",
    "memory": "the call ran out of memory",
    "died": "the call crashed",
}
"""The policy's answer to a call that cost its process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One episode's side of an environment, between two calls."""

    state: bytes | None = None
    """The pickled instance of the environment's class; None for functions."""
    rewards: tuple[float, ...] = ()
    """Those of a game's steps."""
    failed: str | None = None
    """The reason why the environment cannot go on; the episode ends, and its reward is missing."""
    done: bool = False
    """Whether the environment ended the episode."""
    key: int = 0
    """A hash of all that the policy has read and written: with the state, it is what a call's result depends on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The tools or the game of a policy: functions without state, or a class with one instance per episode."""

    tools: tuple[Tool, ...]
    """Empty for a game."""
    actor: type[Any] | None = None
    """The class; None for functions."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' schemas, for a chat template."""
        return [tool.schema for tool in self.tools]

    @property
    def is_game(self) -> bool:
        """Whether every message of the policy is an action."""
        return hasattr(self.actor, "step")

    @property
    def rewards(self) -> bool:
        """Whether it gives rewards itself."""
        return self.is_game or hasattr(self.actor, "reward")

    @property
    def rewards_turns(self) -> bool:
        """Whether its reward of an episode is the sum of those of its steps."""
        return self.is_game and not hasattr(self.actor, "reward")

    def reset_arguments(self, example: Example, *, seed: int) -> dict[str, Any]:
        """The arguments that `reset` asks for by name; UserError if the row lacks one."""
        if self.actor is None or not hasattr(self.actor, "reset"):
            return {}
        available = {**example.columns, "question": example.question, "gold": example.gold, "seed": seed}
        parameters = dict([*inspect.signature(self.actor.reset).parameters.items()][1:])
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return available
        for name, parameter in parameters.items():
            if name not in available and parameter.default is parameter.empty:
                raise UserError(
                    f"reset of environment {self.actor.__name__!r} has a parameter {name!r}, but row {example.id!r} "
                    f"has no such column: rename it or give it a default (columns: {', '.join(sorted(available))})"
                )
        return {name: available[name] for name in parameters if name in available}


def make_environment(
    tools: Sequence[Callable[..., Any] | str] = (), environment: type[Any] | str | None = None
) -> Environment:
    """The environment that functions make, or a class, either also by a name such as `file.py:name`.

    Of a class, each method whose name does not begin with `_` is a tool; or `step(self, action)` makes it a game, and
    returns a `Step` or (observation, reward, done). It may have `reset`, which gets `seed` and the row's columns by
    name and returns the first observation or None; `reward(self, episode)`, which replaces the sum of a game's rewards;
    and an attribute `done`. Instances are pickled after each call: all randomness must come from `seed` or be kept in
    attributes.
    """
    if environment is None:
        return Environment(tools=read_tools(tools))
    actor: Any = environment
    if isinstance(environment, str):
        actor = load_object(environment, where=f"environment {environment!r}")
    if not isinstance(actor, type):
        raise UserError(f"environment {environment!r} is {describe_value(actor)}: name a class, or use tools")
    where = f"environment {actor.__name__!r}"
    if tools:
        raise UserError(f"{where} and tools exclude each other: make the functions methods of the class")
    check_importable(actor, where=where)
    check_call(actor, given=(), arguments={}, where=where, key="__init__")
    for name, value in vars(actor).items():
        if isinstance(value, list | dict | set) and not name.startswith("_") and not name.isupper():
            raise UserError(
                f"{where}: all episodes would share the {type(value).__name__} {name!r} of the class: set it in "
                "__init__, or write its name in capitals if nothing changes it"
            )
    methods = method_tools(actor, leave_out=("reset", "reward", "step"))
    if not hasattr(actor, "step"):
        if not methods:
            raise UserError(f"{where} has neither tools nor step: define methods for the policy, or step(self, action)")
        return Environment(tools=methods, actor=actor)
    if methods:
        names = ", ".join(tool.name for tool in methods)
        raise UserError(f"{where} has both step and tools ({names}): remove step, or begin the other names with _")
    check_call(actor.step, given=("self", "action"), arguments={}, where=f"step of {where}", key="step")
    return Environment(tools=(), actor=actor)


class EnvironmentHost:
    """Episodes of one environment, served by any process of a pool."""

    def __init__(
        self, environment: Environment, pool: WorkerPool, *, call_timeout: float, longest_answer: int = LONGEST_ANSWER
    ) -> None:
        """`call_timeout` is in seconds: for a call of a function, or for a turn's calls of methods.

        `longest_answer`: the most characters of an answer that leave a worker process.
        """
        self._longest = longest_answer
        self.environment = environment
        self.first_failure: str | None = None
        """The reason why an environment was lost for the first time."""
        self.call_log: CallLog | None = None
        """The results of a run's calls; None outside a run."""
        self._pool = pool
        self._timeout = call_timeout
        self._tools = {tool.name: tool for tool in environment.tools}

    def start(self, example: Example, *, seed: int) -> Future[tuple[Session, str | None]]:
        """A new session, and the first observation if there is one. Equal seeds give equal sessions."""
        if self.environment.actor is None:
            return _when_done([], lambda: (Session(), None))
        arguments = self.environment.reset_arguments(example, seed=seed)
        return self._advance(Session(key=seed), "reset", reset_instance, (arguments, seed), lost=None)

    def step(self, session: Session, action: str) -> Future[tuple[Session, str]]:
        """Act in a game: the next session, and what the policy observes."""
        return self._advance(session, "step", step_instance, (session.state, action), lost="")

    def answer(self, session: Session, calls: Sequence[ParsedCall]) -> Future[tuple[Session, tuple[ToolCall, ...]]]:
        """Make the calls of one turn. A call that fails is answered with the reason.

        What costs a process costs no more than one call of a function, but the whole session of an environment.
        """
        actor = self.environment.actor
        checked = [self._check(call) for call in calls]
        sent = [index for index, content in enumerate(checked) if isinstance(content, bytes)]
        batches = [[index] for index in sent] if actor is None else [sent] if sent else []
        futures = [
            self._call(
                session,
                f"call {batch[0]}",
                partial(call_each, actor or self._tools[calls[batch[0]].name].function),
                session.state,
                [(calls[index].name, checked[index]) for index in batch],
                self._longest,
            )
            for batch in batches
        ]

        def answered() -> tuple[Session, tuple[ToolCall, ...]]:
            after, answers = session, {index: call for index, call in enumerate(checked) if isinstance(call, ToolCall)}
            for batch, future in zip(batches, futures, strict=True):
                result = _outcome(future)
                if not isinstance(result, WorkerError):
                    after = replace(session, state=result[0], done=result[2])
                elif actor is not None:
                    after = self._lost(session, ", ".join(calls[index].name for index in batch), result)
                for place, index in enumerate(batch):
                    answer = result if isinstance(result, WorkerError) else result[1][place]
                    answers[index] = _answered(calls[index], answer)
            return after, tuple(answers[index] for index in range(len(calls)))

        return _when_done(futures, answered)

    def finish(self, session: Session, episode: Completion) -> Future[Score]:
        """The environment's reward of an episode that has ended; None where it has none or has failed."""
        if session.failed is not None or not hasattr(self.environment.actor, "reward"):
            lost = session.failed is not None or not self.environment.is_game
            total = None if lost else float(sum(session.rewards))
            return _when_done([], lambda: total)
        # Without the sets of kept tokens, whose type would load torch in the worker.
        seen = replace(episode, kept=None)
        code = partial(reward_of, self.environment.actor)
        future = self._call(session, "reward", code, session.state, seen)

        def rewarded() -> Score:
            result = _outcome(future)
            if not isinstance(result, WorkerError):
                return result
            self._lost(session, "reward", result)
            return None

        return _when_done([future], rewarded)

    def _advance(
        self, session: Session, name: str, method: Callable[..., Advance], arguments: tuple[Any, ...], *, lost: T
    ) -> Future[tuple[Session, str | T]]:
        """The session after `reset` or `step`, and its text; `lost` where the environment is lost."""
        code = partial(method, self.environment.actor)
        future = self._call(session, name, code, *arguments, self._longest)

        def advanced() -> tuple[Session, str | T]:
            result = _outcome(future)
            if isinstance(result, WorkerError):
                return self._lost(session, name, result), lost
            state, text, reward, done = result
            rewards = session.rewards if reward is None else (*session.rewards, reward)
            return replace(session, state=state, rewards=rewards, done=done), lost if text is None else text

        return _when_done([future], advanced)

    def _call(self, session: Session, name: str, code: Callable[..., T], *arguments: Any) -> Future[T]:
        """The result of code in a worker process, kept before anyone reads it, or the one that was kept."""
        if self.call_log is None:
            return self._pool.submit(code, *arguments, timeout=self._timeout)
        log, content = self.call_log, f"{session.key} {name} ".encode() + (session.state or b"")
        key = blake2b(content, digest_size=16).hexdigest()
        if kept := log.take(key):
            return _when_done([], lambda: kept[0])
        future = self._pool.submit(code, *arguments, timeout=self._timeout)
        return _when_done([future], lambda: log.keep(key, future.result()))

    def _check(self, call: ParsedCall) -> bytes | ToolCall:
        """The pickled arguments of a call, or the answer to one that is wrong."""
        if call.error is not None:
            failure, text = "malformed", call.error
        elif call.name not in self._tools:
            hint = did_you_mean(call.name, self._tools)
            text = f"there is no tool {call.name!r}{hint}; the tools are: {', '.join(self._tools)}"
            failure = "unknown_tool"
        elif problem := check_arguments(self._tools[call.name], call.arguments):
            failure, text = "bad_arguments", problem
        else:
            return pickle.dumps(dict(call.arguments))
        return _answered(call, (f"error: {text}", failure))

    def _lost(self, session: Session, method: str, error: WorkerError) -> Session:
        text = f"{method} of environment {getattr(self.environment.actor, '__name__', '')!r}: {error}"
        self.first_failure = self.first_failure or text
        return replace(session, state=None, failed=text)


def _answered(call: ParsedCall, result: tuple[str, str | None] | WorkerError) -> ToolCall:
    if isinstance(result, WorkerError):
        result = (f"error: {_LOST.get(result.reason, str(result))}", result.reason)
    text, failure = result
    return ToolCall(name=call.name, arguments=dict(call.arguments), answer=answer_text(text), failure=failure)


def _outcome(future: Future[T]) -> T | WorkerError:
    """A call's result, or why there is none. UserError if the code cannot be loaded in a worker process."""
    try:
        return future.result()
    except UserError as error:  # of the user's own code
        return WorkerError("raised", str(error))
    except WorkerError as error:
        if error.reason != "unloadable":
            return error
        raise UserError(
            f"the tools or the environment cannot be loaded in a worker process: {error}; let them use only what a "
            "fresh process can import"
        ) from error


def _when_done(futures: Sequence[Future[Any]], build: Callable[[], T]) -> Future[T]:
    """The result of `build`, called once all futures are done."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # nobody can cancel it, so that it can always be set
    left, lock = len(futures), Lock()

    def count(_: Future[Any] | None) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left > 0:
                return
        try:
            result.set_result(build())
        except Exception as error:
            result.set_exception(error)

    for future in futures:
        future.add_done_callback(count)
    if not futures:
        count(None)
    return result
