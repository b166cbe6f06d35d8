"""English number words (`twenty-five`, `million`), and units of numbers (`cm`, `square feet`, `m/s`, `$`, `ways`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

_TABLES: Final[dict[str, dict[str, Any]]] = tomllib.loads(Path(__file__).with_name("units.toml").read_text("utf-8"))
_WORDS: Final[dict[str, list[str]]] = {name: words.split() for name, words in _TABLES["words"].items()}
_SMALL: Final = {word: value for value, word in enumerate(_WORDS["up_to_nineteen"])}
_TENS: Final = {word: 10 * value for value, word in enumerate(_WORDS["tens"], start=2)}
NUMBER_WORDS: Final = {word: str(value) for word, value in (*_SMALL.items(), ("twenty", 20))}
MAGNITUDES: Final[dict[str, int]] = _TABLES["magnitudes"]
DENOMINATORS: Final = {
    "half": 2,
    "halve": 2,
    "quarter": 4,
    **{word: value for value, word in enumerate(_WORDS["ordinals"], start=3)},
    **{word.removesuffix("y") + "ieth": value for word, value in _TENS.items()},
    **{f"{word}th": MAGNITUDES[word] for word in ("hundred", "thousand", "million", "billion")},
}
_SCALES: Final = {word: value for word, value in MAGNITUDES.items() if value >= 10**3}
_ENGLISH_WORDS: Final = re.compile(r"[a-z]+(?:[ -]+[a-z]+){0,15}", re.IGNORECASE)
_NEGATIVE_WORDS: Final = ("minus", "negative")
CANONICAL: Final[dict[str, str]] = {
    word: unit for unit, spellings in _TABLES["spellings"].items() for word in (unit, *spellings.split())
}
_COMPOUND_UNITS: Final[dict[str, str]] = _TABLES["compounds"]
_MEGA: Final = frozenset(_WORDS["mega"])
"""Units whose lower-case spelling means a thousandth."""
_LARGE: Final = frozenset("NJWVAKL")
"""Units with one capital letter; other capitals do not stand for the lower-case letter's unit."""
ABBREVIATIONS: Final = frozenset(_WORDS["abbreviations"])
"""Abbreviations that are a unit right after a number, with or without a space."""
SINGLE_LETTERS: Final = frozenset("mgshLlNJWV")
"""Single letters that are a unit after a number and a space."""
_FACTORS: Final = {
    **{word: Fraction(value) for word, value in MAGNITUDES.items()},
    **{word: Fraction(1, value) for word, value in DENOMINATORS.items()},
}
_POWERS_BEFORE: Final = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER: Final = {"squared": 2, "cubed": 3}
DESCENDING: Final[list[list[str]]] = [units.split() for units in _TABLES["parts"].values()]
"""Units in which several numbers give one quantity, the largest first."""
_CHINESE_UNIT: Final = re.compile(
    r"^(?P<body>.*[\d)}])\s*(?P<words>[\u4e00-\u9fff]+(?:/[\u4e00-\u9fff]+)?)\s*(?P<power>\^(?:\{\d\}|\d))?$"
)
_CHINESE_MAGNITUDES: Final[dict[str, int]] = _TABLES["chinese_magnitudes"]
_AREAS: Final = {"平方": 2, "立方": 3}
_COUNTERS: Final = frozenset(_TABLES["chinese"]["counters"])
_NO_COUNTER: Final = frozenset(_TABLES["chinese"]["no_counter"])
_NO_UNIT_WORDS: Final = frozenset(_WORDS["no_unit"])
_ANOTHER_NUMBER: Final = re.compile(
    r"\b(?:below|googol|least|mille|most|myriad|sqrt|th|thou|too|basis points?)\b"
    rf"|^per (?:{'|'.join(MAGNITUDES)})s?$|^point (?:{'|'.join(_SMALL)})\b"
    rf"|\b(?:{'|'.join((*_SMALL, *MAGNITUDES))})fold\b"
    r"|^(?:(?:square|cube|th) )?root$|\b(?:complement|conjugate|debt|deficit|excluded|extraneous|fails|fewer|grand"
    r"|impossible|invalid|lost|opposite|overdrawn|rejected|reversed|short)$"
)
"""Words that give a number another value or sign, or deny it; the last of them may also precede a noun."""
_FILLER: Final = re.compile(r"(?:^|\s)(?:in (?:total|all)|total|altogether|each|left|remaining)$", re.IGNORECASE)
"""Words after a number that are not units."""
_UNIT_TOKEN: Final = re.compile(r"\^\s*\{?\s*-?\d\s*\}?|\d|[^\W\d_]+|[/$€£¥₹¢]")
_NO_UNITS: Final = frozenset({*"xyz", *"kMB", "mn", "tn"})
"""Letters that are variables, or that may be magnitudes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """The unit and magnitude beside a number."""

    name: str
    """Canonical factors with their exponents, `m·s^-1`, `unit^2` for `square units`; empty without a unit."""
    factor: Fraction = Fraction(1)
    """The value of a magnitude: a million for `5 million`."""


def read_unit(words: str, exponent: str = "") -> Unit | None:
    """The unit in the words and the exponent after a number; None if they are not a unit."""
    written, words = words, _FILLER.sub("", words.strip(" ."))
    if written and not words:
        return Unit(name="")
    tokens = _UNIT_TOKEN.findall(words.replace(".", "").replace("$", " usd ").replace(r"\cdot", " "))
    if not tokens or _NO_UNITS.issuperset(tokens) or any(map(str.isdigit, tokens)):
        return None
    lowered = [token.lower() for token in tokens]
    if lowered[0] in _POWERS_AFTER or _NO_UNIT_WORDS.intersection(lowered) or _ANOTHER_NUMBER.search(" ".join(lowered)):
        return None
    factor = Fraction(1)
    while tokens and tokens[0].lower().removesuffix("s") in _FACTORS:
        factor *= _FACTORS[tokens.pop(0).lower().removesuffix("s")]
    if tokens and tokens[0].lower() in ("of", "per", "/") and len(tokens) == 1:
        return None
    if tokens[:1] == ["of"]:  # `5 million of them`, `two thirds of a cup`
        tokens = tokens[1:]
    whole = _COMPOUND_UNITS.get(" ".join(tokens).lower())
    if whole is not None:
        tokens = whole.split() if " " in whole else _UNIT_TOKEN.findall(whole)
    factors = _factors(tokens)
    if factors is None:
        return None
    if exponent and factors:
        factors[-1] = (factors[-1][0], int(exponent.strip("^{}")) * (-1 if factors[-1][1] < 0 else 1))
    return Unit(name=unit_name(factors), factor=factor)


def unit_name(factors: Iterable[tuple[str, int]]) -> str:
    """One spelling of a product of canonical units, each with its exponent."""
    powers: dict[str, int] = {}
    for name, power in factors:
        powers[name] = powers.get(name, 0) + power
    ordered = sorted((name, power) for name, power in powers.items() if power)
    return "·".join(name if power == 1 else f"{name}^{power}" for name, power in ordered)


def chinese_unit(text: str) -> tuple[str, Unit] | None:
    """(number, unit) of `5厘米`, `5 元/千克`, `5万`, `5个`."""
    match = _CHINESE_UNIT.match(text)
    if match is None:
        return None
    words, factor = match["words"], Fraction(1)
    while words and words[0] in _CHINESE_MAGNITUDES and words not in CANONICAL and words[:2] not in ("千米", "千克"):
        factor *= _CHINESE_MAGNITUDES[words[0]]
        words = words[1:]
    names = []
    for index, word in enumerate(re.split(r"/|每", words) if words else []):
        name, power = word, 1
        for area, exponent in _AREAS.items():
            if word.startswith(area):
                name, power = word.removeprefix(area), exponent
        if name not in CANONICAL and not (name[:1] in _COUNTERS and len(name) < 6 and _NO_COUNTER.isdisjoint(name)):
            return None
        names.append((CANONICAL.get(name, name), -power if index else power))
    if match["power"] and names:
        names[-1] = (names[-1][0], names[-1][1] * int(match["power"].strip("^{}")))
    return match["body"], Unit(name=unit_name(names), factor=factor)


def _factors(tokens: list[str]) -> list[tuple[str, int]] | None:
    """Units as (canonical name, exponent); those after `per` divide, and a phrase of nouns is one unit."""
    factors: list[tuple[str, int]] = []
    sign, power, phrase = 1, 1, list[str]()

    def close() -> None:
        nonlocal power
        if not phrase:
            return
        known = all(each.lower() in CANONICAL or each in _MEGA for each in map(_singular, phrase))
        names = [word_unit(each) for each in phrase] if known else [" ".join(map(word_unit, phrase))]
        factors.extend((name, sign) for name in names[:-1])
        factors.append((names[-1], sign * power))
        phrase.clear()
        power = 1

    for token in tokens:
        word = token.lower()
        if word in ("per", "/"):
            close()
            sign = -1
        elif word in _POWERS_BEFORE:
            close()
            power = _POWERS_BEFORE[word]
        elif word.startswith("^"):
            close()
            if not factors:
                return None
            factors[-1] = (factors[-1][0], sign * int(word.strip("^{} ")))
        elif word in _POWERS_AFTER:
            power = _POWERS_AFTER[word]
            close()
        else:
            phrase.append(token)
    if power != 1 and not phrase:
        return None
    close()
    return factors


def word_unit(word: str) -> str:
    """The canonical unit of one word."""
    if word in _MEGA:
        return f"mega{word[1:].lower()}"
    if len(word) == 1 and word.isupper() and word not in _LARGE:
        return word
    singular = _singular(word)
    return CANONICAL.get(singular, singular)


def _singular(word: str) -> str:
    if word in _MEGA:
        return word
    word = word.lower()
    for spelled in (word, word.removesuffix("s"), word.removesuffix("es")):
        if spelled in CANONICAL:
            return spelled
    return word.removesuffix("s") if len(word) > 3 else word


def spelled_number(text: str) -> Fraction | None:
    """The value of a text that is a number in English words as a whole, or None."""
    if _ENGLISH_WORDS.fullmatch(text) is None:
        return None
    words = re.split(r"[ -]+", text.lower())
    negative = words[0] in _NEGATIVE_WORDS
    value = _value(words[negative:])
    return -value if negative and value is not None else value


def _value(words: list[str]) -> Fraction | None:
    if not words:
        return None
    whole = _cardinal(words)
    if whole is not None:
        return Fraction(whole)
    for index in range(1, len(words) - 1):  # `one and a half`
        if words[index] == "and":
            first, rest = _cardinal(words[:index]), _fraction(words[index + 1 :])
            return None if first is None or rest is None or rest >= 1 else first + rest
    return _fraction(words)


def _fraction(words: list[str]) -> Fraction | None:
    """The value of `half`, `a third`, `two thirds`, `three hundredths`; a `third` alone is an ordinal."""
    name, numerator = words[-1], words[:-1]
    if not numerator:
        return Fraction(1, 2) if name == "half" else None
    count = 1 if numerator == ["a"] else _cardinal(numerator)
    denominator = DENOMINATORS.get(name.removesuffix("s"))
    if count is None or denominator is None or name.endswith("s") != (count != 1):
        return None
    if numerator[-1] in _TENS and denominator < 10:  # `twenty-fifths` means another denominator
        return None
    return Fraction(count, denominator)


def _cardinal(words: list[str]) -> int | None:
    """The value of `two thousand one hundred and five`: scales in descending order, each with a count up to 999."""
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
    index = words.index("hundred")
    hundreds, rest = _below_a_hundred(words[:index]), words[index + 1 :]
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
