from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from flatpeak.episodes.environments import make_environment
from flatpeak.episodes.tools import answer_text, check_arguments, read_tools
from flatpeak.errors import UserError


def find(
    query: str,
    limit: int = 3,
    ranks: list[float] | None = None,
    order: Literal["up", "down"] = "up",
    exact: bool = False,
    where: dict[str, int] | None = None,
    extra: dict = {},  # type: ignore[type-arg]  # noqa: B006
) -> list[str]:
    """Find pages.

    The best come first.

    Args:
        query: What to look for,
            on one line.
        limit (int, optional): The most pages.

    Returns:
        Their titles.
    """
    return []


def plain(x: float) -> float:
    """Halve a number."""
    return x / 2


def test_a_schema_follows_from_type_hints_and_the_docstring() -> None:
    (tool,) = read_tools([find])
    assert tool.name == "find"
    assert tool.function is find
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find pages.\n\nThe best come first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for, on one line."},
                    "limit": {"type": "integer", "default": 3, "description": "The most pages."},
                    "ranks": {"type": "array", "items": {"type": "number"}, "nullable": True},
                    "order": {"type": "string", "enum": ["up", "down"], "default": "up"},
                    "exact": {"type": "boolean", "default": False},
                    "where": {"type": "object", "additionalProperties": {"type": "integer"}, "nullable": True},
                    "extra": {"type": "object"},
                },
                "required": ["query"],
            },
        },
    }
    assert read_tools([plain])[0].schema["function"]["description"] == "Halve a number."


def test_a_file_of_the_user_holds_tools(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from __future__ import annotations\ndef add(a: int, b: int) -> int:\n    return a + b\n")
    (tool,) = read_tools([f"{file}:add"])
    assert tool.function is not None
    assert tool.function(a=1, b=2) == 3
    assert tool.schema["function"]["parameters"]["required"] == ["a", "b"]


def no_hint(x) -> None:  # type: ignore[no-untyped-def]
    pass


def starred(*x: int) -> None:
    pass


def positional(x: int, /) -> None:
    pass


def odd(x: complex) -> None:
    pass


def two_types(x: int | str) -> None:
    pass


async def later(x: int) -> None:
    pass


def unresolved(x: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


def script() -> None:
    pass


script.__module__ = "__main__"


@pytest.mark.parametrize(
    ("functions", "text"),
    [
        ([], "there are no tools: name at least one"),
        ([no_hint], "tool 'no_hint': parameter 'x' has no type hint: write one of str, int"),
        ([starred], "parameter 'x' cannot be given by name: write parameters without"),
        ([positional], "parameter 'x' cannot be given by name: write parameters without"),
        ([odd], "has a type that JSON calls cannot fill, complex: write one of"),
        ([two_types], "has a type that JSON calls cannot fill, int | str: write one of"),
        ([later], "tool 'later' is async: define it with def alone"),
        ([unresolved], "tool 'unresolved': its type hints cannot be read: NameError"),
        ([plain, plain], "two tools have the name 'plain': rename one"),
        ([lambda: 1], "tool '<lambda>' has no name to call it by: define it with def in a file"),
        ([script], "tool 'script' cannot go to a worker process: define it at the top level of a file"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_the_fix(functions: list[Callable[..., Any]], text: str) -> None:
    with pytest.raises(UserError) as caught:
        read_tools(functions)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"query": "x"}, None),
        ({"query": "x", "ranks": [1, 2.5], "where": None, "extra": {"a": [None]}}, None),
        ({"querry": "x"}, "find has no argument 'querry'; its arguments are: query, limit, ranks, order"),
        ({"limit": 3}, "find needs the argument 'query'"),
        ({"query": 3}, "argument 'query' must be of type string, not integer"),
        ({"query": None}, "argument 'query' must be of type string, not null"),
        ({"query": "x", "limit": 2.5}, "argument 'limit' must be of type integer, not number"),
        ({"query": "x", "limit": True}, "argument 'limit' must be of type integer, not boolean"),
        ({"query": "x", "exact": 1}, "argument 'exact' must be of type boolean, not integer"),
        ({"query": "x", "ranks": [1, "2"]}, "a value of argument 'ranks' must be of type number, not string"),
        ({"query": "x", "where": {"a": "b"}}, "a value of argument 'where' must be of type integer, not string"),
        ({"query": "x", "order": "best"}, 'argument \'order\' must be one of ["up", "down"]'),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments: dict[str, Any], problem: str | None) -> None:
    (tool,) = read_tools([find])
    found = check_arguments(tool, arguments)
    assert found is None if problem is None else str(found).startswith(problem)


class Array:
    def tolist(self) -> list[int]:
        return [1, 2]


def test_answers_are_texts_of_whole_characters() -> None:
    assert answer_text("as it is\n") == "as it is\n"
    assert answer_text(None) == ""
    assert answer_text({"ä": [1, 2.5, None, True]}) == '{"ä": [1, 2.5, null, true]}'
    assert answer_text(b"ok \xff") == "ok \ufffd"
    assert answer_text("half \ud800") == "half ?"
    assert answer_text(["\ud800"]) == '["?"]'
    assert answer_text(Array()) == "[1, 2]"
    assert answer_text({Path("a"): 1}) == "{PosixPath('a'): 1}"
    assert answer_text([Path("a")]) == '["a"]'
    itself: list[Any] = []
    itself.append(itself)
    assert answer_text(itself) == "[[...]]"


class Both:
    def step(self, action: str) -> Any: ...
    def look(self) -> None: ...


class Neither:
    def reset(self) -> None: ...


class NoAction:
    def step(self) -> Any: ...


class NoHint:
    def look(self, x) -> None: ...  # type: ignore[no-untyped-def]


class Shared:
    seen: list[str] = []  # noqa: RUF012

    def look(self) -> None: ...


class Needs:
    def __init__(self, size: int) -> None: ...
    def look(self) -> None: ...


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (Both, "environment 'Both' has both step and tools (look): remove step, or begin the other names with _"),
        (Neither, "environment 'Neither' has neither tools nor step: define methods for the policy"),
        (NoAction, "step of environment 'NoAction': too many positional arguments; let it take (self, action)"),
        (NoHint, "parameter 'x' has no type hint: write one of"),
        (NoHint, "; begin its name with _ if it is not for the policy"),
        (Shared, "all episodes would share the list 'seen' of the class: set it in __init__"),
        (Needs, "environment 'Needs': missing a required argument: 'size'; change __init__"),
        ("os:getpid", "environment 'os:getpid' is builtin_function_or_method"),
        (type("Local", (), {"look": lambda self: None}), "cannot go to a worker process: define it at the top level"),
    ],
)
def test_what_cannot_be_an_environment_is_refused_with_the_fix(environment: Any, text: str) -> None:
    with pytest.raises(UserError) as caught:
        make_environment(environment=environment)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tools_and_an_environment_exclude_each_other() -> None:
    with pytest.raises(UserError, match=r"'Neither' and tools exclude each other: make the functions methods"):
        make_environment([len], Neither)
