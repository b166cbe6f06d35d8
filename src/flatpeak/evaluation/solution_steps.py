"""The role of each number of a question in its worked solution, if the text makes it unambiguous.

In a solution's mark `<<60*2=120>>`, the 2 may be the question's "2 slats per foot" or the two sides of a fence that the
question never mentions. Equal values do not prove equal roles, so roles are read from the text. The question must have
no word that makes a number a condition or counts something unmentioned. Each of its numbers must enter one step, once,
in a line that names it; every other number of the solution, in digits or words, must be known from the question.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Final, Literal

from flatpeak.evaluation.text_perturbations import INTERCHANGEABLE, last_sentence

Role = Literal["term", "factor", "dividend", "divisor"]
"""The role of an operand in its step; `term` means part of a sum or difference, or alone."""
Origin = tuple[Literal["question", "percent", "step", "constant"], int]
"""The source of an operand: the question's number with that index, the same as a percentage, the step with that index,
or a constant that a word of the question implies."""

_OPERATIONS: Final[dict[type[ast.operator], tuple[Callable[[Fraction, Fraction], Fraction], Role, Role]]] = {
    ast.Add: (operator.add, "term", "term"),
    ast.Sub: (operator.sub, "term", "term"),
    ast.Mult: (operator.mul, "factor", "factor"),
    ast.Div: (operator.truediv, "dividend", "divisor"),
}
"""The operation of each sign, and the roles of its two sides."""
_MARK: Final = re.compile(r"<<([^<>=]{1,200})=([^<>=]{1,60})>>")
_NUMBER_WORD: Final = re.compile(
    r"\b(?:zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    r"|eighteen|nineteen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundreds?|thousands?|millions?"
    r"|once|thrice|triple[ds]?|tripling|trio|quartet|quintet|twins?|triplets?|pairs?|couples?|both|either|neither|solo"
    r"|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|quarters?|thirds|fourths|fifths|dozens|scores?"
    r"|single)\b"
)
"""Words for numbers, which perturbations do not change."""
_AMBIGUOUS_WORDS: Final = {
    "conditions, limits and choices, under which other numbers may call for another computation": (
        r"at least|at most|up to|over|under|above|below|exceeds?|exceeding|limit|minimum|maximum|whichever|unless|until"
        r"|otherwise|instead|enough|only|except|no more|or more|or less|best|worst|least|most|which|overtime|regular"
        r"|normal\w*|usual\w*|additional\w*|cheap(?:er|est)"
        r"|(?:old|young|small|larg|bigg|great|high|low|long|short|fast|slow|heavi|few)est"
    ),
    "averages and rounding": (
        r"averag\w*|mean|median|a?round\w*|roughly|about|approximately|nearly|almost|estimate\w*"
    ),
    "shapes, bodies, journeys and people, whose parts go uncounted": (
        r"perimeter|areas?|square[ds]?|rectang\w*|triang\w*|circ\w*|cub(?:e|es|ic)|sides?|corners?|edges?|walls?|fences?"
        r"|legs?|wheels?|tires?|eyes?|ears?|hands?|fingers?|toes|trips?|back|return\w*|way|commut\w*|includ\w*"
        r"|himself|herself|themselves|parents|family|families|grandparents|siblings|each other|one another"
    ),
    "dates, times and parts of weeks": (
        r"weekends?|weekdays?|business|today|yesterday|tomorrow|decades?|centur(?:y|ies)|ago|a\.m|p\.m|am|pm|noon"
        r"|midnight|o'clock|clock|(?:mon|tues|wednes|thurs|fri|satur|sun)days?|every other|alternat\w*"
    ),
    "relations that can be read in two ways": (
        r"than|ahead|behind|goals?|ratios?|probab\w*|chance|odds|consecutive|interest|compound\w*|others?|another|rest"
        r"|respectively|same|equal\w*|split|share[ds]?|sharing|divide[ds]?|between|among|for all|entire|cop(?:y|ies)"
        r"|refill\w*"
    ),
    "conversions of units that need knowledge of the world": (
        r"in an? (?:gallon|quart|pint|cup|ton|pound|mile|kilometer|yard)"
    ),
}
_AMBIGUOUS: Final = re.compile(
    rf"\b(?:{'|'.join(_AMBIGUOUS_WORDS.values())})\b"
    # Ranges, sizes, remarks; "8 more" of an unnamed thing or than an unnamed number; "9 sheep and goats"; half as a
    # percentage, which is both the share taken and the share left.
    r"|[:(;]|\d\s*[-x]\s*\d|\d[- ]by[- ]\d|\d more\b|\d (?:\w+ )?\w+ and (?!\d)\w+[.,?]|\b50 ?%|\b50 percent"
    r"|% (?:less|off of)"
)
_UNIT_RATIOS: Final[tuple[tuple[int, str, str], ...]] = (
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
"""The number of one unit in another, with a pattern for each; the question must name both."""
_MULTIPLIERS: Final[tuple[tuple[str, Fraction, tuple[Role, ...]], ...]] = (
    (r"\bhalf\b", Fraction(2), ("divisor",)),
    (r"\bhalf\b", Fraction(1, 2), ("factor",)),
    (r"\b(?:twice|doubl\w*)\b", Fraction(2), ("factor",)),
    (r"\bdozen\b", Fraction(12), ("factor", "dividend", "divisor")),
    (r"%|\bpercent", Fraction(100), ("term", "factor", "dividend", "divisor")),
)
"""Words of a question that imply a constant, with the constant and the roles it can have."""
_COMMON_VALUES: Final = frozenset(
    {*range(13), 14, 15, 16, 18, 20, 24, 25, 30, 31, 36, 48, 50, 52, 60, 90, 100, 144, 180, 360, 365, 1000}
)
"""Numbers that solutions often contain although the question does not mention them."""
_STOPWORD_LIST: Final = (
    "a an the of to in on at for and or is are was were he she they it his her their has have had do does did how many "
    "much each per by from with that this there will be as than more less if then so but not all some who what when "
    "where its also can would could should one get gets got take takes took make makes made"
)
_STOPWORDS: Final = frozenset(_STOPWORD_LIST.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number in the text of a question."""

    position: tuple[int, int]
    """Its start and end in the text."""
    value: Fraction
    decimals: int
    percent: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One mark of a worked solution: its expression as a tree, with the operands from left to right."""

    tree: ast.expr
    operands: tuple[Fraction, ...]
    roles: tuple[Role, ...]
    value: Fraction
    line: str
    """The line of the solution with the mark, without marks."""


def read_steps(rationale: str) -> list[Step]:
    """Parse every mark exactly; empty if a mark cannot be parsed or has a wrong result."""
    steps = []
    for line in rationale.splitlines():
        plain = without_marks(line)
        for match in _MARK.finditer(line):
            try:
                tree = ast.parse(match[1].replace(",", "").replace("$", "").strip(), mode="eval").body
                literals = tuple(_literals(tree, "term"))
                operands = tuple(operand for operand, _ in literals)
                value = _evaluated(tree, iter(operands))
                if value != Fraction(match[2].replace(",", "").replace("$", "").strip()):
                    return []
            except (SyntaxError, ValueError, ZeroDivisionError):
                return []
            roles = tuple(role for _, role in literals)
            steps.append(Step(tree=tree, operands=operands, roles=roles, value=value, line=plain))
    return steps if rationale.count("<<") == len(steps) else []


def find_origins(
    steps: Sequence[Step], numbers: Sequence[Number], *, question: str, rationale: str
) -> list[list[Origin]] | None:
    """Find the origin of each operand; None if one is uncertain.

    Every number of the question enters one step, once, and every result but the last enters a later one.
    """
    origins = _origins(steps, numbers, question)
    if origins is None:
        return None
    uses: Counter[tuple[str, int]] = Counter()
    for row in origins:
        for kind, index in row:
            uses["question" if kind == "percent" else kind, index] += 1
    if any(uses["question", index] != 1 for index in range(len(numbers))):
        return None
    if any(
        uses["step", index] != 1 if steps[index].value in _COMMON_VALUES else not uses["step", index]
        for index in range(len(steps) - 1)
    ):
        return None
    named = all(_named_where_used(i, number, steps, origins, question) for i, number in enumerate(numbers))
    if not named or _names_a_bystander(question, rationale):
        return None
    return origins if _says_only_known_numbers(steps, numbers, rationale) else None


def recompute(
    steps: Sequence[Step], origins: Sequence[Sequence[Origin]], values: Sequence[Fraction]
) -> list[Fraction] | None:
    """Every step's result with other numbers; None if a result is negative, or no longer an integer."""
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
    operands = []
    for (kind, index), old in zip(origins, step.operands, strict=True):
        source = {"question": values, "percent": values, "step": results}.get(kind)
        new = old if source is None else source[index]
        operands.append(new / 100 if kind == "percent" else new)
    return operands


