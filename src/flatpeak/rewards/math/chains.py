"""Whether the sides of `2 + 2 = 4` contradict each other: a false equation states no answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from flatpeak.rewards.math.arithmetic import UndefinedError
from flatpeak.rewards.math.reading import Reading

_APPROXIMATE: Final = 0.05
"""Relative distance up to which one number may be called about another."""
_ROUNDING_ERROR: Final = 1e-9
_DECIMAL: Final = re.compile(r"[^\d.]*\d+(?:\.(?P<places>\d+))?[^\d.]*")


def contradicting(readings: Sequence[Reading], signs: Sequence[str]) -> bool:
    r"""Whether two neighbours, joined by `=` or `\approx`, are numbers that differ."""
    return any(
        contradict(first, second, approximately=sign == r"\approx")
        for first, second, sign in zip(readings[:-1], readings[1:], signs, strict=True)
    )


def contradict(first: Reading, second: Reading, *, approximately: bool = False) -> bool:
    """Whether both are numbers in one unit and differ by more than rounding; a number without a value differs."""
    one, other = _bare(first), _bare(second)
    if one.unit is not None and other.unit is not None and one.unit.name != other.unit.name:
        return False
    try:
        values = [_number(reading) for reading in (one, other)]
    except UndefinedError:
        return True
    if None in values:
        return False
    a, b = values
    assert a is not None and b is not None
    readings = [(a, b)]
    if one.percent != other.percent:
        readings.append((a / 100, b) if one.percent else (a, b / 100))
    allowed = max(_rounding(one, approximately), _rounding(other, approximately))
    relative = _APPROXIMATE if approximately else _ROUNDING_ERROR
    return all(abs(x - y) > max(allowed, relative * max(abs(x), abs(y))) for x, y in readings)


def _bare(reading: Reading) -> Reading:
    while reading.kind == "named":
        reading = reading.items[0]
    return reading


def _number(reading: Reading) -> complex | None:
    """The value in double precision; None for what is no number or has too many digits for that."""
    expression = reading.expression if reading.kind == "scalar" else None
    if expression is None or expression.letters:
        return None
    return expression.rough[0]


def _rounding(reading: Reading, approximately: bool) -> float:
    """Half a unit of a decimal's last place: `5/7 = 0.71` is rounded, not false. A whole number only rounds loosely."""
    match = _DECIMAL.fullmatch(reading.text)
    places = len(match["places"] or "") if match is not None else 0
    if match is None or (places == 0 and not approximately):
        return 0.0
    return 0.5 * 10.0**-places * (1 + _ROUNDING_ERROR)
