"""The number that an answer states, by the rules that mathematical answers are read with."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from flatpeak.rewards.math.arithmetic import UndefinedError
from flatpeak.rewards.math.chains import contradict
from flatpeak.rewards.math.limits import OverLimitError
from flatpeak.rewards.math.nodes import Node, integer
from flatpeak.rewards.math.number_words import DENOMINATORS, MAGNITUDES
from flatpeak.rewards.math.reading import Reading
from flatpeak.rewards.math.rules import read_answer

_EQUALS: Final = re.compile(r"(?<![<>!])=(?!=)")
_WORD: Final = re.compile(r"\s*-?\s*([^\W\d_]+)")
_CHANGING: Final = frozenset({"k", "mil", "squared", "cubed", "factorial"})
"""Words after a number that make another of it, which one is not for a reader of digits to say."""


def stated_number(text: str) -> Fraction | None:
    """The number that a text states as a whole, or None: `18`, `x = 18`, `18 red apples`, `\\frac{36}{2}`, `5 million`.

    Units and percent signs are dropped, magnitudes count, and arithmetic that is still to be done is no number. Of an
    equation with words in it (`3 eggs + 15 eggs = 18`) what follows the last `=` counts.
    """
    reading = _read(text)
    if reading is None or reading.kind in ("unread", "text", "equation"):
        sides = [_read(side) for side in _EQUALS.split(text)[-2:]]
        reading = sides[-1] if len(sides) > 1 else reading
        if reading is None or (len(sides) > 1 and sides[0] is not None and _contradict(sides[0], reading)):
            return None
    while reading.kind == "named":
        reading = reading.items[0]
    if reading.kind != "scalar" or reading.expression is None or not _is_numeral(reading.expression.node):
        return None
    try:
        return reading.expression.exact
    except (UndefinedError, OverLimitError):
        return None


def in_prose(number: Fraction, following: str) -> Fraction | None:
    """A number found in prose, with the magnitude that follows it (`18 million`); None where a word changes it."""
    match = _WORD.match(following)
    word = match[1].lower() if match is not None else ""
    if word in _CHANGING:
        return None
    if (magnitude := MAGNITUDES.get(word.removesuffix("s"))) is not None:
        return number * magnitude
    # Of quarters there are coins too.
    if word.endswith("s") and not word.startswith("quarter") and word.removesuffix("s") in DENOMINATORS:
        return number / DENOMINATORS[word.removesuffix("s")]
    return number


def _read(text: str) -> Reading | None:
    try:
        return read_answer(text)[1] if text.strip() else None
    except OverLimitError:
        return None


def _contradict(first: Reading, second: Reading) -> bool:
    try:
        return contradict(first, second)
    except OverLimitError:
        return True


def _is_numeral(node: Node) -> bool:
    """Digits, a fraction, a mixed number or scientific notation, with its sign and its magnitude."""
    match node.kind:
        case "number":
            return True
        case "neg":
            return _is_numeral(node.args[0])
        case "div":
            return all(part.kind == "number" or (part.kind == "neg" and _is_numeral(part)) for part in node.args)
        case "add":
            whole, part = node.args
            return whole.kind == "number" and part.kind == "div" and _is_numeral(part)
        case "mul":
            first, second = node.args
            return _is_numeral(first) and (_is_power_of_ten(second) or _is_magnitude(second))
        case _:
            return _is_power_of_ten(node)


def _is_power_of_ten(node: Node) -> bool:
    if node.kind != "pow" or node.args[0] != integer(10):
        return False
    exponent = node.args[1].args[0] if node.args[1].kind == "neg" else node.args[1]
    return exponent.kind == "number"


def _is_magnitude(node: Node) -> bool:
    value = node.number if node.kind == "number" else Fraction(0)
    return value in MAGNITUDES.values() or 1 / value in DENOMINATORS.values() if value else False
