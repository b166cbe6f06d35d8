"""The same question with other numbers, and the gold answer computed from them. Where that is not sure, nothing.

Three sources say how the answer follows from the numbers: an arithmetic row's operands; GSM8K's `<<48/2=24>>` marks,
where the text says what each number does (`number_roles`); and for a word problem of two numbers without a worked
solution, the operations that fit the gold answer, which must agree on the new one. The new gold answer is never the
old one, which a model may know by heart.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from flatpeak.evaluation.number_roles import (
    Number,
    ambiguous_word,
    bounds,
    constants,
    find_origins,
    keeps_divisibility,
    keeps_order,
    read_steps,
    replayed,
)
from flatpeak.evaluation.spans import split_question
from flatpeak.types import Example

TRIES = 300
NUMBER = re.compile(r"(?<![\w.,/:^])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w/:]|[.,]\d)")
_FORMULA = re.compile(r"\\|\$[^$\d][^$]*\$")
_ASKS = re.compile(r"\bhow (?:many|much|long|far|old|tall|heavy|big|fast)\b", re.IGNORECASE)
_PARTS = re.compile(
    r"\b(?:half|twice|double[ds]?|dozen|percent\w*|remainder|(?:hour|minute|day|week|month|year|cent|dollar|inche?|yard)s?"
    r"|hourly|daily|weekly|monthly|yearly|annual|foot|feet)\b|[%$]"
)


def other_numbers(example: Example, draw: random.Random) -> Example | None:
    """The example with other numbers and its own new gold answer, of the same length and sign where that can be."""
    if {"a", "op", "b"} <= example.columns.keys():
        return _arithmetic(example, draw)
    label, text, tail = split_question(example.question)
    found = question_numbers(text)
    if found is None or _FORMULA.search(text) or re.search(r"\d", f"{label}{tail}"):
        return None
    asked = replace(example, question=text)
    # Working that says nothing exactly (an equation solved in words, say) is not guessed at.
    other = _annotated(asked, found, draw) if example.rationale else _fitted(asked, found, draw)
    return None if other is None else replace(other, question=f"{label}{other.question}{tail}")


def _drawn(number: Number, draw: random.Random) -> Fraction:
    """Another value of about the same size; 0 and 1 stay, which grammar depends on."""
    scale = 10**number.decimals
    units = int(number.value * scale)
    if units <= scale and not number.decimals:
        return number.value
    low, high = (units - 20, units + 20) if 1900 <= units <= 2100 and scale == 1 else (units // 2 + 1, 2 * units)
    if number.percent:
        high = min(high, 100 * scale if units <= 100 * scale else high)
    return Fraction(draw.randint(max(low, 2 if scale == 1 else 1), max(high, 2)), scale)


def _written(number: Number, value: Fraction, text: str) -> str:
    """The value as the number was written: with its decimals, and with commas where it had them."""
    whole, part = divmod(int(value * 10**number.decimals), 10**number.decimals)
    digits = f"{whole:,}" if "," in text or (whole >= 10000 and number.value < 10000) else str(whole)
    return f"{digits}.{part:0{number.decimals}}" if number.decimals else digits


def question_numbers(question: str) -> list[Number] | None:
    """Every number of a question; None where digits stand in something else (3rd, 8:00, 1/2), or there are none."""
    found = []
    for match in NUMBER.finditer(question):
        _, _, part = match[0].partition(".")
        percent = question[match.end() : match.end() + 1] == "%"
        value = Fraction(match[0].replace(",", ""))
        found.append(Number(span=match.span(), value=value, decimals=len(part), percent=percent))
    covered = sum(sum(c.isdigit() for c in question[slice(*one.span)]) for one in found)
    return found if found and covered == sum(c.isdigit() for c in question) else None


def _rewritten(question: str, numbers: Sequence[Number], values: Sequence[Fraction]) -> str:
    for number, value in reversed(list(zip(numbers, values, strict=True))):
        start, end = number.span
        question = f"{question[:start]}{_written(number, value, question[start:end])}{question[end:]}"
    return question


def _changed(example: Example, question: str, gold: Fraction) -> Example:
    columns = {**example.columns}
    columns |= {key: question for key in ("question",) if key in columns}
    columns |= {key: f"#### {gold}" for key in ("answer",) if key in columns}
    return replace(example, question=question, gold=str(gold), rationale=None, columns=columns)


def _arithmetic(example: Example, draw: random.Random) -> Example | None:
    """Operands of as many digits, of the same sign; the question must hold them once, side by side."""
    a, op, b = (example.columns[key] for key in ("a", "op", "b"))
    apply = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}.get(op)
    old = f"{a}{op}{b}"
    whole = isinstance(a, int) and isinstance(b, int)
    if not whole or apply is None or str(apply(a, b)) != example.gold or example.question.count(old) != 1:
        return None
    for _ in range(TRIES):
        left, right = _as_long(a, draw), _as_long(b, draw)
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


def _as_long(value: int, draw: random.Random) -> int:
    digits = len(str(abs(value)))
    drawn = draw.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)
    return -drawn if value < 0 else drawn


def _annotated(example: Example, numbers: Sequence[Number], draw: random.Random) -> Example | None:
    """By the marks of a worked solution, where the text says what each number does (see `number_roles`)."""
    steps = read_steps(example.rationale or "")
    if not steps or str(steps[-1].value) != example.gold or ambiguous_word(example.question) is not None:
        return None
    origins = find_origins(steps, numbers, question=example.question, rationale=example.rationale or "")
    if origins is None:
        return None
    fixed = [*bounds(example.question), *constants(steps, origins)]
    old = [number.value for number in numbers]
    were = [step.value for step in steps]
    for _ in range(TRIES):
        values = [_drawn(number, draw) for number in numbers]
        results = replayed(steps, origins, values)
        if results is None or results[-1] == steps[-1].value:
            continue
        ordered = keeps_order([*fixed, *old, *were], [*fixed, *values, *results])
        if ordered and keeps_divisibility(steps, origins, before=(old, were), after=(values, results)):
            return _changed(example, _rewritten(example.question, numbers, values), results[-1])
    return None


def _fitted(example: Example, numbers: Sequence[Number], draw: random.Random) -> Example | None:
    """By every operation on its two numbers that fits the gold answer; they must agree on the new one.

    Of SVAMP's problems with three numbers one in eight would get a wrong answer, as one number may be irrelevant; of
    those with two none does.
    """
    plain = re.fullmatch(r"\d+", example.gold) and _ASKS.search(example.question)
    if not plain or len(numbers) != 2 or ambiguous_word(example.question) or _PARTS.search(example.question.lower()):
        return None
    old, gold = [number.value for number in numbers], Fraction(example.gold)
    fitting = [apply for apply in _OPERATIONS if _applied(apply, old) == gold]
    for _ in range(TRIES if fitting else 0):
        values = [_drawn(number, draw) for number in numbers]
        golds = {_applied(apply, values) for apply in fitting}
        new = golds.pop()
        if golds or new is None or new < 0 or new.denominator != 1 or new == gold:
            continue
        if keeps_order([*old, gold], [*values, new]):
            return _changed(example, _rewritten(example.question, numbers, values), new)
    return None


_OPERATIONS: tuple[Callable[[Fraction, Fraction], Fraction], ...] = (
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: b - a,
    lambda a, b: a * b,
    lambda a, b: a / b,
    lambda a, b: b / a,
)


def _applied(apply: Callable[[Fraction, Fraction], Fraction], values: Sequence[Fraction]) -> Fraction | None:
    try:
        return apply(values[0], values[1])
    except ZeroDivisionError:
        return None
