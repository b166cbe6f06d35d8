"""Perturbation of a question's numbers, with a recomputed gold answer, if that is certain.

There are three sources for how the answer follows from the numbers: an arithmetic row's operands; GSM8K's `<<48/2=24>>`
marks, if the text fixes the role of each number (`number_roles`); and, for a word problem with two numbers and no
worked solution, the operations that fit the gold answer, which must agree on the new answer. The new gold answer always
differs from the old answer, which a model may have memorized.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from flatpeak.evaluation.solution_steps import (
    Number,
    ambiguous_word,
    bounds,
    constants,
    find_origins,
    keeps_divisibility,
    keeps_order,
    read_steps,
    recompute,
)
from flatpeak.evaluation.text_perturbations import split_question
from flatpeak.types import Example

_DRAWS: Final = 300
"""Attempts at new numbers for one question."""
_NUMBER: Final = re.compile(r"(?<![\w.,/:^])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w/:]|[.,]\d)")
_FORMULA: Final = re.compile(r"\\|\$[^$\d][^$]*\$")
_ASKS_FOR_QUANTITY: Final = re.compile(r"\bhow (?:many|much|long|far|old|tall|heavy|big|fast)\b", re.IGNORECASE)
_MULTIPLES_AND_UNITS: Final = re.compile(
    r"\b(?:half|twice|double[ds]?|dozen|percent\w*|remainder|(?:hour|minute|day|week|month|year|cent|dollar|inche?|yard)s?"
    r"|hourly|daily|weekly|monthly|yearly|annual|foot|feet)\b|[%$]"
)
_OPERATIONS: Final[tuple[Callable[[Fraction, Fraction], Fraction], ...]] = (
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: b - a,
    lambda a, b: a * b,
    lambda a, b: a / b,
    lambda a, b: b / a,
)


def other_numbers(example: Example, draw: random.Random) -> Example | None:
    """The example with other numbers of similar size and the recomputed gold answer; None if that is uncertain."""
    if {"a", "op", "b"} <= example.columns.keys():
        return _arithmetic(example, draw)
    label, text, tail = split_question(example.question)
    numbers = question_numbers(text)
    if numbers is None or _FORMULA.search(text) or re.search(r"\d", f"{label}{tail}"):
        return None
    bare = replace(example, question=text)
    # Do not guess at worked solutions without exact steps, such as an equation solved in words.
    perturbed = _by_solution(bare, numbers, draw) if example.rationale else _by_operation(bare, numbers, draw)
    return None if perturbed is None else replace(perturbed, question=f"{label}{perturbed.question}{tail}")


def _draw_value(number: Number, draw: random.Random) -> Fraction:
    """Another value of about the same size; 0 and 1 stay, because grammar depends on them."""
    scale = 10**number.decimals
    units = int(number.value * scale)
    if units <= scale and not number.decimals:
        return number.value
    low, high = (units - 20, units + 20) if 1900 <= units <= 2100 and scale == 1 else (units // 2 + 1, 2 * units)
    if number.percent:
        high = min(high, 100 * scale if units <= 100 * scale else high)
    return Fraction(draw.randint(max(low, 2 if scale == 1 else 1), max(high, 2)), scale)


def _format_value(number: Number, value: Fraction, text: str) -> str:
    """The value in the format of the number: with its decimals, and with commas if it had them."""
    whole, fraction = divmod(int(value * 10**number.decimals), 10**number.decimals)
    digits = f"{whole:,}" if "," in text or (whole >= 10000 and number.value < 10000) else str(whole)
    return f"{digits}.{fraction:0{number.decimals}}" if number.decimals else digits


def question_numbers(question: str) -> list[Number] | None:
    """Every number of a question; None if digits belong to something else (3rd, 8:00, 1/2), or if there are none."""
    numbers = []
    for match in _NUMBER.finditer(question):
        _, _, decimals = match[0].partition(".")
        percent = question[match.end() : match.end() + 1] == "%"
        value = Fraction(match[0].replace(",", ""))
        numbers.append(Number(position=match.span(), value=value, decimals=len(decimals), percent=percent))
    covered = sum(sum(c.isdigit() for c in question[slice(*number.position)]) for number in numbers)
    return numbers if numbers and covered == sum(c.isdigit() for c in question) else None


def _with_values(question: str, numbers: Sequence[Number], values: Sequence[Fraction]) -> str:
    for number, value in reversed(list(zip(numbers, values, strict=True))):
        start, end = number.position
        question = f"{question[:start]}{_format_value(number, value, question[start:end])}{question[end:]}"
    return question


def _with_gold(example: Example, question: str, gold: Fraction) -> Example:
    columns = {**example.columns}
    columns |= {key: question for key in ("question",) if key in columns}
    columns |= {key: f"#### {gold}" for key in ("answer",) if key in columns}
    return replace(example, question=question, gold=str(gold), rationale=None, columns=columns)


def _arithmetic(example: Example, draw: random.Random) -> Example | None:
    """Replace the operands, which must be adjacent in the question, by others of the same length and sign."""
    a, op, b = (example.columns[key] for key in ("a", "op", "b"))
    apply = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}.get(op)
    old = f"{a}{op}{b}"
    whole = isinstance(a, int) and isinstance(b, int)
    if not whole or apply is None or str(apply(a, b)) != example.gold or example.question.count(old) != 1:
        return None
    for _ in range(_DRAWS):
        left, right = _same_digits(a, draw), _same_digits(b, draw)
        gold = str(apply(left, right))
        if gold != example.gold:
            return replace(
                example,
                question=example.question.replace(old, f"{left}{op}{right}"),
                gold=gold,
                rationale=None,
                columns={**example.columns, "a": left, "b": right},
            )
    return None


def _same_digits(value: int, draw: random.Random) -> int:
    digits = len(str(abs(value)))
    drawn = draw.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)
    return -drawn if value < 0 else drawn


def _by_solution(example: Example, numbers: Sequence[Number], draw: random.Random) -> Example | None:
    """Recompute the answer from the marks of a worked solution, if every number has a role (see `number_roles`)."""
    steps = read_steps(example.rationale or "")
    if not steps or str(steps[-1].value) != example.gold or ambiguous_word(example.question) is not None:
        return None
    origins = find_origins(steps, numbers, question=example.question, rationale=example.rationale or "")
    if origins is None:
        return None
    fixed = [*bounds(example.question), *constants(steps, origins)]
    old = [number.value for number in numbers]
    old_results = [step.value for step in steps]
    for _ in range(_DRAWS):
        values = [_draw_value(number, draw) for number in numbers]
        results = recompute(steps, origins, values)
        if results is None or results[-1] == steps[-1].value:
            continue
        ordered = keeps_order([*fixed, *old, *old_results], [*fixed, *values, *results])
        if ordered and keeps_divisibility(steps, origins, before=(old, old_results), after=(values, results)):
            return _with_gold(example, _with_values(example.question, numbers, values), results[-1])
    return None


def _by_operation(example: Example, numbers: Sequence[Number], draw: random.Random) -> Example | None:
    """Recompute the answer by every operation on the two numbers that fits the gold answer; they must agree.

    With three numbers, one in eight SVAMP problems would get a wrong answer, because a number may be irrelevant; with
    two numbers, none does.
    """
    is_plain = re.fullmatch(r"\d+", example.gold) and _ASKS_FOR_QUANTITY.search(example.question)
    if (
        not is_plain
        or len(numbers) != 2
        or ambiguous_word(example.question)
        or _MULTIPLES_AND_UNITS.search(example.question.lower())
    ):
        return None
    old, gold = [number.value for number in numbers], Fraction(example.gold)
    fitting = [apply for apply in _OPERATIONS if _applied(apply, old) == gold]
    for _ in range(_DRAWS if fitting else 0):
        values = [_draw_value(number, draw) for number in numbers]
        golds = {_applied(apply, values) for apply in fitting}
        new = golds.pop()
        if golds or new is None or new < 0 or new.denominator != 1 or new == gold:
            continue
        if keeps_order([*old, gold], [*values, new]):
            return _with_gold(example, _with_values(example.question, numbers, values), new)
    return None


def _applied(apply: Callable[[Fraction, Fraction], Fraction], values: Sequence[Fraction]) -> Fraction | None:
    try:
        return apply(values[0], values[1])
    except ZeroDivisionError:
        return None
