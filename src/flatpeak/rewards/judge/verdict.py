"""Reading a judge's reply: a JSON object, or one tag. What is not exactly as asked for is no verdict."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from flatpeak.utils.answers import after_thinking

Output = Literal["json_schema", "json", "tag"]

_MAX_CHARACTERS: Final = 20_000
_MAX_BRACES: Final = 50
_TAG: Final = re.compile(r"<verdict>((?:(?!</?verdict>).)*)</verdict>", re.DOTALL | re.IGNORECASE)
_OBJECT: Final = re.compile(r'\{\s*"')
"""The beginning of a JSON object; sets and LaTeX have braces too."""
_FIELD: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*[:=]\s*(\S+)\s*")
_BLANKS: Final = re.compile(r"\s+")
_NUMBER: Final = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,12})?")


class NoVerdictError(Exception):
    """The reply cannot be read as a verdict; as text, why, in words that the judge itself can be told."""


def read_fields(text: str, output: Output) -> dict[str, Any]:
    """The fields of the verdict in a reply. All that the judge thinks before it answers is left out first.

    JSON: the one object at the top level of the reply, with nothing but a closing fence after it. Tag: the one
    `<verdict>name=value; name=value</verdict>`, with nothing but a period or marks of emphasis after it; without a name
    before its value the only field is called "". Where a judge quotes what an answer says its verdict is, nothing tells
    the two apart: a reply with two that differ, or with a broken one before the last, is none.
    """
    reply = after_thinking(text).strip()
    if not reply:
        raise NoVerdictError("it was empty, or ended within the thinking")
    return _read_json(reply) if output != "tag" else _read_tag(reply)


def number(fields: Mapping[str, Any], name: str) -> float:
    """A field that has to be a finite number; true, "7" and NaN are none."""
    if name not in fields:
        raise NoVerdictError(f"{name} was missing")
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoVerdictError(f"{name} was not a number")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise NoVerdictError(f"{name} was not a finite number")
    return value


def _read_json(reply: str) -> dict[str, Any]:
    # The end of a long reply decides, and a reply of any length is cheap to read.
    reply = reply[-_MAX_CHARACTERS:].removesuffix("```").rstrip()
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
    earlier: list[dict[str, Any]] = []
    begin = _OBJECT.search(reply)
    for _ in range(_MAX_BRACES):
        if begin is None:
            break
        try:
            found, end = decoder.raw_decode(reply, begin.start())
        except (ValueError, RecursionError):
            break
        if end == len(reply):
            if any(_differ(found, other) for other in earlier):
                raise NoVerdictError("it held several JSON objects that differ")
            return found  # type: ignore[no-any-return]
        earlier.append(found)
        begin = _OBJECT.search(reply, end)
    raise NoVerdictError("it did not end with one valid JSON object")


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two objects say different things under a name that both have; a rationale is no verdict."""
    return any(one[name] != other[name] for name in one.keys() & other.keys() - {"rationale"})


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _read_tag(reply: str) -> dict[str, Any]:
    tags = _TAG.findall(reply[-_MAX_CHARACTERS:])
    if not tags:
        raise NoVerdictError("it had no <verdict>...</verdict>")
    if len({_BLANKS.sub("", tag).lower() for tag in tags}) > 1:
        raise NoVerdictError("it held several <verdict>...</verdict> that differ")
    after = reply[reply.lower().rindex("</verdict>") + len("</verdict>") :]
    if after.strip(" \t\r\n.*_`"):
        raise NoVerdictError("it did not end with its <verdict>...</verdict>")
    content = tags[-1].strip()
    if _NUMBER.fullmatch(content):
        return {"": float(content)}
    fields: dict[str, Any] = {}
    for piece in re.split(r"[;,\n]", content):
        if not piece.strip():
            continue
        field = _FIELD.fullmatch(piece)
        if field is None or field[1].lower() in fields:
            raise NoVerdictError("its <verdict> did not hold name=value once for each name")
        value = field[2]
        fields[field[1].lower()] = float(value) if _NUMBER.fullmatch(value) else value
    return fields
