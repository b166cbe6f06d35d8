"""Unions and intersections of intervals with numbers at their ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key
from math import inf
from typing import Final

from flatpeak.rewards.math.arithmetic import UndefinedError
from flatpeak.rewards.math.reading import Reading

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
