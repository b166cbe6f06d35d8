"""The calls in the text of a turn, in each form in which policies write them.

Nothing that is read is evaluated. A call that cannot be read has an error, which becomes its answer.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from flatpeak.episodes.tools import ParsedCall
from flatpeak.utils.answers import THINK_CLOSE, THINK_OPEN

Schemas = Sequence[Mapping[str, Any]]
"""The schemas of the tools."""
CallReader = Callable[[str, str, Schemas], tuple[ParsedCall, ...]]
"""Reads the calls of a turn, which is given also without its special tokens."""
_REASONING: Final = rf"{THINK_OPEN}.*?(?:{THINK_CLOSE}|\Z)"
_THOUGHT: Final = re.compile(_REASONING, re.DOTALL)
_OPENING: Final = re.compile(rf"{_REASONING}|(?P<call><tool_call>)", re.DOTALL)
_VALUE: Final = r"((?:[^<\n]++|\n|<(?!/tool_call>\s*<tool_call>))*?)"
_PLAIN_BLOCK: Final = re.compile(r"<call>(?P<call>(?:(?!<call>).)*?)(?P<end></call>|\Z)", re.DOTALL)
_JSON_BLOCK: Final = re.compile(rf"{_REASONING}|<tool_call>(?P<call>.*?)(?P<end></tool_call>|\Z)", re.DOTALL)
_LIST_BLOCK: Final = re.compile(
    rf"{_REASONING}|<\|tool_call_start\|>(?P<call>.*?)(?P<end><\|tool_call_end\|>|\Z)", re.DOTALL
)
_WHOLE_TURN: Final = re.compile(r"(<\|python_tag\|>|\[TOOL_CALLS\])?\s*(.*)", re.DOTALL)
_PLAIN_FORM: Final = 'Write a call as <call>name(x=1, y="a")</call>: arguments by name, and their values written out.'
_JSON_FORM: Final = 'Write a call as <tool_call>{"name": "...", "arguments": {...}}</tool_call> with valid JSON.'
_LIST_FORM: Final = 'Write calls as <|tool_call_start|>[name(x=1, y="a")]<|tool_call_end|>: arguments by name.'
DEEPEST: Final = 100
"""Levels of the arguments of a call: logs, copies and worker processes take each apart by recursion."""
_UNREADABLE: Final = (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError)
"""The errors of parsers for text that is not in their form."""


def plain_calls(text: str) -> tuple[ParsedCall, ...]:
    """The calls in running text, in Python's syntax."""
    return _in_blocks(_PLAIN_BLOCK, text, _PLAIN_FORM, lambda body: [_python_call(_expression(body), _PLAIN_FORM)])


def json_calls(text: str, bare: str, schemas: Schemas) -> tuple[ParsedCall, ...]:
    """The calls as JSON in tags, or as the whole turn: Qwen2.5, Qwen3, Hermes, Llama 3."""
    if calls := _in_blocks(_JSON_BLOCK, text, _JSON_FORM, _from_json):
        return calls
    marked, body = (_WHOLE_TURN.fullmatch(_THOUGHT.sub("", one).strip()) for one in (text, bare))
    calls = _in_block(body[2], _JSON_FORM, _from_json) if body and body[2][:1] in ("{", "[") else ()
    # Without a mark, other JSON is an answer.
    return calls if (marked and marked[1]) or all(call.error is None for call in calls) else ()


def list_calls(text: str, bare: str, schemas: Schemas) -> tuple[ParsedCall, ...]:
    """The calls in lists in Python's syntax, whose values may be JSON: LFM2."""
    return _in_blocks(_LIST_BLOCK, text, _LIST_FORM, _from_list)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tags:
    """A form of calls with each value as text between tags.

    A value ends at its closing tag only where another argument or the end of the call follows, so that it may itself
    contain tags, but not the end of a call and the beginning of the next one.
    """

    name: re.Pattern[str]
    argument: re.Pattern[str]
    end: re.Pattern[str]
    form: str

    def calls(self, text: str, bare: str, schemas: Schemas) -> tuple[ParsedCall, ...]:
        """The calls in a turn."""
        calls, place = list[ParsedCall](), 0
        while opening := _OPENING.search(text, place):
            place = opening.end()
            if opening["call"]:
                call, place = self._call(text, place, schemas)
                calls.append(call)
        return tuple(calls)

    def _call(self, text: str, start: int, schemas: Schemas) -> tuple[ParsedCall, int]:
        """The call after an opening tag, and the place where it ends."""
        if name := self.name.match(text, start):
            functions = [one["function"] for one in schemas if one["function"]["name"] == name[1]]
            types = functions[0]["parameters"]["properties"] if functions else {}
            arguments, place = {}, name.end()
            while argument := self.argument.match(text, place):
                arguments[argument[1]] = _typed(argument[2], types.get(argument[1], {}))
                place = argument.end()
            if end := self.end.match(text, place):
                return _in_block(name[1], self.form, lambda name: [_checked(name, arguments)])[0], end.end()
        place = text.find("</tool_call>", start)
        if place < 0:
            return _malformed("The call does not end.", self.form), len(text)
        return _malformed("The call could not be read.", self.form), place


