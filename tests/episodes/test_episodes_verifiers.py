"""Environments of the package verifiers: episodes have the answers and the rewards of its own rollouts."""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatpeak.config.load import merge
from flatpeak.episodes import verifiers
from flatpeak.episodes.environments import EnvironmentHost, make_environment
from flatpeak.episodes.instances import reset_instance, step_instance
from flatpeak.errors import UserError
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.utils.user_code import OneLineError, load_object
from support.episodes import Scripted, asked, draw, sampler_of
from support.runs import Recipe, Train

vf: Any = pytest.importorskip("verifiers", exc_type=ImportError)
if not hasattr(vf, "MultiTurnEnv"):
    pytest.skip("verifiers 0.4 has no environments that answer turns", allow_module_level=True)

CODE = '''
import itertools
import random

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b), "info": {"a": a}} for a in range(5) for b in range(4)]
TRIES = itertools.count()


def even(completion, info):
    return sum(len(one["content"]) % 2 == 0 for one in completion if one["role"] == "assistant") + info["a"] / 10


async def seen(completion, answer, state):
    answers = "".join(one["content"] for one in completion if one["role"] != "assistant")
    return len(state["trajectory"]) + len(answers) / 100 + state["is_truncated"] / 1000 + int(answer) / 10_000


class Count(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["open"] = (one for one in "abc")  # it cannot be pickled
        state["lengths"] = []

    async def env_response(self, messages, state, **kwargs):
        state["lengths"].append(len(messages[-1]["content"]))
        if len(state["lengths"]) == 3:
            state["final_env_response"] = [vf.UserMessage(content="the end")]
        return [vf.UserMessage(content=f"{next(state['open'])}{sum(state['lengths'])}" + "!" * state["info"]["a"])]


class Twice(Count):
    async def env_response(self, messages, state, **kwargs):
        return 2 * await super().env_response(messages, state)


class Prompting(Count):
    async def setup_state(self, state):
        state["prompt"] = [vf.UserMessage(content="another")]
        return await super().setup_state(state)


class Drifting(Count):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content=str(next(TRIES)))]


class Keys(vf.StatefulToolEnv):
    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        state["uses"] = state.get("uses", 0) + 1
        return {**tool_args, "uses": state["uses"]}


class Drawing(Count):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content=str(random.random()))]


class Boxed(vf.SandboxEnv):
    def __init__(self, **given):
        vf.MultiTurnEnv.__init__(self, **given)

    def __post_init__(self): ...  # without a sandbox, nothing is to be ended


async def look(name: str, uses: int) -> str:
    """Look up.

    Args:
        name: The key.
    """
    return f"{name}{uses}" if name else 1 // 0


def done() -> str:
    """End the game."""
    return "over"


def ranked(completions):
    return [0.0 for _ in completions]


def load_environment(kind="single", system=None, rubric=None):
    rows = Dataset.from_list(ROWS)
    rubrics = {"group": lambda: vf.Rubric(funcs=[ranked]), "judge": lambda: vf.RubricGroup([vf.JudgeRubric()])}
    rubric = rubrics[rubric]() if rubric else vf.Rubric(funcs=[even, seen], weights=[0.5, 2.0])
    given = {"dataset": rows, "system_prompt": system, "rubric": rubric}
    if kind == "keys":
        source = Keys(max_turns=5, **given)
        source.add_tool(look, args_to_skip=["uses"])
        return source
    if kind == "done":
        return vf.ToolEnv(tools=[done], **given)
    if kind == "group":
        return vf.EnvGroup([vf.SingleTurnEnv(**given)])
    if kind == "single":
        return vf.SingleTurnEnv(eval_dataset=rows.select(range(2)), **given)
    kinds = (Count, Twice, Prompting, Drifting, Drawing, Boxed)
    return {one.__name__.lower(): one for one in kinds}[kind](max_turns=6, **given)
'''
SECTIONS: dict[str, Any] = {
    "model": {"new": {"tokenizer": {"type": "characters"}, "config": {"max_position_embeddings": 128}}},
    "episodes": {"max_tokens": 4},
    "rollout": {"max_new_tokens": 60},
    "training": {"steps": 3},
    "rewards": {"rubric": {"type": "environment"}},
    "evaluation": {"accuracy": None, "metric": "reward"},
}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with environments."""
    path = tmp_path_factory.mktemp("code") / "counting.py"
    path.write_text(CODE)
    return str(path)


def played(code: str, row: Any, turns: Sequence[Any], *, cut: bool = False, **arguments: Any) -> Any:
    """The output of the package's own rollout, with a policy that writes these messages and then has no room left."""
    from verifiers.clients import Client
    from verifiers.types import AssistantMessage, Response, ResponseMessage

    left = list(turns)

    class Policy(Client):  # type: ignore[misc]
        async def to_native_prompt(self, messages: Any) -> Any:
            return messages, {}

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
            if not left:
                raise vf.OverlongPromptError
            return left.pop(0)

        async def from_native_response(self, response: Any) -> Any:
            message = AssistantMessage.model_validate(response)
            ending = {"finish_reason": "stop", "is_truncated": cut and not left}
            return Response(id="", created=0, model="", message=ResponseMessage(**message.model_dump(), **ending))

        def setup_client(self, config: Any) -> Any: ...
        async def raise_from_native_response(self, response: Any) -> None: ...
        async def close(self) -> None: ...

    source = verifiers.environment(code, **arguments)[1]._source
    return asyncio.run(source.run_rollout(row, Policy(None), "policy", {}))


