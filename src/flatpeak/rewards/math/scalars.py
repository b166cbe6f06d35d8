"""Reading of one number or expression with its currency, percent sign, degrees, unit or base."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import Final

from flatpeak.rewards.math.intervals import TEXT, TEXT_GROUP, Reading, has_functions, has_words, scalar, split
from flatpeak.rewards.math.parser import parse_expression
from flatpeak.rewards.math.syntax_tree import Node, UnreadableError, operation
from flatpeak.rewards.math.units import (
    ABBREVIATIONS,
    CANONICAL,
    DESCENDING,
    NUMBER_WORDS,
    SINGLE_LETTERS,
    Unit,
    chinese_unit,
    read_unit,
    spelled_number,
    unit_name,
    word_unit,
)

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

_CURRENCY: Final = re.compile(
    r"^([+-]?)\s*(?:\\text\s*\{\s*)?(?:US)?([$€£¥₹]|USD|EUR|INR|RMB|Rs\.?)(?:\s*\})?\s*([+-]?)\s*(?=[\d.\\({])"
)
_CURRENCY_AFTER: Final = re.compile(r"^(.*[\d}])\s*([$€£¥₹¢])$")
_DEGREE: Final = re.compile(r"^(.+?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:\\text\{\s*([CF])\s*\}|([CF]))?$")
_PERCENT: Final = re.compile(r"^(.+?)\s*(?:%|\\text\{\s*(?:%|percent|pct)\s*\}|percent|pct)$")
_TEXT_TAIL: Final = re.compile(rf"^(.*?)\s*{TEXT_GROUP}\s*(\^(?:\{{-?\d\}}|\d))?$")
_NOTE: Final = re.compile(r"^(.*\S)\s*\(([A-Za-z][A-Za-z ./-]*)\)$")
_WORDS_TAIL: Final = re.compile(
    r"^(?P<body>.*?(?:[\d)}!]|\d\.|\\pi))(?P<gap>\s*)(?P<words>[A-Za-z][A-Za-z./ ]*?)(?P<exponent>\^(?:\{\d\}|\d))?$"
)
_ORDINAL: Final = re.compile(
    r"^(\d+)\s*(?:st|nd|rd|th|\^\{?\\text\{\s*(?:st|nd|rd|th)\s*\}\}?|\\text\{(?:st|nd|rd|th)\})$"
)
_INNER_EXPONENT: Final = re.compile(r"^(.*?)\s*\^\s*\{?\s*(\d)\s*\}?$")
_BASED: Final = re.compile(
    r"^(?P<sign>[+-]?)\s*\(?(?:\\text\{)?\s*(?P<digits>(?=[0-9A-Z]*\d)[0-9A-Z]+(?:\.[0-9A-Z]+)?)\s*\}?\)?\s*"
    r"(?:_\s*(?:\{\s*)?(?:\\text\{)?\s*\(?(?P<base>\d{1,2}|[a-z]{3,9})\)?\s*\}?\s*\}?"
    r"|(?:\\text\{)?\s*\(?(?:in )?base\s*\}?\s*(?P<named>\d{1,2}|[a-z]{3,9})\s*\}?\)?)$"
)
_TO: Final = re.compile(r"\s*:\s*|\s+to\s+|\s*\\text\s*\{\s*to\s*\}\s*")
_HOUR: Final = re.compile(r"1?\d|2[0-3]")
_MINUTES: Final = re.compile(r"[0-5]\d")
_CLOCK: Final = re.compile(
    r"^(\d{1,2})(?::(\d{2}))?(?::(\d{2}))?\s*(?:\\text\{)?\s*(am|pm|a\.m\.?|p\.m\.?|AM|PM|A\.M\.?|P\.M\.?)\s*\}?$"
)
_OUT_OF: Final = re.compile(r"(\d{1,12})\s+out\s+of\s+(\d{1,12})")
_PART: Final = r"\d+(?:\.\d+)?\s*[A-Za-z]+\.?"
_PARTS: Final = re.compile(rf"{_PART}(?:(?:\s*,)?\s*(?:and\s+)?{_PART}){{1,3}}")
_NUMBER_AND_UNIT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_CHINESE: Final = re.compile(r"[\u4e00-\u9fff]")
_VOWELS: Final = frozenset("aeiouy")
_COUNTING_LETTERS: Final = frozenset("abcdxyz")


def read_scalar(text: str) -> Reading | None:
    """A scalar, a ratio, a time of day or a number in a base; None if the text is none of these."""
    for reader in (_based, _clock, _ratio, _measured):
        reading = reader(text)
        if reading is not None:
            return reading
    return None


def _based(text: str) -> Reading | None:
    match = _BASED.match(text)
    if match is None:
        return None
    base = match["base"] or match["named"]
    base = NUMBER_WORDS.get(base, base)
    if not base.isdigit() or (match["digits"][0].isalpha() and not match["digits"][1:]):
        return None
    digits = match["digits"].lstrip("0") or "0"
    return Reading(kind="based", text=("-" if match["sign"] == "-" else "") + digits, label=base)


def _clock(text: str) -> Reading | None:
    match = _CLOCK.match(text)
    if match is None:
        return None
    hour, minute, second, half = match.groups()
    time = f"{int(hour)}:{minute or '00'}:{second or '00'}{half[0].lower()}m"
    return Reading(kind="text", text=time)


def _ratio(text: str) -> Reading | None:
    terms = [term for _, term in split(text, _TO)]
    if len(terms) < 2 or any(map(has_words, terms)):
        return None
    try:
        items = tuple(scalar(term, parse_expression(term)) for term in terms)
    except UnreadableError:
        return None
    clock = len(terms) > 2 or any(term.startswith("0") for term in terms)
    either = _MINUTES.fullmatch(terms[1]) is not None and _HOUR.fullmatch(terms[0]) is not None
    return Reading(kind="ratio", text=text, items=items, label="clock" if clock else "either" if either else "")


def read_number_words(text: str) -> Reading | None:
    """A number in English words as a whole: `twenty-five`, `two thirds`."""
    value = spelled_number(text)
    return None if value is None else scalar(text, Node("number", number=value))


def read_parts(text: str) -> Reading | None:
    """A quantity in several units, in one spelling, `2 hrs and 30 mins` as `2h30min`; `7 out of 10` as 7/10."""
    words = TEXT.sub(r" \1 ", text).strip()
    if match := _OUT_OF.fullmatch(words):
        return scalar(text, parse_expression(rf"\frac{{{match[1]}}}{{{match[2]}}}"))
    if _PARTS.fullmatch(words) is None:
        return None
    parts = [(number, word_unit(word)) for number, word in _NUMBER_AND_UNIT.findall(words)]
    for units in DESCENDING:
        order = [units.index(unit) for _, unit in parts if unit in units]
        if len(order) == len(parts) and order == sorted(set(order)):
            return Reading(kind="text", text="".join(number + unit for number, unit in parts))
    return None


def _measured(text: str) -> Reading | None:
    body, percent, unit = text, False, None
    if match := _ORDINAL.match(text):
        body = match[1]
    elif match := _PERCENT.match(text):
        body, percent = match[1], True
    elif (match := _DEGREE.match(text)) and not has_functions(match[1]):
        body, unit = match[1], Unit(name=f"deg {match[2] or match[3] or ''}".strip().lower())
    elif match := _CURRENCY_AFTER.match(text):
        body, unit = match[1], read_unit(match[2])
    else:
        body, unit = _without_words(text)
    if match := _CURRENCY.match(body):
        sign, symbol, inner = match.groups()
        written = read_unit(symbol)
        rate = unit is not None and unit.name.endswith("^-1") and "·" not in unit.name  # `$18 per hour`
        if (sign and inner) or written is None or not (unit is None or rate or unit.name in ("", written.name)):
            return None
        name = "·".join(sorted((unit.name, written.name))) if unit is not None and rate else written.name
        body, unit = sign + inner + body[match.end() :], Unit(name=name, factor=unit.factor if unit else Fraction(1))
    if has_words(body):
        return None
    try:
        node = parse_expression(body)
    except UnreadableError:
        return None
    if unit is not None and unit.factor != 1:
        node = operation("mul", node, Node("number", number=unit.factor))
    return replace(scalar(text, node), unit=unit, percent=percent)


def _without_words(text: str) -> tuple[str, Unit | None]:
    if with_unit := latex_unit(text):
        return with_unit
    if (match := _TEXT_TAIL.match(text)) and _CHINESE.search(match[2]):
        return chinese_unit(f"{match[1]}{match[2].strip()}{match[3] or ''}") or (text, None)
    for body, words, exponent in _word_splits(text):
        inner = _INNER_EXPONENT.match(words)
        unit = read_unit(inner[1], inner[2]) if inner else read_unit(words, exponent)
        if body and unit is not None:
            return body, unit
    return chinese_unit(text) or (text, None)


def _word_splits(text: str) -> list[tuple[str, str, str]]:
    """(number, words, exponent) for each way to split words from the number before them."""
    splits = []
    if match := _TEXT_TAIL.match(text):
        body, words, exponent = match[1], match[2].strip(" .,()"), match[3] or ""
        degrees = _DEGREE.match(body) if words in ("C", "F") else None
        if not degrees:
            splits.append((body, words, exponent))
    if match := _NOTE.match(text):
        words = re.split(r"[ ./-]+", match[2])
        if _are_unit_words(words, gap=True) and max(map(len, words)) > 2:
            splits.append((match[1], match[2], ""))
    if match := _WORDS_TAIL.match(text):
        words = match["words"].strip()
        if _are_unit_words(re.split(r"[ /]+", words), gap=bool(match["gap"])):
            splits.append((match["body"], words, match["exponent"] or ""))
    return splits


def _are_unit_words(words: list[str], *, gap: bool) -> bool:
    """Whether bare letters are the words of a unit instead of a product of variables."""
    if len(words) == 1 and words[0] in SINGLE_LETTERS:
        return gap
    return all(_is_unit_word(word.strip("."), gap=gap) for word in words if word)


def _is_unit_word(word: str, *, gap: bool) -> bool:
    if (
        word in ABBREVIATIONS
        or (gap and len(word) == 3 and word.lower() in CANONICAL)
        or word.lower() in ("sq", "cu", "of", "per")
        or word in ("m", "s", "h", "L", "g")
    ):
        return True
    looks = not _VOWELS.isdisjoint(word.lower()) and not _COUNTING_LETTERS.issuperset(word.lower())
    return looks and (len(word) > 3 or (gap and len(word) == 3))


def latex_unit(text: str) -> tuple[str, Unit] | None:
    r"""(number, unit) if the unit is a product, quotient or symbol: `5\,\frac{\text{m}}{\text{s}}`, `5\ \Omega`."""
    match = _TAIL.match(text)
    if match is None or _PLAIN.match(match["product"] or ""):
        return None
    signed = [(match["product"], 1)] if match["product"] else [(match["over"], 1), (match["under"], -1)]
    factors: list[tuple[str, int]] = []
    for product, sign in signed:
        product_factors = _read_product(product, sign)
        if product_factors is None:
            return None
        factors += product_factors
    return match["body"], Unit(name=unit_name(factors))


def _read_product(text: str, sign: int) -> list[tuple[str, int]] | None:
    """The factors of a product of units; those after a slash divide. None if a word is not a known unit."""
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
    """The canonical name of a unit; empty if there is no word, None if it is unknown."""
    if ohm:
        prefix = {"": "", "k": "kilo", "K": "kilo", "M": "mega", "m": "milli"}.get(word)
        return None if prefix is None else ("micro" if micro else prefix) + "ohm"
    if not word:
        return ""
    name = word_unit(word)
    if name not in CANONICAL and len(word) > 2:
        return None
    return f"micro{name}" if micro else name
