"""Unions and intersections of intervals with numbers at their ends."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key
from math import inf
from typing import Final, Literal

from flatpeak.rewards.math.nodes import UndefinedError
from flatpeak.rewards.math.normalize import FUNCTIONS
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


_MARGIN: Final = 1e-9
"""Ends that are not rational are in order only if they are further apart than this, relative to their size."""
_BRACKETS: Final = ("()", "[]", "(]", "[)")


class _UnorderedError(Exception):
    """Two ends are too close, or none of numbers."""


@dataclass(frozen=True, slots=True)
class _End:
    reading: Reading
    value: Fraction | float
    """Exact where it is rational; infinite for an infinite end."""
    closed: bool


@dataclass(frozen=True, slots=True)
class _Interval:
    low: _End
    high: _End


def merged(parts: Iterable[Reading]) -> tuple[Reading, ...] | None:
    """The same union in intervals that neither touch nor overlap, in order; None where that cannot be told."""
    try:
        intervals = sorted(_intervals(parts), key=cmp_to_key(_by_low))
        joined: list[_Interval] = []
        for interval in intervals:
            last = joined[-1] if joined else None
            gap = 1 if last is None else _compare(interval.low, last.high)
            if last is None or gap > 0 or (gap == 0 and not (interval.low.closed or last.high.closed)):
                joined.append(interval)
                continue
            low = _outer(last.low, interval.low, sign=-1)
            joined[-1] = _Interval(low, _outer(last.high, interval.high, sign=1))
    except (_UnorderedError, UndefinedError, OverflowError):
        return None
    return tuple(map(_reading, joined))


def intersection(parts: Sequence[Reading]) -> Reading | None:
    """The interval that all parts share; None where there is none, or that cannot be told."""
    try:
        intervals = _intervals(parts)
        low, high = intervals[0].low, intervals[0].high
        for interval in intervals[1:]:
            low, high = _outer(interval.low, low, sign=1, wide=False), _outer(interval.high, high, sign=-1, wide=False)
        order = _compare(low, high)
    except (_UnorderedError, UndefinedError, OverflowError):
        return None
    return _reading(_Interval(low, high)) if order < 0 or (order == 0 and low.closed and high.closed) else None


def _outer(first: _End, second: _End, *, sign: int, wide: bool = True) -> _End:
    """The larger end for sign 1, the smaller for -1; of two at one place the closed one, or unless `wide` the open."""
    order = _compare(first, second) * sign
    if order == 0:
        return first if first.closed == wide else second
    return first if order > 0 else second


def _by_low(first: _Interval, second: _Interval) -> int:
    return _compare(first.low, second.low)


def _intervals(parts: Iterable[Reading]) -> list[_Interval]:
    found = []
    for part in parts:
        if part.kind == "ordered" and len(part.items) == 2 and part.label in _BRACKETS:
            low = _end(part.items[0], closed=part.label[0] == "[")
            interval = _Interval(low, _end(part.items[1], closed=part.label[1] == "]"))
            if _compare(interval.low, interval.high) >= 0:
                raise _UnorderedError("an empty interval")
            found.append(interval)
        elif part.kind == "set":
            found += [_Interval(point, point) for point in (_end(item, closed=True) for item in part.items)]
        else:
            raise _UnorderedError(part.kind)
    return found


def _end(reading: Reading, *, closed: bool) -> _End:
    expression = (
        reading.expression if reading.kind == "scalar" and reading.unit is None and not reading.percent else None
    )
    if expression is None:
        raise _UnorderedError(reading.kind)
    if expression.infinity:
        if closed:
            raise _UnorderedError("infinity is in no interval")
        return _End(reading, expression.infinity * inf, closed)
    if expression.exact is not None:
        return _End(reading, expression.exact, closed)
    value = None if expression.letters else expression.rough[0]
    if value is None or abs(value.imag) > _MARGIN * abs(value):
        raise _UnorderedError("no real number")
    return _End(reading, value.real, closed)


def _compare(first: _End, second: _End) -> int:
    if first.reading.text == second.reading.text:
        return 0
    a, b = first.value, second.value
    finite = not {a, b} & {inf, -inf}
    exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    if finite and not exact and abs(float(a) - float(b)) <= _MARGIN * max(abs(float(a)), abs(float(b)), 1.0):
        raise _UnorderedError("too close to tell")
    return (a > b) - (a < b)


def _reading(interval: _Interval) -> Reading:
    low, high = interval.low, interval.high
    if low is high:
        return Reading(kind="set", text=rf"\{{{low.reading.text}\}}", items=(low.reading,))
    label = ("[" if low.closed else "(") + ("]" if high.closed else ")")
    text = f"{label[0]}{low.reading.text},{high.reading.text}{label[1]}"
    return Reading(kind="ordered", text=text, items=(low.reading, high.reading), label=label)
