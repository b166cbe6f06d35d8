"""Units of numbers: `cm`, `centimeters`, `square feet`, `ft^2`, `m/s`, `$`, degrees, `ways`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from flatpeak.rewards.math.number_words import DENOMINATORS, MAGNITUDES

_SPELLINGS: Final = {
    "mm": "millimeter millimetre 毫米",
    "cm": "centimeter centimetre cms 厘米 公分",
    "dm": "decimeter decimetre 分米",
    "m": "meter metre 米",
    "km": "kilometer kilometre kms 千米 公里",
    "in": "inch inche 英寸",
    "ft": "foot feet 英尺",
    "yd": "yard yds",
    "mi": "mile 英里",
    "mg": "milligram 毫克",
    "g": "gram gramme gm gms 克",
    "kg": "kilogram kilo kgs 千克 公斤",
    "t": "ton tonne 吨",
    "lb": "pound lbs",
    "oz": "ounce",
    "ml": "milliliter millilitre 毫升",
    "l": "liter litre 升",
    "gal": "gallon",
    "ms": "millisecond 毫秒",
    "s": "second sec secs 秒 秒钟",
    "min": "minute mins 分钟",
    "h": "hour hr hrs 小时",
    "day": "天 日",
    "year": "yr 年",
    "deg": "degree 度",
    "rad": "radian",
    "usd": "dollar buck $ us$ 美元",
    "eur": "euro € 欧元",
    "gbp": "£",
    "jpy": "yen ¥",
    "inr": "rupee ₹ rs",
    "cny": "yuan rmb 元 人民币",
    "cent": "¢ penny pennie",
    "n": "newton 牛 牛顿",
    "j": "joule 焦 焦耳",
    "w": "watt 瓦 瓦特",
    "v": "volt 伏 伏特",
    "a": "amp ampere",
    "ohm": "Ω 欧姆",
    "k": "kelvin",
    "hz": "hertz 赫兹",
    "pa": "pascal 帕",
    "mol": "mole 摩尔",
    "people": "person",
    "children": "child",
    "men": "man",
    "women": "woman",
}
CANONICAL: Final = {word: unit for unit, words in _SPELLINGS.items() for word in (unit, *words.split())}
_WHOLE: Final = {"mph": "mi/h", "kph": "km/h", "kmph": "km/h", "kmh": "km/h", "fps": "ft/s", "c": "deg c"}
_MEGA: Final = frozenset({"MW", "MV", "MN", "MJ", "MHz", "MPa", "Mg", "Mm", "Ms"})
"""Small letters would make them a thousandth."""
_LARGE: Final = frozenset("NJWVAKL")
"""Units of one capital; another capital is no spelling of the small letter's unit."""
_ABBREVIATIONS: Final = (
    "mm cm dm km in ft yd mi mg kg lb lbs oz ml mL gal ms min mins sec hr hrs mph kph kmph kmh fps Hz kHz MHz Pa kPa "
    "mol rad deg USD usd EUR kW kWh gm gms cms kms pts pcs ppl yrs wks Rs INR RMB"
)
ABBREVIATIONS: Final = frozenset(_ABBREVIATIONS.split())
"""Bare letters that are a unit right after a number, with or without a space; single letters need one."""
SINGLE: Final = frozenset("mgshLlNJWV")
_FACTORS: Final = {
    **{word: Fraction(value) for word, value in MAGNITUDES.items()},
    **{word: Fraction(1, value) for word, value in DENOMINATORS.items()},
}
_BEFORE: Final = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_AFTER: Final = {"squared": 2, "cubed": 3}
# A phrase with one of these is a sentence about the number and no unit of it; `mil` is three things.
_NO_NOUNS_TEXT: Final = (
    "a about almost am an and answer approximately approx around be but choose cubed doubled equal equals factorial "
    "fake false for from gross guess halved if incorrect inverse inverted is it less maybe mil minus mod modulo more "
    "nearly negated negative never no none nope nor not nothing only or other otherwise over perhaps plus pm possibly "
    "probably quadrupled reciprocal remainder roughly score so than that the then this times to tripled true unless "
    "untrue was with wrong yes you"
)
_NO_NOUNS: Final = frozenset(_NO_NOUNS_TEXT.split())
_FILLER: Final = re.compile(r"(?:^|\s)(?:in (?:total|all)|total|altogether|each|left|remaining)$", re.IGNORECASE)
"""Words after a number that name no unit."""
_PART: Final = re.compile(r"\^\s*\{?\s*-?\d\s*\}?|\d|[^\W\d_]+|[/$€£¥₹¢]")
_LETTERS: Final = frozenset("xyz")
"""Of one letter each, and no unit's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What stands beside a number."""

    name: str
    """Canonical: factors with their exponents, `m·s^-1`, `unit^2` for `square units`; empty for none."""
    factor: Fraction = Fraction(1)
    """Of a magnitude: a million for `5 million`."""


def read_unit(words: str, exponent: str = "") -> Unit | None:
    """The unit that words and an exponent after a number are; None if they are none."""
    filled, words = words, _FILLER.sub("", words.strip(" ."))
    if filled and not words:
        return Unit(name="")
    parts = _PART.findall(words.replace(".", "").replace("$", " usd ").replace(r"\cdot", " "))
    if not parts or parts == ["k"] or _LETTERS.issuperset(parts) or any(map(str.isdigit, parts)):
        return None
    if parts[0].lower() in _AFTER or _NO_NOUNS.intersection(map(str.lower, parts)):
        return None
    factor = Fraction(1)
    while parts and parts[0].lower().removesuffix("s") in _FACTORS:
        factor *= _FACTORS[parts.pop(0).lower().removesuffix("s")]
    if parts and parts[0].lower() in ("of", "per", "/") and len(parts) == 1:
        return None
    if parts[:1] == ["of"]:  # `5 million of them`, `two thirds of a cup`
        parts = parts[1:]
    whole = _WHOLE.get(" ".join(parts).lower())
    if whole is not None:
        parts = whole.split() if " " in whole else _PART.findall(whole)
    factors = _factors(parts)
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


def _factors(parts: list[str]) -> list[tuple[str, int]] | None:
    """(canonical name, exponent) of each unit; what follows `per` divides, and a phrase of nouns is one unit."""
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

    for part in parts:
        word = part.lower()
        if word in ("per", "/"):
            close()
            sign = -1
        elif word in _BEFORE:
            close()
            power = _BEFORE[word]
        elif word.startswith("^"):
            close()
            if not factors:
                return None
            factors[-1] = (factors[-1][0], sign * int(word.strip("^{} ")))
        elif word in _AFTER:
            power = _AFTER[word]
            close()
        else:
            phrase.append(part)
    if power != 1 and not phrase:
        return None
    close()
    return factors


def word_unit(word: str) -> str:
    """The canonical name of one word."""
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
