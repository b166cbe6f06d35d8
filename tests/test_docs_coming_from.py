"""docs/coming_from.md is what its script writes, has every foreign name, and its Python trains."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

import flatpeak
from flatpeak.config.error_messages import known_keys
from flatpeak.config.foreign_names import FOREIGN_NAMES, translate
from flatpeak.config.load import load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.rewards.reward_set import as_reward
from flatpeak.tasks.dataset import task_of
from flatpeak.types import Completion, Group, Prompt

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "coming_from.md").read_text(encoding="utf-8")
TABLES = PAGE[PAGE.index("## Names of ") :]


@pytest.fixture
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DOCS))
    try:
        import make_coming_from

        yield make_coming_from
    finally:
        sys.path.remove(str(DOCS))


def test_the_page_is_what_its_script_writes(script: ModuleType) -> None:
    """Where this fails: `python docs/make_coming_from.py > docs/coming_from.md`."""
    assert script.page() == PAGE


def test_every_name_that_the_command_line_translates_is_on_the_page(script: ModuleType) -> None:
    listed = [name for names in script.PEERS.values() for name in names]
    on_page = {name for row in re.findall(r"^\| (`[^|]+) \|", TABLES, re.M) for name in re.findall(r"`([^`]+)`", row)}
    assert on_page == set(listed)
    reached = {end for name in listed for end in _endings(name)}
    ours = tuple(f"{section}." for section in RunConfig.model_fields)
    others = [key for key in FOREIGN_NAMES if not key.startswith(ours)]
    assert [key for key in others if not {key, key.partition("=")[0]} & reached] == []


def _endings(name: str) -> Iterator[str]:
    """The names under which the command line looks this name up."""
    key, equals, value = name.partition("=")
    words = key.split(".")
    yield f"{words[0]}.*"
    for start in range(len(words)):
        yield ".".join(words[start:]) + equals + value


def test_the_command_line_gives_the_answers_of_the_page(script: ModuleType) -> None:
    for name in {name for names in script.PEERS.values() for name in names}:
        key, _, value = name.partition("=")
        with pytest.raises(UserError) as error:
            parse_config(load_recipe("flatpeak:tasks/gsm8k", ["model.path=x", f"{key}={value or 7}"]))
        assert (translate(key.split("."), value) or script.SAME[name]) in str(error.value)


def test_a_name_that_the_command_line_does_not_know_has_no_row(script: ModuleType) -> None:
    assert set(script.SAME.values()) <= set(known_keys())
    with pytest.raises(KeyError):
        script.answer("no_such_name")


def test_a_value_has_an_answer_of_its_own(script: ModuleType) -> None:
    assert script.answer("scale_rewards") == "`advantage.scale`"
    assert script.answer("scale_rewards=none") == "`advantage.scale=none`"
    assert script.answer("advantage_estimator=gae").startswith("not in flatpeak: ")


def test_the_call_that_replaces_a_trl_script_has_settings_and_a_reward_that_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = Mock()
    monkeypatch.setattr(flatpeak, "train", train)
    (block,) = re.findall(r"^```py\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    exec(block, {})
    call = train.call_args.kwargs
    assert set(call["settings"]) <= set(known_keys())
    example = task_of(call["dataset"]).train[0]
    completions = tuple(
        Completion(token_ids=(0,), logprobs=(0.0,), finish_reason="stop", text=text)
        for text in (f"It is {example.gold}.", "I do not know.")
    )
    for messages in (None, ({"role": "user", "content": example.question},)):
        prompt = Prompt(id="0", token_ids=(0,), text=example.question, example=example, messages=messages)
        scores = as_reward(call["reward"])([Group(prompt=prompt, completions=completions)])
        assert [list(row) for row in scores.total] == [[1.0, 0.0]]
