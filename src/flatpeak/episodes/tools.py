"""Tools that a policy may call: their JSON schemas, the check of a call's arguments, and answers as text."""

from __future__ import annotations

import inspect
import json
import keyword
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from flatpeak.errors import UserError
from flatpeak.utils.user_code import load_function, one_line

_JSON_NAMES: Final[dict[Any, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    NoneType: "null",
}
_PYTHON_TYPES: Final = {name: kind for kind, name in _JSON_NAMES.items()} | {"number": (int, float)}
_HINTS: Final = "str, int, float, bool, list[...], dict, Literal[...] or one of them | None"
_SECTION: Final = re.compile(r"^(?:Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):[ ]*$", re.M)
_ARGUMENTS: Final = re.compile(r"^(?:Args|Arguments|Parameters):[ ]*\n((?:[ \t].*\n?|\n)*)", re.M)
_ARGUMENT: Final = re.compile(r"^(\w+)[ ]*(?:\(.*?\))?:[ ]*(.*(?:\n[ \t]+.*)*)", re.M)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function, or a method of an environment, that a policy may call by name."""

    name: str
    schema: dict[str, Any]
    """The description for a chat template: {"type": "function", "function": {"name": ..., "parameters": ...}}."""
    function: Callable[..., Any] | None = None
    """The function; None for a method of the environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCall:
    """A call as the policy wrote it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """The fault in its form; None if it could be read."""


def read_tools(functions: Sequence[Callable[..., Any] | str]) -> tuple[Tool, ...]:
    """The tools that functions, or names of functions such as `file.py:name`, make. UserError if one cannot be a tool.

    Type hints give the types of arguments; the docstring, with an `Args:` section if there is one, their descriptions.
    """
    tools: dict[str, Tool] = {}
    for function in functions:
        function = load_function(function) if isinstance(function, str) else function
        name = getattr(function, "__name__", "")
        if not name.isidentifier() or keyword.iskeyword(name):
            raise UserError(f"tool {name or function!r} has no name to call it by: define it with def in a file")
        if name in tools:
            raise UserError(f"two tools have the name {name!r}: rename one of the functions")
        check_importable(function, where=f"tool {name!r}")
        tools[name] = Tool(name=name, schema=function_schema(function, name=name), function=function)
    if not tools:
        raise UserError("there are no tools: name at least one function, such as file.py:name")
    return tuple(tools.values())


def method_tools(actor: type[Any], *, leave_out: Collection[str]) -> tuple[Tool, ...]:
    """The tools that a class's methods make, except for those whose name begins with `_`."""
    tools = []
    for name, method in inspect.getmembers_static(actor):
        if (
            name.startswith("_")
            or name in leave_out
            or not isinstance(method, FunctionType | classmethod | staticmethod)
        ):
            continue
        function = method if isinstance(method, FunctionType) else method.__func__
        try:
            schema = function_schema(function, name=name, skip_first=not isinstance(method, staticmethod))
        except UserError as error:
            raise UserError(f"{error}; begin its name with _ if it is not for the policy") from error
        tools.append(Tool(name=name, schema=schema))
    return tuple(tools)


def check_importable(code: Callable[..., Any], *, where: str) -> None:
    """UserError if a worker process cannot import a function or class."""
    module = getattr(code, "__module__", "__main__")
    importable: Any = None if module == "__main__" else sys.modules.get(module)
    for name in code.__qualname__.split("."):
        importable = getattr(importable, name, None)
    if importable is not code:
        raise UserError(
            f"{where} cannot go to a worker process: define it at the top level of a file, and import it from there or "
            "name it by file.py:name"
        )


def function_schema(function: Callable[..., Any], *, name: str, skip_first: bool = False) -> dict[str, Any]:
    """The JSON schema of a function; `skip_first` leaves out `self`. UserError for parameters that JSON cannot fill."""
    if inspect.iscoroutinefunction(function):
        raise UserError(f"tool {name!r} is async: define it with def alone")
    try:
        hints = get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())[skip_first:]
    except Exception as error:  # hints are code
        raise UserError(f"tool {name!r}: its type hints cannot be read: {one_line(error)}; correct them") from error
    document = inspect.cleandoc(getattr(function, "__doc__", None) or "")
    section = _ARGUMENTS.search(document)
    described = dict(_ARGUMENT.findall(inspect.cleandoc("\n" + section[1]))) if section else {}
    properties: dict[str, Any] = {}
    for parameter in parameters:
        properties[parameter.name] = _parameter_schema(parameter, hints, tool=name)
        if text := " ".join(described.get(parameter.name, "").split()):
            properties[parameter.name]["description"] = text
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": _SECTION.split(document)[0].strip(),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _parameter_schema(parameter: inspect.Parameter, hints: Mapping[str, Any], *, tool: str) -> dict[str, Any]:
    where = f"tool {tool!r}: parameter {parameter.name!r}"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise UserError(f"{where} cannot be given by name: write parameters without *, ** and /")
    if parameter.name not in hints:
        raise UserError(f"{where} has no type hint: write one of {_HINTS}")
    try:
        schema = _type_schema(hints[parameter.name])
    except TypeError:
        hint = inspect.formatannotation(hints[parameter.name])
        raise UserError(f"{where} has a type that JSON calls cannot fill, {hint}: write one of {_HINTS}") from None
    if isinstance(parameter.default, str | int | float):
        schema["default"] = parameter.default
    return schema


def _type_schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type; TypeError if there is none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None and hint in _JSON_NAMES and hint is not NoneType:
        return {"type": _JSON_NAMES[hint]}
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin is dict and arguments[0] is str:
        values = {} if arguments[1] is Any else {"additionalProperties": _type_schema(arguments[1])}
        return {"type": "object", **values}
    if origin is Literal and len(kinds := {type(value) for value in arguments}) == 1:
        return {**_type_schema(kinds.pop()), "enum": list(arguments)}
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        return {**_type_schema(arguments[arguments[0] is NoneType]), "nullable": True}
    raise TypeError


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """The fault in a call's arguments, as the policy reads it; None if there is none."""
    parameters = tool.schema["function"]["parameters"]
    known = parameters["properties"]
    for name in arguments:
        if name not in known:
            return f"{tool.name} has no argument {name!r}; its arguments are: {', '.join(known) or 'none'}"
    for name in parameters["required"]:
        if name not in arguments:
            return f"{tool.name} needs the argument {name!r}"
    problems = (_value_problem(value, known[name], f"argument {name!r}") for name, value in arguments.items())
    return next(filter(None, problems), None)


def _value_problem(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    if value is None and schema.get("nullable"):
        return None
    kind = schema["type"]
    if not isinstance(value, _PYTHON_TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return f"{where} must be of type {kind}, not {_JSON_NAMES.get(type(value), type(value).__name__)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    inner = schema.get("items") or schema.get("additionalProperties")
    if not inner:
        return None
    values = value.values() if kind == "object" else value
    return next(filter(None, (_value_problem(item, inner, f"a value of {where}") for item in values)), None)


def answer_text(value: Any) -> str:
    """The text of a tool's result, for any tokenizer: a string as it is, None empty, other values as JSON."""
    match value:
        case None:
            text = ""
        case str():
            text = value
        case bytes():
            text = value.decode("utf-8", "replace")
        case _:
            try:
                text = json.dumps(value, ensure_ascii=False, default=_plain)
            except (TypeError, ValueError, RecursionError):  # keys that JSON lacks, or a value within itself
                text = str(value)
    return text.encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    # NumPy's numbers and arrays are numbers and lists to the policy too.
    return value.tolist() if hasattr(value, "tolist") else str(value)