_FUNCTION_TAGS: Final = _Tags(
    name=re.compile(r"\s*<function=([^<>\s]+)>\s*"),
    argument=re.compile(rf"<parameter=([^<>\s]+)>\n?{_VALUE}\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL),
    end=re.compile(r"</function>\s*</tool_call>"),
    form="Write a call as\n<tool_call>\n<function=name>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
)
"""Qwen3-Coder, Qwen3.5, Nemotron 3."""
_ARGUMENT_TAGS: Final = _Tags(
    name=re.compile(r"\s*([^<>{}\s]+)\s*"),
    argument=re.compile(
        rf"<arg_key>\s*([^<>\s]+)\s*</arg_key>\s*<arg_value>{_VALUE}</arg_value>\s*(?=<arg_key>|</tool_call>)",
        re.DOTALL,
    ),
    end=re.compile(r"</tool_call>"),
    form="Write a call as\n<tool_call>name\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
)
"""GLM 4.5 and later."""
CALL_READERS: Final[tuple[CallReader, ...]] = (json_calls, _FUNCTION_TAGS.calls, _ARGUMENT_TAGS.calls, list_calls)
"""The forms in which chat templates write calls."""


def _in_blocks(
    pattern: re.Pattern[str], text: str, form: str, read: Callable[[str], Iterable[ParsedCall]]
) -> tuple[ParsedCall, ...]:
    """The calls between tags."""
    blocks = [block for block in pattern.finditer(text) if block["call"] is not None]
    unfinished = (_malformed("The call does not end.", form),)
    return tuple(
        call for block in blocks for call in (_in_block(block["call"], form, read) if block["end"] else unfinished)
    )


def _in_block(body: str, form: str, read: Callable[[str], Iterable[ParsedCall]]) -> tuple[ParsedCall, ...]:
    """The calls in a text that has nothing else."""
    try:
        return tuple(read(body))
    except _UNREADABLE:
        return (_malformed("The call could not be read.", form),)


def _malformed(problem: str, form: str) -> ParsedCall:
    """A call that cannot be read."""
    return ParsedCall(name="", arguments={}, error=f"{problem} {form}")


def _from_json(text: str) -> Iterator[ParsedCall]:
    """The call in a JSON object, or those in a list of them."""
    read = json.loads(text)
    for call in read if isinstance(read, list) else [read]:
        name, arguments = call["name"], call["arguments" if "arguments" in call else "parameters"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("not a name and arguments")
        yield _checked(name, arguments)


def _from_list(text: str) -> list[ParsedCall]:
    """The calls in a list in Python's syntax."""
    tree = _JsonNames().visit(_expression(text))
    return [_python_call(call, _LIST_FORM) for call in (tree.elts if isinstance(tree, ast.List) else [tree])]


class _JsonNames(ast.NodeTransformer):
    """Reads JSON's names of values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The value, or the name if it is none of JSON's."""
        values = {"null": None, "true": True, "false": False}
        return ast.Constant(values[node.id]) if node.id in values else node


def _expression(text: str) -> ast.expr:
    """An expression in Python's syntax."""
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(text.strip(), mode="eval").body


def _python_call(call: ast.expr, form: str) -> ParsedCall:
    """The call in Python's syntax, with literals for values."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return _malformed("This is not a call.", form)
    names = [argument.arg for argument in call.keywords if argument.arg is not None]
    if call.args or len(names) < len(call.keywords) or len(set(names)) < len(names):
        return _malformed("Give each argument once, by its name.", form)
    values = [ast.literal_eval(argument.value) for argument in call.keywords]
    return _checked(call.func.id, dict(zip(names, values, strict=True)))


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """A value that was written as text: text if the schema says so, else JSON, or a literal of Python, or text."""
    if schema.get("type") == "string" and not (schema.get("nullable") and text in ("null", "None")):
        return text
    for read in (json.loads, lambda text: ast.literal_eval(_expression(text))):
        with suppress(*_UNREADABLE):
            return read(text)
    return text


def _checked(name: str, arguments: dict[str, Any]) -> ParsedCall:
    """The call; ValueError or TypeError if JSON cannot store it, or if it is nested too deeply to be kept."""
    json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    _check_depth(arguments, DEEPEST)
    return ParsedCall(name=name, arguments=arguments)


def _check_depth(value: Any, levels: int) -> None:
    """ValueError if a value has more levels of lists and mappings."""
    if levels < 0:
        raise ValueError("nested too deeply")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _check_depth(inner, levels - 1)
