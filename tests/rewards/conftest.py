"""Small prompts, completions and groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flatpeak.types import Completion, Example, Group, Prompt


def _completion(text: str = "", *, tokens: int = 1) -> Completion:
    return Completion(token_ids=tuple(range(tokens)), logprobs=(0.0,) * tokens, finish_reason="stop", text=text)


def _prompt(
    gold: str = "18",
    *,
    id: str = "row-1",
    text: str = "How many?",
    messages: Sequence[dict[str, str]] | None = None,
    **columns: Any,
) -> Prompt:
    example = Example(id=id, question="How many?", gold=gold, columns=columns)
    return Prompt(
        id=id, token_ids=(0,), text=text, example=example, messages=None if messages is None else tuple(messages)
    )


@pytest.fixture
def completion() -> Callable[..., Completion]:
    return _completion


@pytest.fixture
def prompt() -> Callable[..., Prompt]:
    return _prompt


@pytest.fixture
def group() -> Callable[..., Group]:
    def make(*texts: str, gold: str = "18", id: str = "row-1", **fields: Any) -> Group:
        return Group(prompt=_prompt(gold, id=id, **fields), completions=tuple(_completion(text) for text in texts))

    return make