def ambiguous_word(question: str) -> str | None:
    """The first word of a question that makes the role of its numbers ambiguous."""
    text = question.lower()
    match = _AMBIGUOUS.search(text) or _NUMBER_WORD.search(text)
    return None if match is None else match[0]


def constants(steps: Sequence[Step], origins: Sequence[Sequence[Origin]]) -> list[Fraction]:
    """The operands that words of the question imply."""
    return [
        operand
        for step, row in zip(steps, origins, strict=True)
        for operand, (kind, _) in zip(step.operands, row, strict=True)
        if kind == "constant"
    ]


def bounds(question: str) -> list[Fraction]:
    """Upper bounds from the units of a question: 7 days a week, 24 hours a day, 100 percent."""
    text = question.lower()
    ratios = _unit_ratios(text)
    if "%" in text or "percent" in text:
        ratios.append(Fraction(100))
    return ratios


def keeps_order(before: Sequence[Fraction], after: Sequence[Fraction]) -> bool:
    """Whether the order of all numbers is unchanged, so that more stays more and cheaper stays cheaper."""
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
    """Whether each divisor still divides the numbers that it divided, as for apples bought in bags.

    `before` and `after` are the question's numbers and the results.
    """
    for index, (step, row) in enumerate(zip(steps, origins, strict=True)):
        pairs = zip(
            operands_of(step, row, before[0], before[1]), operands_of(step, row, after[0], after[1]), strict=True
        )
        for role, (old, new) in zip(step.roles, pairs, strict=True):
            if role != "divisor" or old <= 1:
                continue
            numbers = zip((*before[0], *before[1][:index]), (*after[0], *after[1][:index]), strict=True)
            if any(was % old == 0 and now % new != 0 for was, now in numbers):
                return False
    return True


