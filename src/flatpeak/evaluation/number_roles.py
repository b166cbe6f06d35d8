"""What each number of a worked question does. Where the text leaves a ambiguous_word, nothing is decided.

A solution's mark `<<60*2=120>>` has a 2 that may be the question's "2 slats per foot", or the two sides of a fence that
the question never mentions. Equal values say nothing about roles, so roles are read from the text: the question may
hold no word that makes a number a condition or counts something unsaid, each of its numbers enters one step, once, in
a line that names it, and whatever else the solution says in digits or words must be known from the question.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from flatpeak.evaluation.spans import ALIKE, last_sentence

_MARK = re.compile(r"<<([^<>=]{1,200})=([^<>=]{1,60})>>")
Place = Literal["term", "factor", "dividend", "divisor"]
"""How an operand enters its step; `term` is of a sum, a difference, or alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One mark: its expression as a tree over the operands, which stand in their order of reading."""

    tree: ast.expr
    operands: tuple[Fraction, ...]
    places: tuple[Place, ...]
    value: Fraction
    line: str
    """The line of the solution that the mark stands in, without marks."""


def read_steps(rationale: str) -> list[Step]:
    """Every mark, exactly; empty where one cannot be read or is not what it says."""
    steps = []
    for line in rationale.splitlines():
        plain = without_marks(line)
        for match in _MARK.finditer(line):
            try:
                tree = ast.parse(match[1].replace(",", "").replace("$", "").strip(), mode="eval").body
                found = tuple(_literals(tree, "term"))
                operands = tuple(operand for operand, _ in found)
                value = _evaluated(tree, iter(operands))
                if value != Fraction(match[2].replace(",", "").replace("$", "").strip()):
                    return []
            except (SyntaxError, ValueError, ZeroDivisionError):
                return []
            places = tuple(place for _, place in found)
            steps.append(Step(tree=tree, operands=operands, places=places, value=value, line=plain))
    return steps if rationale.count("<<") == len(steps) else []


def without_marks(rationale: str) -> str:
    """The solution as it reads, without its marks and without the last line's `#### 24`."""
    return re.sub(r"^####.*", "", _MARK.sub("", rationale), flags=re.MULTILINE)


def _literals(tree: ast.expr, place: Place) -> Iterator[tuple[Fraction, Place]]:
    """The numbers of an expression from left to right. Raises ValueError for anything but +, -, *, / of numbers."""
    match tree:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            yield from _literals(left, "term")
            yield from _literals(right, "term")
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            yield from _literals(left, "factor")
            yield from _literals(right, "factor")
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            yield from _literals(left, "dividend")
            yield from _literals(right, "divisor")
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            yield (Fraction(ast.unparse(tree)) if isinstance(value, float) else Fraction(value)), place
        case _:
            raise ValueError("not an expression of numbers")


def _evaluated(tree: ast.expr, operands: Iterator[Fraction]) -> Fraction:
    if not isinstance(tree, ast.BinOp):
        return next(operands)
    left, right = _evaluated(tree.left, operands), _evaluated(tree.right, operands)
    if isinstance(tree.op, ast.Add):
        return left + right
    if isinstance(tree.op, ast.Sub):
        return left - right
    return left * right if isinstance(tree.op, ast.Mult) else left / right


Origin = tuple[Literal["question", "percent", "step", "constant"], int]
"""Where an operand comes from: the question's number of that index, the same as a percentage, the step of that index,
or a constant that a word of the question stands for."""


def replayed(
    steps: Sequence[Step], origins: Sequence[Sequence[Origin]], values: Sequence[Fraction]
) -> list[Fraction] | None:
    """Every step's result with other numbers; None where one is negative, or not whole where it was."""
    results: list[Fraction] = []
    for step, row in zip(steps, origins, strict=True):
        try:
            result = _evaluated(step.tree, iter(operands_of(step, row, values, results)))
        except ZeroDivisionError:
            return None
        if result < 0 or (step.value.denominator == 1 and result.denominator != 1):
            return None
        results.append(result)
    return results if results[-1].denominator == 1 else None