def logged(run: Any) -> list[dict[str, Any]]:
    """All logged completions of a run that has changed the policy in three steps."""
    metrics = [json.loads(line) for line in (Path(run.path) / "metrics.jsonl").read_text().splitlines()]
    norms = [row["policy/grad_norm"] for row in metrics if row["stage"] == "train"]
    assert len(norms) == 3
    assert max(norms) > 0
    files = sorted((Path(run.path) / "rollouts").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def texts(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """The roles and the contents of messages."""
    return [(message["role"], message["content"]) for message in messages]


def said(turns: Sequence[Any]) -> list[tuple[str, str]]:
    """The roles and the texts of logged turns and the answers between them."""
    return [pair for turn in turns for pair in (("assistant", turn["text"]), ("user", turn["answer"]))][:-1]


@pytest.mark.slow
def test_a_single_turn_environment_is_trained_on_with_the_rewards_of_its_rubric(
    train: Train, recipe: Recipe, code: str
) -> None:
    rows, actor = verifiers.environment(code, system="Be brief.")
    assert (len(rows["train"]), len(rows["test"])) == (20, 2)
    done = logged(train(recipe(**SECTIONS), dataset=rows, environment=actor, progress=False))
    assert len(done) == 48
    for one in done:
        row = rows["train"][int(one["group"].removeprefix("train/"))]["row"]
        assert one["prompt"] == f"system: Be brief.\n\nuser: {row['question']}"
        cut = one["finish_reason"] == "length"
        output = played(code, row, [{"content": one["text"]}], cut=cut, system="Be brief.")
        assert texts(output["completion"]) == said(one["turns"])
        assert output["reward"] == pytest.approx(
            0.5 * ((len(one["text"]) % 2 == 0) + row["info"]["a"] / 10)
            + 2.0 * (1 + cut / 1000 + int(row["answer"]) / 10_000)
        )
        assert one["reward"] == pytest.approx(output["reward"])


@pytest.mark.slow
def test_the_turns_of_an_environment_in_a_recipe_are_answered_and_rewarded_as_the_package_does(
    train: Train, recipe: Recipe, code: str
) -> None:
    task = {"type": "custom", "factory": "flatpeak.episodes.verifiers:task", "arguments": {"name": code}}
    sections = merge(
        SECTIONS, {"environment": f"flatpeak.episodes.verifiers:{code}?kind=count", "rollout": {"max_new_tokens": 53}}
    )
    config = recipe(**sections, task=None)
    config["task"] = merge(task, {"arguments": {"kind": "count"}})
    done = logged(train(config, progress=False))
    rows = verifiers.environment(code, kind="count")[0]["train"]
    assert {one["stop_reason"] for one in done} == {"done", "max_tokens"}
    for one in done:
        row = rows[int(one["group"].rpartition("/")[2])]["row"]
        cut = one["finish_reason"] == "length"
        output = played(code, row, [{"content": turn["text"]} for turn in one["turns"]], cut=cut, kind="count")
        ending = [("user", "the end")] if len(one["turns"]) == 3 else []
        assert texts(output["completion"]) == said(one["turns"]) + ending
        assert one["reward"] == pytest.approx(output["reward"])


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """A process that episodes are in."""
    with WorkerPool(1, timeout=30.0) as pool:
        yield pool


@pytest.mark.parametrize("misspelt", [False, True])
def test_tools_are_called_with_what_the_environment_adds_to_their_arguments(
    code: str, pool: WorkerPool, misspelt: bool
) -> None:
    rows, actor = verifiers.environment(code, kind="keys")
    environment = make_environment(environment=actor)
    (schema,) = environment.schemas
    name = {"type": "string", "description": "The key."}
    assert schema["function"]["parameters"] == {"type": "object", "properties": {"name": name}, "required": ["name"]}
    turns = ["<call>look(name='a')</call>", "so <call>look(name='')</call>", "<call>look(name='c')</call>", "abc"]
    if misspelt:  # flatpeak answers it: the environment never sees it
        turns.insert(1, "<call>look(nam='b')</call>")
    host = EnvironmentHost(environment, pool, call_timeout=30.0)
    sampler = sampler_of(Scripted(lambda name, _: turns[int(name.rpartition(".")[2]) if "#" in name else 0]), host)
    row = rows["train"][7]["row"]
    prompt = asked("q")
    prompt = replace(prompt, example=replace(prompt.example, columns={"row": row}))
    ((episode,),) = (group.completions for group in draw(sampler, [prompt], max_new_tokens=400))
    answers = [turn.answer for turn in episode.turns]
    assert answers[1].startswith("error: look has no argument 'nam'") == misspelt
    assert [answers[0], *answers[1 + misspelt :]] == ["a1", "integer division or modulo by zero", "c3", ""]
    del turns[1 : 1 + misspelt]
    calls = [
        {"id": f"{index}", "name": "look", "arguments": json.dumps({"name": name})} for index, name in enumerate("a c")
    ]
    calls[1]["arguments"] = '{"name": ""}'
    wrote = [{"content": text, "tool_calls": [call]} for text, call in zip(turns, calls, strict=False)]
    output = played(code, row, [*wrote, {"content": "abc"}], kind="keys")
    assert episode.reward == output["reward"] > 8


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rubric": "group"}, "cannot be served: its rubric compares the rollouts of a group"),
        ({"rubric": "judge"}, "cannot be served: its rubric asks a judge; flatpeak has its own"),
        ({"kind": "boxed"}, "cannot be served: its tools run in a sandbox, and each turn would run them again"),
        ({"kind": "done"}, "cannot be served: rename its tools done, whose names flatpeak uses"),
        ({"kind": "group"}, "is EnvGroup <"),
        ({"kind": "none"}, "does not load: KeyError: 'none' ("),
        ({"sort": "x"}, "does not load: TypeError: load_environment() got an unexpected keyword argument 'sort'"),
    ],
)
def test_an_environment_that_cannot_be_served_is_refused_in_one_line(
    code: str, arguments: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with pytest.raises(UserError) as refused:
        verifiers.environment(code, **arguments)
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(
        UserError, match=r"verifiers environment 'owner/no-such-env': cannot import module 'no_such_env'"
    ):
        verifiers.environment("owner/no-such-env")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("twice", "it goes on with [('user', 'a2'), ('user', 'a2')], and not with one text after each turn"),
        ("prompting", "it goes on with another conversation than that of the prompt, turns and answers so far"),
        ("drifting", "it goes on with another conversation than that of the prompt, turns and answers so far"),
    ],
)
def test_a_conversation_that_an_episode_cannot_follow_fails_with_the_reason(code: str, kind: str, text: str) -> None:
    rows, actor = verifiers.environment(code, kind=kind)

    def play() -> None:
        state = reset_instance(actor, {"row": rows["train"][0]["row"], "seed": 1}, 1, 100)[0]
        for action in ("ab", "abc"):
            state = step_instance(actor, state, action, 100)[0]

    with pytest.raises(OneLineError) as failed:
        play()
    assert str(failed.value) == text


def test_what_an_environment_draws_depends_on_the_seed_of_its_episode(code: str) -> None:
    rows, actor = verifiers.environment(code, kind="drawing")

    def play(seed: int) -> list[str | None]:
        state = reset_instance(actor, {"row": rows["train"][0]["row"], "seed": seed}, seed, 100)[0]
        answers: list[str | None] = []
        for action in ("ab", "abc", "a"):
            state, answer, *_ = step_instance(actor, state, action, 100)
            answers.append(answer)
        return answers

    assert play(1) == play(1) != play(2)
    assert len({*play(1), *play(2)}) == 6


@pytest.mark.parametrize("system", ["1.5", "Be brief & kind?"])
def test_a_class_is_found_by_its_name_and_the_handlers_of_signals_stay(code: str, system: str) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    actor = verifiers.environment(code, kind="count", system=system)[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert pickle.loads(pickle.dumps(actor)) is actor
    assert load_object(f"{actor.__module__}:{actor.__qualname__}", where="") is actor
    assert actor._source.system_prompt == system