def without_marks(rationale: str) -> str:
    """The text of the solution, without its marks and without the last line's `#### 24`."""
    return re.sub(r"^####.*", "", _MARK.sub("", rationale), flags=re.MULTILINE)


def _literals(tree: ast.expr, role: Role) -> Iterator[tuple[Fraction, Role]]:
    """The numbers of an expression from left to right, with their roles. ValueError for anything but +, -, *, /."""
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATIONS:
        _, left, right = _OPERATIONS[type(tree.op)]
        yield from _literals(tree.left, left)
        yield from _literals(tree.right, right)
    elif isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        yield Fraction(ast.unparse(tree)), role
    else:
        raise ValueError("not an expression of numbers")


def _evaluated(tree: ast.expr, operands: Iterator[Fraction]) -> Fraction:
    if not isinstance(tree, ast.BinOp):
        return next(operands)
    left, right = _evaluated(tree.left, operands), _evaluated(tree.right, operands)
    return _OPERATIONS[type(tree.op)][0](left, right)


def _origins(steps: Sequence[Step], numbers: Sequence[Number], question: str) -> list[list[Origin]] | None:
    known: dict[Fraction, list[Origin]] = {}
    for index, number in enumerate(numbers):
        known.setdefault(number.value, []).append(("question", index))
        if number.percent:
            known.setdefault(number.value / 100, []).append(("percent", index))
    constants: Counter[Fraction] = Counter()
    origins: list[list[Origin]] = []
    for index, step in enumerate(steps):
        row: list[Origin] = []
        for operand, role in zip(step.operands, step.roles, strict=True):
            constant_uses = _constant_uses(operand, role, question)
            candidates = known.get(operand, [])
            if constant_uses:
                candidates = [*candidates, ("constant", 0)]
                constants[operand] += 1
            if len(candidates) != 1 or constants[operand] > constant_uses > 0:
                return None
            row.append(candidates[0])
        origins.append(row)
        known.setdefault(step.value, []).append(("step", index))
    return origins