def operands_of(
    step: Step, origins: Sequence[Origin], values: Sequence[Fraction], results: Sequence[Fraction]
) -> list[Fraction]:
    """The operands of a step, given the question's numbers and the earlier results."""
    found = []
    for (kind, at), old in zip(origins, step.operands, strict=True):
        of = {"question": values, "percent": values, "step": results}.get(kind)
        new = old if of is None else of[at]
        found.append(new / 100 if kind == "percent" else new)
    return found


_NUMBER_WORD = re.compile(
    r"\b(?:zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    r"|eighteen|nineteen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundreds?|thousands?|millions?"
    r"|once|thrice|triple[ds]?|tripling|trio|quartet|quintet|twins?|triplets?|pairs?|couples?|both|either|neither|solo"
    r"|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|quarters?|thirds|fourths|fifths|dozens|scores?"
    r"|single)\b"
)
"""Words that stand for a number which no perturbation changes."""
_AMBIGUOUS_WORDS = {
    "conditions, limits and choices, under which other numbers may call for another computation": (
        r"at least|at most|up to|over|under|above|below|exceeds?|exceeding|limit|minimum|maximum|whichever|unless|until"
        r"|otherwise|instead|enough|only|except|no more|or more|or less|best|worst|least|most|which|overtime|regular"
        r"|normal\w*|usual\w*|additional\w*|cheap(?:er|est)"
        r"|(?:old|young|small|larg|bigg|great|high|low|long|short|fast|slow|heavi|few)est"
    ),
    "averages and rounding": (
        r"averag\w*|mean|median|a?round\w*|roughly|about|approximately|nearly|almost|estimate\w*"
    ),
    "shapes, bodies, journeys and people whose parts nobody counts": (
        r"perimeter|areas?|square[ds]?|rectang\w*|triang\w*|circ\w*|cub(?:e|es|ic)|sides?|corners?|edges?|walls?|fences?"
        r"|legs?|wheels?|tires?|eyes?|ears?|hands?|fingers?|toes|trips?|back|return\w*|way|commut\w*|includ\w*"
        r"|himself|herself|themselves|parents|family|families|grandparents|siblings|each other|one another"
    ),
    "dates, times and parts of weeks": (
        r"weekends?|weekdays?|business|today|yesterday|tomorrow|decades?|centur(?:y|ies)|ago|a\.m|p\.m|am|pm|noon"
        r"|midnight|o'clock|clock|(?:mon|tues|wednes|thurs|fri|satur|sun)days?|every other|alternat\w*"
    ),
    "relations that are read in two ways": (
        r"than|ahead|behind|goals?|ratios?|probab\w*|chance|odds|consecutive|interest|compound\w*|others?|another|rest"
        r"|respectively|same|equal\w*|split|share[ds]?|sharing|divide[ds]?|between|among|for all|entire|cop(?:y|ies)"
        r"|refill\w*"
    ),
    "what the world knows better: how much of one measure makes another": (
        r"in an? (?:gallon|quart|pint|cup|ton|pound|mile|kilometer|yard)"
    ),
}
_AMBIGUOUS = re.compile(
    rf"\b(?:{'|'.join(_AMBIGUOUS_WORDS.values())})\b"
    # Ranges, sizes, remarks; "8 more" of an unsaid thing or than an unsaid number; "9 sheep and goats"; half as a
    # percentage, which is both what is taken and what is left.
    r"|[:(;]|\d\s*[-x]\s*\d|\d[- ]by[- ]\d|\d more\b|\d (?:\w+ )?\w+ and (?!\d)\w+[.,?]|\b50 ?%|\b50 percent"
    r"|% (?:less|off of)"
)
_MEASURES: tuple[tuple[int, str, str], ...] = (
    (60, r"hour|hourly", r"minute"),
    (60, r"minute", r"second"),
    (24, r"hour|hourly", r"day|daily"),
    (7, r"week|weekly", r"day|daily"),
    (12, r"month|monthly", r"year|yearly|annual"),
    (52, r"week|weekly", r"year|yearly|annual"),
    (12, r"inche?", r"foot|feet"),
    (3, r"foot|feet", r"yard"),
    (16, r"ounce", r"pound"),
    (100, r"cent", r"dollar"),
    (1000, r"gram", r"kilogram|kg"),
)
"""How many of one unit make another; the question must name both."""
_WORDS: tuple[tuple[str, Fraction, tuple[Place, ...]], ...] = (
    (r"\bhalf\b", Fraction(2), ("divisor",)),
    (r"\bhalf\b", Fraction(1, 2), ("factor",)),
    (r"\b(?:twice|doubl\w*)\b", Fraction(2), ("factor",)),
    (r"\bdozen\b", Fraction(12), ("factor", "dividend", "divisor")),
    (r"%|\bpercent", Fraction(100), ("term", "factor", "dividend", "divisor")),
)
"""What a word of the question multiplies or divides by."""
_COMMON_VALUES = frozenset(
    {*range(13), 14, 15, 16, 18, 20, 24, 25, 30, 31, 36, 48, 50, 52, 60, 90, 100, 144, 180, 360, 365, 1000}
)
"""Numbers that solutions often hold without anybody having said them."""
_STOPWORD_LIST = (
    "a an the of to in on at for and or is are was were he she they it his her their has have had do does did how many "
    "much each per by from with that this there will be as than more less if then so but not all some who what when "
    "where its also can would could should one get gets got take takes took make makes made"
)
_STOPWORDS = frozenset(_STOPWORD_LIST.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number of a question."""

    span: tuple[int, int]
    value: Fraction
    decimals: int
    percent: bool


def ambiguous_word(question: str) -> str | None:
    """The first word of a question that leaves the role of its numbers open."""
    text = question.lower()
    found = _AMBIGUOUS.search(text) or _NUMBER_WORD.search(text)
    return None if found is None else found[0]


def find_origins(
    steps: Sequence[Step], numbers: Sequence[Number], *, question: str, rationale: str
) -> list[list[Origin]] | None:
    """Where each operand comes from; None where that is not certain.

    Every number of the question enters one step, once, and every result but the last enters a later one.
    """
    origins = _origins(steps, numbers, question)
    if origins is None:
        return None
    uses = Counter(("question" if kind == "percent" else kind, at) for row in origins for kind, at in row)
    if any(uses["question", at] != 1 for at in range(len(numbers))):
        return None
    if any(
        uses["step", at] != 1 if steps[at].value in _COMMON_VALUES else not uses["step", at]
        for at in range(len(steps) - 1)
    ):
        return None
    named = all(_named_where_used(at, number, steps, origins, question) for at, number in enumerate(numbers))
    if not named or _names_a_bystander(question, rationale):
        return None
    return origins if _says_only_known_numbers(steps, numbers, rationale) else None


def _origins(steps: Sequence[Step], numbers: Sequence[Number], question: str) -> list[list[Origin]] | None:
    known: dict[Fraction, list[Origin]] = {}
    for index, number in enumerate(numbers):
        known.setdefault(number.value, []).append(("question", index))
        if number.percent:
            known.setdefault(number.value / 100, []).append(("percent", index))
    constants: Counter[Fraction] = Counter()
    found: list[list[Origin]] = []
    for index, step in enumerate(steps):
        row: list[Origin] = []
        for operand, place in zip(step.operands, step.places, strict=True):
            said = _constant_uses(operand, place, question)
            places = known.get(operand, []) + [("constant", 0)] * bool(said)
            constants[operand] += bool(said)
            if len(places) != 1 or constants[operand] > said > 0:
                return None
            row.append(places[0])
        found.append(row)
        known.setdefault(step.value, []).append(("step", index))
    return found


def _constant_uses(operand: Fraction, place: Place, question: str) -> int:
    """How many operands in such a place the words of the question may stand for."""
    text = question.lower().replace("$", " dollar ")
    counts = [
        len(re.findall(word, text)) * (2 if operand == 100 else 1)  # 100 - 20 and / 100
        for word, value, places in _WORDS
        if value == operand and place in places
    ]
    counts += [
        2
        for value, one, many in _MEASURES
        if value == operand and all(re.search(rf"\b(?:{unit})s?\b", text) for unit in (one, many))
    ]
    return max(counts, default=0)


def _named_where_used(
    at: int, number: Number, steps: Sequence[Step], origins: Sequence[Sequence[Origin]], question: str
) -> bool:
    """Whether a word beside the number stands in the solution's line that uses it too; not asked of rare values."""
    if number.value not in _COMMON_VALUES:
        return True
    used = next(
        step for step, row in zip(steps, origins, strict=True) if {("question", at), ("percent", at)} & set(row)
    )
    start, end = number.span
    before = re.split(r"[.?!;]", question[:start])[-1]
    after = re.split(r"[.?!;](?:\s|$)", question[end:])[0]
    beside = {*re.findall(r"[a-z]+", before.lower())[-3:], *re.findall(r"[a-z]+", after.lower())[:4]} - _STOPWORDS
    if before.endswith("$"):
        beside |= {"dollar", "cost"}
    if number.percent:
        beside.add("percent")
    line = used.line.lower().replace("$", " dollar ").replace("%", " percent ")
    return bool({*map(_stem, beside)} & {*map(_stem, re.findall(r"[a-z]+", line))})


def _names_a_bystander(question: str, rationale: str) -> bool:
    """Whether a person stands once in the question and not in the solution, and another one is asked about."""
    asked = re.findall(r"[a-z,] ([A-Z][a-z]+)", question[last_sentence(question) :])
    names = Counter(name for name in re.findall(r"\b[A-Z][a-z]+\b", question) if name in ALIKE)
    once = [name for name, count in names.items() if count == 1 and name not in asked and name not in rationale]
    return bool(asked and once)


def _stem(word: str) -> str:
    for ending in ("ies", "es", "s", "ing", "ed"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def _says_only_known_numbers(steps: Sequence[Step], numbers: Sequence[Number], rationale: str) -> bool:
    """Whether the solution's words hold only numbers that are known; 1 is in many phrases and changes nothing."""
    text = without_marks(rationale).lower()
    known = {Fraction(1), *(number.value for number in numbers), *(step.value for step in steps)}
    known.update(operand for step in steps for operand in step.operands)
    digits = {Fraction(found.rstrip(",").replace(",", "")) for found in re.findall(r"\d[\d,]*(?:\.\d+)?|\.\d+", text)}
    return digits <= known and _NUMBER_WORD.search(text) is None


def constants(steps: Sequence[Step], origins: Sequence[Sequence[Origin]]) -> list[Fraction]:
    """The operands that words of the question stand for."""
    return [
        operand
        for step, row in zip(steps, origins, strict=True)
        for operand, (kind, _) in zip(step.operands, row, strict=True)
        if kind == "constant"
    ]


def bounds(question: str) -> list[Fraction]:
    """What the units of a question let its numbers reach: 7 days a week, 24 hours a day, 100 percent."""
    text = question.lower()
    found = [
        Fraction(value)
        for value, one, many in _MEASURES
        if all(re.search(rf"\b(?:{unit})s?\b", text) for unit in (one, many))
    ]
    return found + [Fraction(100)] * ("%" in text or "percent" in text)


def keeps_order(before: Sequence[Fraction], after: Sequence[Fraction]) -> bool:
    """Whether the larger of any two numbers is the larger still: what was more, cheaper or left over remains so."""
    order = sorted(range(len(before)), key=before.__getitem__)
    return all(
        (before[one] < before[other]) == (after[one] < after[other]) and after[one] <= after[other]
        for one, other in pairwise(order)
    )


def keeps_divisibility(
    steps: Sequence[Step],
    origins: Sequence[Sequence[Origin]],
    *,
    before: tuple[Sequence[Fraction], Sequence[Fraction]],
    after: tuple[Sequence[Fraction], Sequence[Fraction]],
) -> bool:
    """Whether each number that a divisor divided, it divides still: apples bought together, or one by one.

    `before` and `after` are the question's numbers and the results.
    """
    for index, (step, row) in enumerate(zip(steps, origins, strict=True)):
        pairs = zip(
            operands_of(step, row, before[0], before[1]), operands_of(step, row, after[0], after[1]), strict=True
        )
        for place, (old, new) in zip(step.places, pairs, strict=True):
            if place != "divisor" or old <= 1:
                continue
            numbers = zip((*before[0], *before[1][:index]), (*after[0], *after[1][:index]), strict=True)
            if any(one % old == 0 and other % new != 0 for one, other in numbers):
                return False
    return True
