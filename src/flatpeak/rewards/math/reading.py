"""What an answer is, once it is read; and the small tools that reading it takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from flatpeak.rewards.math.clean import FUNCTIONS
from flatpeak.rewards.math.units import Unit
from flatpeak.rewards.math.values import Expression

Kind = Literal[
    "scalar",
    "based",
    "ratio",
    "ordered",
    "list",
    "set",
    "union",
    "matrix",
    "named",
    "equation",
    "inequality",
    "text",
    "unread",
]
"""scalar: one expression, maybe with a unit. based: digits in a base. ratio: 3:5. ordered: a tuple or interval with its
brackets. list: items in any order, without brackets. set: the same in braces. union: of intervals and sets. named: x =
something. text: words. unread: the rules do not know."""

TEXT_GROUP: Final = r"\\text\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
_TEXT: Final = re.compile(TEXT_GROUP)
_COMMAND: Final = re.compile(r"\\[A-Za-z]+")
_FUNCTION_NAME: Final = re.compile(rf"\\(?:{FUNCTIONS})(?![A-Za-z])")
_WORD: Final = re.compile(r"[^\W\d_]{3,}|\.\.\.|[\"'#@?`]|__")
_NO_SUBSTANCE: Final = re.compile(r"[\s{}$.~]")
_OPENING, _CLOSING = "([{", ")]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One answer, read."""

    kind: Kind
    text: str
    """Cleaned; two answers with the same text are equal."""
    items: tuple[Reading, ...] = ()
    expression: Expression | None = None
    """Of a scalar its value; of an equation what is 0."""
    unit: Unit | None = None
    percent: bool = False
    label: str = ""
    """Of an ordered one its brackets, of a based one its base, of a matrix its columns, of a named one its name, of an
    inequality its signs, of a letter that may be written small `choice`, of a ratio `clock` if it is a time of day and
    `either` if it may be one."""


def plain(text: str) -> str:
    """A text without LaTeX's wrapping, spaces, dots and case: what two spellings of the same words share."""
    bare = _NO_SUBSTANCE.sub("", _TEXT.sub(r"\1", text)).casefold()
    while len(bare) > 2 and bare.startswith("(") and bare.endswith(")") and "(" not in bare[1:-1]:
        bare = bare[1:-1]
    return bare.strip(",;:!")


def has_words(text: str) -> bool:
    """Whether any of it is prose, and so nothing for a reader of mathematics."""
    return _WORD.search(_COMMAND.sub(" ", _TEXT.sub(r" \1 ", text))) is not None


def has_functions(text: str) -> bool:
    """Whether a sine or another named function is applied in it."""
    return _FUNCTION_NAME.search(text) is not None


def split(text: str, separator: re.Pattern[str]) -> list[tuple[str, str]]:
    """The parts between separators that no bracket encloses, each with the separator before it ("" for the first)."""
    parts, start, before, depth, place = [], 0, "", 0, 0
    while place < len(text):
        character = text[place]
        match = separator.match(text, place) if depth == 0 else None
        if match is not None and match.end() > place:
            parts.append((before, text[start:place].strip()))
            before, start = match[0].strip(), match.end()
            place = start
            continue
        if character == "\\" and text[place + 1 : place + 2] not in ("{", "}"):
            place += 1  # the character after it is a command's
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        place += 1
    return [*parts, (before, text[start:].strip())]


def enclosed(text: str) -> tuple[str, str] | None:
    """(brackets, inside) of a text that one pair of brackets encloses as a whole, of the same kind or not: `(]`."""
    start = 2 if text.startswith(r"\{") else 1
    end = 2 if text.endswith(r"\}") else 1
    if len(text) < start + end or text[start - 1] not in _OPENING or text[-1] not in _CLOSING:
        return None
    depth = 0
    for place, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0 and start <= place + 1 < len(text):
            return None
    return text[:start] + text[-end:], text[start:-end].strip()
