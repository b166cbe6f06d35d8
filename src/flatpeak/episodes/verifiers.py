"""Environments of the package `verifiers`, before its version 0.4: their rows, turns, tools and rubrics.

```
from flatpeak.episodes import verifiers

rows, MyEnv = verifiers.environment("my_env.py", size=100)
flatpeak.train("recipe.yaml", dataset=rows, environment=MyEnv)
```

In a recipe, `environment: flatpeak.episodes.verifiers:my_env.py?size=100` is the class, and `task` a factory of rows.

An episode keeps its turns alone. To answer one, the environment's own rollout runs over all of them, with a client that
gives the policy's turns again and stops at the next one. So nothing of the environment's has to pickle, and its loop,
its stop conditions and its rubric are the package's.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final
from urllib.parse import parse_qsl, urlencode

import yaml

from flatpeak.errors import UserError
from flatpeak.protocols import Task
from flatpeak.tasks.dataset import task_of
from flatpeak.types import Completion, ToolCall, Turn
from flatpeak.utils.user_code import OneLineError, describe_value, load_object, one_line

Texts = list[tuple[str, Any]]
"""The role and the content of messages."""
REFUSED: Final = ("malformed", "unknown_tool", "bad_arguments")
"""The failures of calls that flatpeak answers itself."""
_DOT: Final = "%2E"
"""A dot in the name of a class, where pickle would look for a nested class."""


def environment(name: str, **arguments: Any) -> tuple[dict[str, list[dict[str, Any]]], Any]:
    """The rows of an environment, by `train` and `test`, and its class. UserError if flatpeak cannot serve it.

    `name` is a package's, a module's or a file's, and the arguments are those of its `load_environment`.
    """
    query = urlencode({key: json.dumps(value) for key, value in arguments.items()})
    actor = __getattr__(f"{name}?{query}" if query else name)
    datasets = {"train": actor._source.build_dataset(), "test": actor._source.build_eval_dataset()}
    given = {side: dataset for side, dataset in datasets.items() if dataset is not None}
    return {side: [{"prompt": row["prompt"], "row": row} for row in rows] for side, rows in given.items()}, actor


def task(name: str, **arguments: Any) -> Task:
    """The rows of an environment, as a task of the type `custom`."""
    return task_of(environment(name, **arguments)[0])


def __getattr__(name: str) -> Any:
    """The class of an environment, in any process: `name` or `name?argument=value&argument=value`."""
    if name.startswith("_"):
        raise AttributeError(name)
    return _actor(name.replace(".", _DOT))


class _TurnNeededError(Exception):
    """The request for a turn that the policy has not written yet; its argument is the conversation."""


class _Episode:
    """An episode of the environment `_source`."""

    _source: ClassVar[Any]
    done = False

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Begin with a row of the dataset."""
        self._row, self._seed, self._turns = row, seed, list[Turn]()
        self._conversation: Texts = [(message["role"], message["content"]) for message in row["prompt"]]
        self._advance()

    def reward(self, episode: Completion) -> float:
        """The reward that the rubric gives."""
        random.seed(self._seed)
        client = _client(_reached(episode.turns), cut=episode.finish_reason == "length")
        return float(asyncio.run(self._source.run_rollout(self._row, client, "flatpeak", {}))["reward"])

    def _advance(self, *turns: Turn) -> Any:
        """The environment's answer to a turn; without a turn, only the check that it begins with the prompt."""
        self._turns += turns
        self._conversation += [("assistant", turn.text) for turn in turns]
        random.seed(self._seed)
        try:
            asyncio.run(self._source.rollout(self._row, _client(self._turns, self._conversation), "flatpeak", {}))
        except _TurnNeededError as request:
            answers: Texts = request.args[0][len(self._conversation) :]
            roles = [role for role, content in answers if isinstance(content, str)]
            if roles != ["tool" if turn.calls else "user" for turn in turns]:
                raise OneLineError(f"it goes on with {answers!r:.60}, and not with one text after each turn") from None
            self._conversation += answers
            return answers[0][1] if answers else ""
        self.done = True
        return ""


class _Game(_Episode):
    """An episode in which each turn is answered."""

    def step(self, action: str) -> tuple[str, None, bool]:
        """Answer a turn, without a reward: the rubric gives one at the end."""
        return self._advance(Turn(sampled=0, text=action)), None, self.done


