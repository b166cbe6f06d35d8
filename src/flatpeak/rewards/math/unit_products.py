r"""Units that are more than words: products and quotients in LaTeX (`\text{m}\cdot\text{s}^{-1}`), and Chinese ones."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from flatpeak.rewards.math.units import CANONICAL, Unit, unit_name, word_unit

_WORD: Final = (
    r"(?:\\mu\s*)?\\text\s*\{\s*[A-Za-z]{1,12}(?: [A-Za-z]{1,12}){0,2}\s*\}"
    r"|(?:\\text\s*\{\s*[A-Za-z]\s*\}|\\mu)?\s*\\Omega(?![A-Za-z])"
)
_FACTOR: Final = rf"(?:{_WORD})\s*(?:\^\s*(?:\{{\s*-?\d\s*\}}|\d))?"
_PRODUCT: Final = rf"{_FACTOR}(?:\s*(?:\\cdot|/)?\s*{_FACTOR}){{0,7}}"
_QUOTIENT: Final = rf"\\frac\s*\{{\s*(?P<over>{_PRODUCT})\s*\}}\s*\{{\s*(?P<under>{_PRODUCT})\s*\}}"
_TAIL: Final = re.compile(
    rf"^(?P<body>.*?(?:[\d)}}!]|\d\.|\\pi))\s*(?:\\cdot\s*)?(?:{_QUOTIENT}|(?P<product>{_PRODUCT}))$"
)
_FACTORS: Final = re.compile(
    r"(?P<slash>/)|(?P<micro>\\mu\s*)?(?:\\text\s*\{\s*(?P<words>[A-Za-z ]+?)\s*\}\s*)?(?P<ohm>\\Omega)?"
    r"\s*(?:\^\s*\{?\s*(?P<power>-?\d)\s*\}?)?"
)
_PLAIN: Final = re.compile(r"^\\text\s*\{[^{}]*\}\s*(?:\^\s*\{?\s*\d\s*\}?)?$")

_CHINESE: Final = re.compile(
    r"^(?P<body>.*[\d)}])\s*(?P<words>[\u4e00-\u9fff]+(?:/[\u4e00-\u9fff]+)?)\s*(?P<power>\^(?:\{\d\}|\d))?$"
)
_MAGNITUDES: Final = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}
_AREAS: Final = {"平方": 2, "立方": 3}
_COUNTERS: Final = frozenset(
    "个人只本条张块名位辆棵朵支枝枚件种页台间座头匹袋箱瓶盒杯天日年月周岁分角吨层步组班艘架颗粒根"
)
"""Chinese words that count things, `5个苹果`. Not those that multiply: pairs, dozens, times as many."""
_NO_NOUN: Final = frozenset("或和与及不非无多余半倍约少左右以之的是")


def latex_unit(text: str) -> tuple[str, Unit] | None:
    r"""(number, unit) where the unit is a product, quotient or symbol: `5\,\frac{\text{m}}{\text{s}}`, `5\ \Omega`."""
    match = _TAIL.match(text)
    if match is None or _PLAIN.match(match["product"] or ""):
        return None
    parts = [(match["product"], 1)] if match["product"] else [(match["over"], 1), (match["under"], -1)]
    factors: list[tuple[str, int]] = []
    for part, sign in parts:
        read = _read_product(part, sign)
        if read is None:
            return None
        factors += read
    return match["body"], Unit(name=unit_name(factors))


def _read_product(text: str, sign: int) -> list[tuple[str, int]] | None:
    """The factors; what follows a slash divides. None where a word is no known unit."""
    factors = []
    for match in _FACTORS.finditer(text):
        if match["slash"]:
            sign = -sign
        *others, last = (match["words"] or "").split() or [""]
        names = [_symbol(word, ohm=False, micro=False) for word in others]
        names.append(_symbol(last, ohm=match["ohm"] is not None, micro=match["micro"] is not None))
        if None in names:
            return None
        powers = [sign] * len(others) + [sign * int(match["power"] or 1)]
        factors += [(name, power) for name, power in zip(names, powers, strict=True) if name]
    return factors


def _symbol(word: str, *, ohm: bool, micro: bool) -> str | None:
    """The canonical name; empty for no word, None for an unknown one."""
    if ohm:
        prefix = {"": "", "k": "kilo", "K": "kilo", "M": "mega", "m": "milli"}.get(word)
        return None if prefix is None else ("micro" if micro else prefix) + "ohm"
    if not word:
        return ""
    name = word_unit(word)
    if name not in CANONICAL and len(word) > 2:
        return None
    return f"micro{name}" if micro else name


def chinese_unit(text: str) -> tuple[str, Unit] | None:
    """(number, unit) of `5厘米`, `5 元/千克`, `5万`, `5个`."""
    match = _CHINESE.match(text)
    if match is None:
        return None
    words, factor = match["words"], Fraction(1)
    while words and words[0] in _MAGNITUDES and words not in CANONICAL and words[:2] not in ("千米", "千克"):
        factor *= _MAGNITUDES[words[0]]
        words = words[1:]
    names = []
    for place, word in enumerate(re.split(r"/|每", words) if words else []):
        name, power = word, 1
        for area, exponent in _AREAS.items():
            if word.startswith(area):
                name, power = word.removeprefix(area), exponent
        if name not in CANONICAL and not (name[:1] in _COUNTERS and len(name) < 6 and _NO_NOUN.isdisjoint(name)):
            return None
        names.append((CANONICAL.get(name, name), -power if place else power))
    if match["power"] and names:
        names[-1] = (names[-1][0], names[-1][1] * int(match["power"].strip("^{}")))
    return match["body"], Unit(name=unit_name(names), factor=factor)
