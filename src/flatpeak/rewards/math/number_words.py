"""Numbers written in English words: `twenty-five`, `two thirds`, `one and a half`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_UP_TO_NINETEEN: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_SMALL: Final = {word: value for value, word in enumerate(_UP_TO_NINETEEN.split())}
_TENS: Final = {
    "twenty": 20,
    "thirty": 30,
    "forty": 40,
    "fifty": 50,
    "sixty": 60,
    "seventy": 70,
    "eighty": 80,
    "ninety": 90,
}
NUMBER_WORDS: Final = {word: str(value) for word, value in (*_SMALL.items(), ("twenty", 20))}
MAGNITUDES: Final = {
    "ten": 10,
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "trillion": 10**12,
}
_ORDINALS: Final = (
    "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth "
    "seventeenth eighteenth nineteenth"
)
DENOMINATORS: Final = {
    "half": 2,
    "halve": 2,
    "quarter": 4,
    **{word: value for value, word in enumerate(_ORDINALS.split(), start=3)},
    **{word.removesuffix("y") + "ieth": value for word, value in _TENS.items()},
    **{f"{word}th": MAGNITUDES[word] for word in ("hundred", "thousand", "million", "billion")},
}
_SCALES: Final = {word: value for word, value in MAGNITUDES.items() if value >= 10**3}
_WORDS: Final = re.compile(r"[a-z]+(?:[ -]+[a-z]+){0,15}", re.IGNORECASE)
_SIGNS: Final = ("minus", "negative")


def spelled_number(text: str) -> Fraction | None:
    """The value of a text that is a number in words as a whole, or None."""
    if _WORDS.fullmatch(text) is None:
        return None
    words = re.split(r"[ -]+", text.lower())
    negative = words[0] in _SIGNS
    value = _value(words[negative:])
    return -value if negative and value is not None else value


def _value(words: list[str]) -> Fraction | None:
    if not words:
        return None
    whole = _cardinal(words)
    if whole is not None:
        return Fraction(whole)
    for place in range(1, len(words) - 1):  # `one and a half`
        if words[place] == "and":
            first, rest = _cardinal(words[:place]), _fraction(words[place + 1 :])
            return None if first is None or rest is None or rest >= 1 else first + rest
    return _fraction(words)


def _fraction(words: list[str]) -> Fraction | None:
    """`half`, `a third`, `two thirds`, `three hundredths`; a `third` alone is a place in a row."""
    name, numerator = words[-1], words[:-1]
    if not numerator:
        return Fraction(1, 2) if name == "half" else None
    count = 1 if numerator == ["a"] else _cardinal(numerator)
    denominator = DENOMINATORS.get(name.removesuffix("s"))
    if count is None or denominator is None or name.endswith("s") != (count != 1):
        return None
    if numerator[-1] in _TENS and denominator < 10:  # `twenty-fifths` are parts of another whole
        return None
    return Fraction(count, denominator)


def _cardinal(words: list[str]) -> int | None:
    """`two thousand one hundred and five`: scales from large to small, below each a number up to 999."""
    total, last = 0, None
    group: list[str] = []
    for word in words:
        if word not in _SCALES:
            group.append(word)
            continue
        scale, count = _SCALES[word], _below_a_thousand(group)
        if count is None or count == 0 or (last is not None and scale >= last):
            return None
        total, last, group = total + count * scale, scale, []
    if not group:
        return total if last is not None else None
    count = _below_a_thousand(group[1:] if last is not None and group[0] == "and" else group)
    return None if count is None else total + count


def _below_a_thousand(words: list[str]) -> int | None:
    words = ["one" if word == "a" and len(words) > 1 else word for word in words]
    if words[-1:] == ["dozen"]:
        dozens = _below_a_hundred(words[:-1])
        return None if dozens is None else 12 * dozens
    if "hundred" not in words:
        return _below_a_hundred(words)
    place = words.index("hundred")
    hundreds, rest = _below_a_hundred(words[:place]), words[place + 1 :]
    below = _below_a_hundred(rest[1:] if rest[:1] == ["and"] else rest) if rest else 0
    return None if not hundreds or hundreds > 99 or below is None else 100 * hundreds + below


def _below_a_hundred(words: list[str]) -> int | None:
    match words:
        case [word] if word in _SMALL:
            return _SMALL[word]
        case [word] if word in _TENS:
            return _TENS[word]
        case [ten, one] if ten in _TENS and 0 < _SMALL.get(one, 0) < 10:
            return _TENS[ten] + _SMALL[one]
        case _:
            return None
