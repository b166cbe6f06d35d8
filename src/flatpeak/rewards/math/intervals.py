"""The `Reading` of an answer, tools to split texts, and unions and intersections of intervals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key
from math import inf
from typing import Final, Literal

from flatpeak.rewards.math.expression_values import Expression
from flatpeak.rewards.math.normalize import FUNCTIONS
from flatpeak.rewards.math.syntax_tree import Node, UndefinedError
from flatpeak.rewards.math.units import Unit

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
"""The kind of an answer. scalar: one expression, possibly with a unit. based: digits in a base. ratio: 3:5. ordered: a
tuple or interval with its brackets. list: items in any order, without brackets. set: the same in braces. union:
intervals and sets. named: x = something. text: words. unread: unknown to the rules."""

TEXT_GROUP: Final = r"\\text\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
TEXT: Final = re.compile(TEXT_GROUP)
_COMMAND: Final = re.compile(r"\\[A-Za-z]+")
_FUNCTION_NAME: Final = re.compile(rf"\\(?:{FUNCTIONS})(?![A-Za-z])")
_WORD: Final = re.compile(r"[^\W\d_]{3,}|\.\.\.|[\"'#@?`]|__")
_NO_SUBSTANCE: Final = re.compile(r"[\s{}$.~]")
_OPENING, _CLOSING = "([{", ")]}"
_MARGIN: Final = 1e-9
"""Relative distance below which the order of irrational ends is undecided."""
_BRACKETS: Final = ("()", "[]", "(]", "[)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """An answer as the rules read it."""

    kind: Kind
    text: str
    """The cleaned text; two answers with the same text are equal."""
    items: tuple[Reading, ...] = ()
    expression: Expression | None = None
    """The value of a scalar; the difference of the sides of an equation."""
    unit: Unit | None = None
    percent: bool = False
    label: str = ""
    """Brackets (ordered), base (based), number of columns (matrix), name (named), signs (inequality), `choice` for a
    letter that may be written small, and for a ratio `clock` if it is a time of day, `either` if it may be one."""

    @property
    def is_number(self) -> bool:
        """Whether it is one expression without letters, possibly with a unit."""
        return self.kind == "scalar" and self.expression is not None and not self.expression.letters


def scalar(text: str, node: Node) -> Reading:
    """A bare expression as a reading."""
    return Reading(kind="scalar", text=text, expression=Expression(node=node))


def unnamed(reading: Reading) -> Reading:
    """The reading without names in front: for `x = 5` the reading of 5."""
    while reading.kind == "named":
        reading = reading.items[0]
    return reading


def unread_texts(reading: Reading) -> Iterator[str]:
    """The texts in an answer that the rules cannot read."""
    if reading.kind == "unread":
        yield reading.text
    for item in reading.items:
        yield from unread_texts(item)


def plain(text: str) -> str:
    """A text without `\\text`, spaces, dots and case, equal for two spellings of the same words."""
    bare = _NO_SUBSTANCE.sub("", TEXT.sub(r"\1", text)).casefold()
    while len(bare) > 2 and bare.startswith("(") and bare.endswith(")") and "(" not in bare[1:-1]:
        bare = bare[1:-1]
    return bare.strip(",;:!")


def has_words(text: str) -> bool:
    """Whether a text contains prose, which is not read as mathematics."""
    return _WORD.search(_COMMAND.sub(" ", TEXT.sub(r" \1 ", text))) is not None


def has_functions(text: str) -> bool:
    """Whether a text contains a sine or another named function."""
    return _FUNCTION_NAME.search(text) is not None


def split(text: str, separator: re.Pattern[str]) -> list[tuple[str, str]]:
    """The segments between separators outside brackets, each with the separator before it ("" for the first)."""
    segments, start, before, depth, position = [], 0, "", 0, 0
    while position < len(text):
        character = text[position]
        match = separator.match(text, position) if depth == 0 else None
        if match is not None and match.end() > position:
            segments.append((before, text[start:position].strip()))
            before, start = match[0].strip(), match.end()
            position = start
            continue
        if character == "\\" and text[position + 1 : position + 2] not in ("{", "}"):
            position += 1  # the next character belongs to a command
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        position += 1
    return [*segments, (before, text[start:].strip())]


def enclosed(text: str) -> tuple[str, str] | None:
    """(brackets, inside) of a text that is enclosed by one pair of brackets, of one kind or two: `(]`."""
    start = 2 if text.startswith(r"\{") else 1
    end = 2 if text.endswith(r"\}") else 1
    if len(text) < start + end or text[start - 1] not in _OPENING or text[-1] not in _CLOSING:
        return None
    depth = 0
    for position, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0 and start <= position + 1 < len(text):
            return None
    return text[:start] + text[-end:], text[start:-end].strip()


class _UnorderedError(Exception):
    """Two ends are too close, or are not real numbers."""


@dataclass(frozen=True, slots=True)
class _End:
    reading: Reading
    value: Fraction | float
    """The value, exact if it is rational; infinite for an infinite end."""
    closed: bool


@dataclass(frozen=True, slots=True)
class _Interval:
    low: _End
    high: _End


def merged(readings: Iterable[Reading]) -> tuple[Reading, ...] | None:
    """The union of intervals and sets as disjoint intervals in order; None if their order is unknown."""
    try:
        key = cmp_to_key(_compare)
        intervals = sorted(_intervals(readings), key=lambda interval: key(interval.low))
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


def intersection(readings: Sequence[Reading]) -> Reading | None:
    """The intersection of intervals; None if it is empty or unknown."""
    try:
        intervals = _intervals(readings)
        low, high = intervals[0].low, intervals[0].high
        for interval in intervals[1:]:
            low, high = (
                _outer(interval.low, low, sign=1, prefer_closed=False),
                _outer(interval.high, high, sign=-1, prefer_closed=False),
            )
        order = _compare(low, high)
    except (_UnorderedError, UndefinedError, OverflowError):
        return None
    if order == 0 and low.closed and high.closed:
        return _reading(_Interval(low, low))
    return _reading(_Interval(low, high)) if order < 0 else None


def _outer(first: _End, second: _End, *, sign: int, prefer_closed: bool = True) -> _End:
    """The larger end for sign 1, the smaller for -1; of two equal ends, the closed or the open one."""
    order = _compare(first, second) * sign
    if order == 0:
        return first if first.closed == prefer_closed else second
    return first if order > 0 else second


def _intervals(readings: Iterable[Reading]) -> list[_Interval]:
    intervals = []
    for reading in readings:
        if reading.kind == "ordered" and len(reading.items) == 2 and reading.label in _BRACKETS:
            low = _end(reading.items[0], closed=reading.label[0] == "[")
            interval = _Interval(low, _end(reading.items[1], closed=reading.label[1] == "]"))
            if _compare(interval.low, interval.high) >= 0:
                raise _UnorderedError("an empty interval")
            intervals.append(interval)
        elif reading.kind == "set":
            intervals += [_Interval(point, point) for point in (_end(item, closed=True) for item in reading.items)]
        else:
            raise _UnorderedError(reading.kind)
    return intervals


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
        raise _UnorderedError("too close")
    return (a > b) - (a < b)


def _reading(interval: _Interval) -> Reading:
    low, high = interval.low, interval.high
    if low is high:
        return Reading(kind="set", text=rf"\{{{low.reading.text}\}}", items=(low.reading,))
    label = ("[" if low.closed else "(") + ("]" if high.closed else ")")
    text = f"{label[0]}{low.reading.text},{high.reading.text}{label[1]}"
    return Reading(kind="ordered", text=text, items=(low.reading, high.reading), label=label)
