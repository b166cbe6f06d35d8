"""Reading of a whole answer: lists, tuples, sets, matrices, equations, inequalities, and contradictions in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from flatpeak.rewards.math.expression_values import Expression
from flatpeak.rewards.math.intervals import (
    TEXT_GROUP,
    Kind,
    Reading,
    enclosed,
    has_words,
    intersection,
    plain,
    scalar,
    split,
    unnamed,
)
from flatpeak.rewards.math.normalize import ROW_END
from flatpeak.rewards.math.parser import parse_expression
from flatpeak.rewards.math.scalars import read_number_words, read_parts, read_scalar
from flatpeak.rewards.math.syntax_tree import Node, UndefinedError, UnreadableError, operation

_APPROXIMATE: Final = 0.05
"""Largest relative difference of two numbers joined by an approximation sign."""
_ROUNDING_ERROR: Final = 1e-9
_DECIMAL: Final = re.compile(r"[^\d.]*\d+(?:\.(?P<decimals>\d+))?[^\d.]*")
_SEPARATOR: Final = re.compile(
    r"\s*(?:[,;]\s*)?\\text\s*\{\s*(?:[,;]|,?\s*(?:and|or))\s*\}\s*|\s*[,;]\s*(?:(?:and|or)\s+)?|\s+(?:and|or)\s+|\\land\b|\\lor\b"
)
_BUILDER: Final = re.compile(r"^\\\{\s*([A-Za-z])(?:\s*\\in\s*\\mathbb\{R\})?\s*[|:]\s*(.+)\\\}$")
_COMMA: Final = re.compile(r"\s*[,;]\s*")
_UNION: Final = re.compile(r"\s*\\cup(?![A-Za-z])\s*")
_RELATION: Final = re.compile(r"\s*(?:\\(?:le|ge|ne|in|approx)(?![A-Za-z])|[=<>])\s*")
_IMPLIES: Final = re.compile(r"\s*\\Rightarrow(?![A-Za-z])\s*")
_AND: Final = re.compile(r"^(?:,?\s*(?:and|\\text\s*\{\s*,?\s*and\s*\})|\\land|,)$")
_INEQUALITY: Final = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])")
_WHOLE_TEXT: Final = re.compile(rf"^{TEXT_GROUP}$")
_MATRIX: Final = re.compile(
    r"^(.*?)(?:\\cdot|\\times)?\s*\\begin\s*\{pmatrix\}((?:(?!\\begin).)*)\\end\s*\{pmatrix\}$", re.DOTALL
)
_CHOICE: Final = re.compile(r"^[A-J]$")
_CELL: Final = re.compile(r"\s*&\s*")
_ROW: Final = re.compile(rf"\s*{ROW_END}\s*")
_PLUS_MINUS: Final = re.compile(r"\\(pm|mp)(?![A-Za-z])\s*")
_DENIAL: Final = r"\\(?:not|lnot|neg)\b|\\text\s*\{[^{}]*\b(?:not|never|but|except|unless|wrong|incorrect|false)\b"
_NAME: Final = re.compile(
    rf"^(?!{_DENIAL})"
    r"(?:\\[a-z]+(?<!\\pi)|\{?[A-Za-z]+\}?|\\text\s*\{[A-Za-z ]+\}|\\(?:overline|vec)\s*\{?[A-Za-z]{1,3}\}?"
    r"|m?\s*\\angle\s*[A-Za-z]{1,3}|\|\s*(?:\\(?:overline|vec|overrightarrow)\s*)?\{?[A-Z]{2,3}\}?\s*\|"
    r"|\|\s*\\(?:vec|overrightarrow)\s*\{?[A-Za-z]\}?\s*\||\\\|[^|]{1,24}\\\|)'?\s*(?:_(?:\{[^{}]*\}|\w))?\s*"
    r"(?:(?:(?<=[fghFGH])\^\s*\{\s*-1\s*\}\s*)?\(\s*\w+(?:\s*,\s*\w+)*\s*\))?'?$"
)
_NAMES: Final = re.compile(r"^\(\s*[A-Za-z](?:_\w)?(?:\s*,\s*[A-Za-z](?:_\w)?)+\s*\)$")
_TRAILING: Final = " .,;:!"
_FLIPPED: Final = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_INFINITE: Final = ("-\\infty", "\\infty")
_ALL_REAL: Final = frozenset(
    {"allrealnumbers", "allreals", "allrealnumber", "thesetofallrealnumbers", "thesetofrealnumbers"}
)
_ALL_REAL_BUT: Final = re.compile(
    r"^(?:\\text\s*\{\s*)?all real numbers except(?: for)?\s*\}?\s*(?:x\s*=\s*)?([^\sA-Za-z,;{}]+)\s*\}?$",
    re.IGNORECASE,
)
_TWO_POINTS: Final = re.compile(r"\.\s*\.$")


def read(text: str) -> Reading:
    """The reading of a text from `clean`, `unread` if the rules fail; OverLimitError if it is too deep."""
    text = _trimmed(text)
    for reader in _READERS:
        reading = reader(text)
        if reading is not None:
            return reading
    if has_words(text):
        return Reading(kind="text", text=plain(text))
    return Reading(kind="unread", text=text)


def _trimmed(text: str) -> str:
    text = text.strip()
    if text.endswith("!"):
        return text.lstrip(" ,;:")
    if _TWO_POINTS.search(text):  # a sentence ends with one point
        return text
    return text.strip(" ,;:").rstrip(_TRAILING) if not text.startswith(".") else text.rstrip(_TRAILING)


def _all_real(text: str) -> Reading | None:
    if text == r"\mathbb{R}" or (text[-1:].lower() in "srn}" and plain(text) in _ALL_REAL):
        return _interval(text, "()", *_INFINITE)
    exception = _ALL_REAL_BUT.match(text)
    return None if exception is None else read(rf"x \ne {exception[1]}")


def _wrapped(text: str) -> Reading | None:
    match = _WHOLE_TEXT.match(text)
    if match is None:
        return None
    reading = _as_choice(match[1].strip()) or read(match[1])
    letters = re.findall(r"[^\W\d_]+", match[1])
    # Words in \text are not products: VW is not W times V.
    if reading.kind in ("scalar", "unread") and letters and max(map(len, letters)) > 1 and reading.unit is None:
        return reading if reading.is_number else Reading(kind="text", text=plain(match[1]))
    return reading


def _implied(text: str) -> Reading | None:
    """The reading after the last arrow, unless relations or numbers before it contradict it."""
    steps = [step for _, step in split(text, _IMPLIES)]
    if len(steps) < 2 or not all(steps):
        return None
    *premises, answer = map(read, steps)
    for step, premise in zip(steps, premises, strict=False):
        comparable = premise.kind != "named" or answer.kind != "named" or premise.label == answer.label
        if (comparable and contradict(premise, answer)) or not (premise.is_number or _RELATION.search(step)):
            return Reading(kind="unread", text=text)
    return answer


def _separated(text: str) -> Reading | None:
    separated = split(text, _SEPARATOR)
    texts = [item for _, item in separated]
    if len(texts) < 2 or not any(texts):
        return None
    items = _flat((read(item) if item else Reading(kind="unread", text="") for item in texts), "list")
    names = {item.label if item.kind == "named" else "" for item in items}
    named = items[0].label if items[0].kind == "named" else ""
    if named and names <= {named, ""}:
        flat = _flat(_flat(items, "named"), "list")
        if not all(map(_INEQUALITY.search, texts)) or any(item.kind != "ordered" for item in flat):
            return _named_reading(text, named, Reading(kind="list", text=text, items=flat))
        # `x < 1 or x > 3` is a union of intervals, `x < 3 and x > 1` their intersection, and a comma may mean either.
        separators = [separator for separator, _ in separated[1:]]
        shared = intersection(flat) if all(map(_AND.match, separators)) else None
        if shared is None and any(_AND.match(separator) and separator != "," for separator in separators):
            return Reading(kind="unread", text=text)
        return _named_reading(text, named, shared or Reading(kind="union", text=text, items=flat))
    return Reading(kind="list", text=text, items=items)


def _union(text: str) -> Reading | None:
    members = split(text, _UNION)
    if len(members) < 2:
        return None
    return Reading(kind="union", text=text, items=_flat((read(member) for _, member in members), "union"))


def _matrix(text: str) -> Reading | None:
    match = _MATRIX.match(text)
    if match is None:
        return None
    rows = [[read(cell) for _, cell in split(row, _CELL)] for _, row in split(match[2].strip(f" {ROW_END}"), _ROW)]
    cells = [cell for row in rows for cell in row]
    if match[1]:
        factor = _expressions([f"{match[1]} 1" if match[1] == "-" else match[1]])
        if factor is None or any(cell.kind != "scalar" for cell in cells):
            return None
        cells = [_multiplied(match[1], factor[0], cell) for cell in cells]
    if len({len(row) for row in rows}) != 1:
        return Reading(kind="unread", text=text)
    return Reading(kind="matrix", text=text, items=tuple(cells), label=str(len(rows[0])))


def _multiplied(text: str, factor: Node, cell: Reading) -> Reading:
    node = cell.expression.node if cell.expression is not None else factor
    return replace(cell, text=f"{text}({cell.text})", expression=Expression(node=operation("mul", factor, node)))


def _bracketed(text: str) -> Reading | None:
    if text in (r"\emptyset", r"\{\}"):
        return Reading(kind="set", text=text)
    brackets_and_inside = enclosed(text)
    builder = _BUILDER.match(text)
    condition = read(builder[2]) if builder is not None else None
    if brackets_and_inside is None or (builder is not None and condition is not None and condition.label == builder[1]):
        return condition
    return _enclosed(text, *brackets_and_inside)


def _enclosed(text: str, brackets: str, inside: str) -> Reading | None:
    texts = [item for _, item in split(inside, _COMMA)]
    # TeX does not print bare braces, but {1, 2} is meant as a set.
    if brackets == r"\{\}" or (brackets == "{}" and len(texts) > 1):
        return Reading(kind="set", text=text, items=_flat(map(read, texts), "list"))
    if len(texts) > 1 and brackets in ("()", "[]", "(]", "[)"):
        return Reading(kind="ordered", text=text, items=tuple(map(read, texts)), label=brackets)
    if brackets == "[]" and _MATRIX.match(inside):
        return read(inside)
    if brackets not in ("()", "{}") or len(texts) != 1 or not inside:
        return None
    return _as_choice(inside) or read(inside)


def _flat(readings: Iterable[Reading], kind: Kind) -> tuple[Reading, ...]:
    """The readings, with each reading of that kind replaced by its items."""
    return tuple(item for reading in readings for item in (reading.items if reading.kind == kind else (reading,)))


def _as_choice(text: str) -> Reading | None:
    """A letter in parentheses or set as text: the answer to a multiple-choice question."""
    return replace(read(text), label="choice") if _CHOICE.match(text) else None


def _plus_minus(text: str) -> Reading | None:
    if _PLUS_MINUS.search(text) is None:
        return None
    signs = ({"pm": "+", "mp": "-"}, {"pm": "-", "mp": "+"})
    either = ["".join(sign.get(piece, piece) for piece in _PLUS_MINUS.split(text)) for sign in signs]
    return Reading(kind="list", text=text, items=tuple(read(each) for each in either))


def _related(text: str) -> Reading | None:
    related = split(text, _RELATION)
    if len(related) < 2:
        return None
    signs, sides = [sign for sign, _ in related[1:]], [side for _, side in related]
    if r"\approx" in signs:
        return _approximation(text, signs, sides)
    if not all(sides):
        return None
    if signs == [r"\in"]:
        return _named_reading(text, sides[0], read(sides[1])) if _is_variable(sides[0]) else None
    if set(signs) == {"="}:
        return _equation(text, sides)
    return None if {"=", r"\in"} & set(signs) else _inequality(text, signs, sides)


def _is_variable(side: str) -> bool:
    """Whether the side before an `\\in` is a name, with or without words; `x-1` would shift the interval."""
    if _NAME.match(side) or _NAMES.match(side):
        return True
    return re.match(_DENIAL, side) is None and _expressions([side]) is None


def _approximation(text: str, signs: list[str], sides: list[str]) -> Reading | None:
    """The first side that is not a name, because the approximation of a value is not the value."""
    values = [read(side) for side in sides]
    if not set(signs) <= {"=", r"\approx"} or contradicting(values, signs):
        return Reading(kind="unread", text=text)
    return next((value for value, side in zip(values, sides, strict=True) if side and not _NAME.match(side)), None)


def _equation(text: str, sides: list[str]) -> Reading | None:
    named = _NAME.match(sides[0]) or _NAMES.match(sides[0])
    nodes = None if named else _expressions(sides)
    if nodes is not None and len(sides) == 2 and any(Expression(node=node).letters for node in nodes):
        if _NAME.match(sides[1]) and not Expression(node=nodes[0]).letters:
            return _named_reading(text, sides[1], read(sides[0]))
        return Reading(kind="equation", text=text, expression=_difference(*nodes))
    values = [read(side) for side in (sides[1:] if named else sides)]
    if contradicting(values, ["="] * (len(values) - 1)):
        return Reading(kind="unread", text=text)
    if named:
        return _named_reading(text, sides[0], values[-1])
    return values[-1] if values[0].is_number else None


def _named_reading(text: str, name: str, value: Reading) -> Reading:
    difference = None
    if value.kind == "scalar" and value.expression is not None and (left := _expressions([name])):
        difference = _difference(left[0], value.expression.node)
    return Reading(kind="named", text=text, items=(value,), label=re.sub(r"\s", "", name), expression=difference)


def _inequality(text: str, signs: list[str], sides: list[str]) -> Reading | None:
    nodes = _expressions(sides)
    if nodes is None:
        return None
    if signs[0] in (">", r"\ge"):
        signs, sides, nodes = [_FLIPPED.get(sign, sign) for sign in signs[::-1]], sides[::-1], nodes[::-1]
    if len(sides) > 1 and not {">", r"\ge", r"\ne"} & set(signs):
        interval = _as_interval(text, signs, sides)
        if interval is not None:
            return interval
    items = tuple(scalar(side, node) for side, node in zip(sides, nodes, strict=True))
    return Reading(kind="inequality", text=text, items=items, label=" ".join(signs))


def _as_interval(text: str, signs: list[str], sides: list[str]) -> Reading | None:
    """The interval of `1 < x \\le 2` or `x < 2`: one name, and bounds without letters."""
    names = [index for index, side in enumerate(sides) if _NAME.match(side)]
    bounds = [parse_expression(side) for index, side in enumerate(sides) if index not in names]
    if len(names) != 1 or any(Expression(node=bound).letters - {"infty"} for bound in bounds):
        return None
    if len(sides) == 3 and names != [1]:
        return None
    index = names[0]
    low = (sides[index - 1], signs[index - 1]) if index else (_INFINITE[0], "<")
    high = (sides[index + 1], signs[index]) if index + 1 < len(sides) else (_INFINITE[1], "<")
    brackets = ("(" if low[1] == "<" else "[") + (")" if high[1] == "<" else "]")
    return _named_reading(text, sides[index], _interval(text, brackets, low[0], high[0])) if len(sides) <= 3 else None


def _interval(text: str, brackets: str, low: str, high: str) -> Reading:
    return Reading(kind="ordered", text=text, items=(read(low), read(high)), label=brackets)


def _expressions(sides: list[str]) -> list[Node] | None:
    if any(map(has_words, sides)):
        return None
    try:
        return [parse_expression(side) for side in sides]
    except UnreadableError:
        return None


def _difference(left: Node, right: Node) -> Expression:
    return Expression(node=operation("add", left, operation("neg", right)))


def contradicting(readings: Sequence[Reading], signs: Sequence[str]) -> bool:
    r"""Whether two neighbours, joined by `=` or `\approx`, are numbers that differ."""
    return any(
        contradict(first, second, approximately=sign == r"\approx")
        for first, second, sign in zip(readings[:-1], readings[1:], signs, strict=True)
    )


def contradict(first: Reading, second: Reading, *, approximately: bool = False) -> bool:
    """Whether both are numbers in one unit and differ by more than rounding; a number without a value differs."""
    one, other = unnamed(first), unnamed(second)
    if one.unit is not None and other.unit is not None and one.unit.name != other.unit.name:
        return False
    try:
        a, b = _number(one), _number(other)
    except UndefinedError:
        return True
    if a is None or b is None:
        return False
    readings = [(a, b)]
    if one.percent != other.percent:
        readings.append((a / 100, b) if one.percent else (a, b / 100))
    allowed = max(_rounding(one, approximately), _rounding(other, approximately))
    relative = _APPROXIMATE if approximately else _ROUNDING_ERROR
    return all(abs(x - y) > max(allowed, relative * max(abs(x), abs(y))) for x, y in readings)


def _number(reading: Reading) -> complex | None:
    """The value in double precision; None if it is not a number, or has too many digits."""
    return reading.expression.rough[0] if reading.is_number and reading.expression is not None else None


def _rounding(reading: Reading, approximately: bool) -> float:
    """Half a unit of a decimal's last digit, as in `5/7 = 0.71`; for integers only if `approximately`."""
    match = _DECIMAL.fullmatch(reading.text)
    decimals = len(match["decimals"] or "") if match is not None else 0
    if match is None or (decimals == 0 and not approximately):
        return 0.0
    return 0.5 * 10.0**-decimals * (1 + _ROUNDING_ERROR)


_READERS: Final = (
    _all_real,
    read_number_words,
    read_parts,
    _wrapped,
    _implied,
    _separated,
    _union,
    _matrix,
    _bracketed,
    _related,
    _plus_minus,
    read_scalar,
)