def _constant_uses(operand: Fraction, role: Role, question: str) -> int:
    """The number of operands with this value and role that words of the question may imply."""
    text = question.lower().replace("$", " dollar ")
    counts = [
        len(re.findall(word, text)) * (2 if operand == 100 else 1)  # 100 - 20 and / 100
        for word, value, roles in _MULTIPLIERS
        if value == operand and role in roles
    ]
    counts += [2 for ratio in _unit_ratios(text) if ratio == operand]
    return max(counts, default=0)


def _unit_ratios(text: str) -> list[Fraction]:
    """The ratios of the units that a text in lower case names."""
    return [
        Fraction(value)
        for value, *units in _UNIT_RATIOS
        if all(re.search(rf"\b(?:{unit})s?\b", text) for unit in units)
    ]


def _named_where_used(
    index: int, number: Number, steps: Sequence[Step], origins: Sequence[Sequence[Origin]], question: str
) -> bool:
    """Whether a word next to a common number is also in the solution's line that uses it; always true for rare ones."""
    if number.value not in _COMMON_VALUES:
        return True
    step = next(
        step for step, row in zip(steps, origins, strict=True) if {("question", index), ("percent", index)} & set(row)
    )
    start, end = number.position
    before = re.split(r"[.?!;]", question[:start])[-1]
    after = re.split(r"[.?!;](?:\s|$)", question[end:])[0]
    neighbors = {*re.findall(r"[a-z]+", before.lower())[-3:], *re.findall(r"[a-z]+", after.lower())[:4]} - _STOPWORDS
    if before.endswith("$"):
        neighbors |= {"dollar", "cost"}
    if number.percent:
        neighbors.add("percent")
    line = step.line.lower().replace("$", " dollar ").replace("%", " percent ")
    return bool({*map(_stem, neighbors)} & {*map(_stem, re.findall(r"[a-z]+", line))})


def _names_a_bystander(question: str, rationale: str) -> bool:
    """Whether the question names a person only once, asks about another, and the solution omits the first."""
    asked = re.findall(r"[a-z,] ([A-Z][a-z]+)", question[last_sentence(question) :])
    names = Counter(name for name in re.findall(r"\b[A-Z][a-z]+\b", question) if name in INTERCHANGEABLE)
    once = [name for name, count in names.items() if count == 1 and name not in asked and name not in rationale]
    return bool(asked and once)


def _says_only_known_numbers(steps: Sequence[Step], numbers: Sequence[Number], rationale: str) -> bool:
    """Whether the text of the solution contains only known numbers; 1 is in many phrases and is ignored."""
    text = without_marks(rationale).lower()
    known = {Fraction(1), *(number.value for number in numbers), *(step.value for step in steps)}
    known.update(operand for step in steps for operand in step.operands)
    digits = {Fraction(number.rstrip(",").replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?|\.\d+", text)}
    return digits <= known and _NUMBER_WORD.search(text) is None


def _stem(word: str) -> str:
    for ending in ("ies", "es", "s", "ing", "ed"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word