@functools.cache
def _actor(name: str) -> type[_Episode]:
    reference, _, query = name.replace(_DOT, ".").partition("?")
    source = _load(reference, {key: yaml.safe_load(value) for key, value in parse_qsl(query, keep_blank_values=True)})
    tools = {tool: _method(source, tool) for tool in getattr(source, "tool_map", ())}
    return type(name, (_Episode if tools else _Game,), {**tools, "__module__": __name__, "_source": source})


def _method(source: Any, name: str) -> Callable[..., Any]:
    """A method with the parameters of a tool that the policy may set."""
    function, hidden = source.tool_map[name], getattr(source, "skipped_args", {}).get(name, ())

    @functools.wraps(function)
    def call(self: _Episode, **arguments: Any) -> Any:
        return self._advance(Turn(sampled=0, calls=(ToolCall(name=name, arguments=arguments),)))

    signature = inspect.signature(function)
    visible = [parameter for parameter in signature.parameters.values() if parameter.name not in hidden]
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    call.__signature__ = signature.replace(parameters=[this, *visible])  # type: ignore[attr-defined]
    return call


def _reached(turns: Sequence[Turn]) -> list[Turn]:
    """The turns as the environment saw them: calls that cannot be made are answered without it."""
    reached = [replace(turn, calls=tuple(call for call in turn.calls if call.failure not in REFUSED)) for turn in turns]
    return [now for now, turn in zip(reached, turns, strict=True) if now.calls or not turn.calls]


def _load(reference: str, arguments: dict[str, Any]) -> Any:
    """The environment; UserError if it is missing, or if flatpeak cannot serve it."""
    where = f"verifiers environment {reference!r}"
    try:
        from verifiers import JudgeRubric, MultiTurnEnv, SandboxEnv
    except ImportError as error:
        raise UserError(f"{where} needs verifiers before 0.4 ({error}): pip install 'flatpeak[verifiers]'") from error
    module = reference if reference.endswith(".py") else reference.rpartition("/")[2].replace("-", "_")
    factory = load_object(f"{module}:load_environment", where=where)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        source = factory(**arguments)
    except Exception as error:
        raise UserError(f"{where} does not load: {one_line(error)}") from error
    finally:
        for number, handler in handlers.items():  # each Environment takes them over
            signal.signal(number, handler)
    if not isinstance(source, MultiTurnEnv):
        raise UserError(f"{where} is {describe_value(source)}, and no MultiTurnEnv; of a group, load each by itself")
    rubrics = [source.rubric, *getattr(source.rubric, "rubrics", ())]
    taken = [tool for tool in getattr(source, "tool_map", ()) if tool.startswith("_") or hasattr(_Game, tool)]
    obstacles = {
        f"rename its tools {', '.join(taken)}, whose names flatpeak uses": taken,
        "its tools run in a sandbox, and each turn would run them again": isinstance(source, SandboxEnv),
        "its rubric compares the rollouts of a group": source.requires_group_rollouts,
        "its rubric asks a judge; flatpeak has its own": any(isinstance(rubric, JudgeRubric) for rubric in rubrics),
    }
    for obstacle in (obstacle for obstacle, present in obstacles.items() if present):
        raise UserError(f"{where} cannot be served: {obstacle}")
    return source


def _client(turns: Sequence[Turn], conversation: Texts | None = None, *, cut: bool = False) -> Any:
    """A client that gives the turns, and then raises _TurnNeededError; without a conversation it ends the rollout.

    `cut`: the last turn was cut at a limit.
    """
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage
    from verifiers.types import ToolCall as Call

    numbered = enumerate(turns, start=1)

    async def get_response(prompt: Any, **_: Any) -> Any:
        texts = [(message["role"], message["content"]) for message in prompt]
        if conversation is not None and texts[: len(conversation)] != conversation[: len(texts)]:
            raise OneLineError("it goes on with another conversation than that of the prompt, turns and answers so far")
        number, turn = next(numbered, (0, None))
        if turn is None:
            raise OverlongPromptError if conversation is None else _TurnNeededError(texts)
        calls = [
            Call(id=f"{number}.{index}", name=call.name, arguments=json.dumps(dict(call.arguments)))
            for index, call in enumerate(turn.calls)
        ]
        last = cut and number == len(turns)
        message = ResponseMessage(
            content=turn.text, tool_calls=calls or None, finish_reason="length" if last else "stop", is_truncated=last
        )
        return Response(id="", created=0, model="flatpeak", message=message)

    client = OpenAIChatCompletionsClient(None)
    client.get_response = get_response
    return client
