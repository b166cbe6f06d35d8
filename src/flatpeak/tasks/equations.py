"""Word problems whose working nobody wrote down: find an equation over the question's numbers that gives the answer.

The equation is a guess, the first of a fixed order that fits: `3 boxes of 4, how many?` with gold 12 gives `3*4=12`.
It makes a rationale, and with its numbers drawn anew, and the answer computed from them, more problems of the same
wording.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from flatpeak.types import Example

NUMBER = re.compile(r"(?<![\w.,/:])\d{1,6}(?![.,/:]?\d)(?![\w/%])")
"""Whole numbers that stand alone: not the 3 of `3.5`, `3rd`, `1,300` or `3/4`."""
OPERATIONS = "+-*/"
MOST_NUMBERS = 6
"""A question with more numbers has too many equations that fit by chance."""
TRIES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation: on two of the question's numbers, or on the last result (None) and one of them."""

    left: int | None
    operation: str
    right: int | None


Equation = tuple[Step, ...]
"""One or two steps; the numbers are indices among those found in the question."""


def numbers_in(question: str) -> list[int]:
    """The whole numbers of a question, in order."""
    return [int(match[0]) for match in NUMBER.finditer(question)]


def find_equation(question: str, gold: str) -> Equation | None:
    """The first equation of one or two steps over distinct numbers of the question that gives the gold answer."""
    numbers = numbers_in(question)
    if len(numbers) > MOST_NUMBERS or not re.fullmatch(r"\d+", gold):
        return None
    return next((e for e in _candidates(len(numbers)) if (r := results(e, numbers)) and r[-1] == int(gold)), None)


def results(equation: Equation, numbers: Sequence[int]) -> list[int] | None:
    """The result of each step, or None where one is negative, not whole, or a division by zero."""
    found: list[int] = []
    for step in equation:
        left = found[-1] if step.left is None else numbers[step.left]
        right = found[-1] if step.right is None else numbers[step.right]
        if step.operation == "/" and (right == 0 or left % right):
            return None
        found.append(
            {"+": left + right, "-": left - right, "*": left * right, "/": left // right if right else 0}[
                step.operation
            ]
        )
        if found[-1] < 0:
            return None
    return found


def rationale(equation: Equation, numbers: Sequence[int]) -> str:
    """`20-12=8 8*5=40`, a line break, and the answer in GSM8K's layout: `#### 40`."""
    values = results(equation, numbers)
    assert values is not None
    written = []
    for index, (step, value) in enumerate(zip(equation, values, strict=True)):
        left = values[index - 1] if step.left is None else numbers[step.left]
        right = values[index - 1] if step.right is None else numbers[step.right]
        written.append(f"{left}{step.operation}{right}={value}")
    return f"{' '.join(written)}\n#### {values[-1]}"


def worked(example: Example) -> Example:
    """The example with its equation as rationale; unchanged where none is found."""
    equation = find_equation(example.question, example.gold)
    if equation is None:
        return example
    return replace(example, rationale=rationale(equation, numbers_in(example.question)))


def variants(example: Example, count: int, *, seed: int) -> Iterator[Example]:
    """Up to `count` examples of the same wording with the equation's numbers drawn anew and the answer recomputed."""
    equation = find_equation(example.question, example.gold)
    if equation is None:
        return
    draw = random.Random(f"{seed}/{example.id}")
    numbers = numbers_in(example.question)
    used = {index for step in equation for index in (step.left, step.right) if index is not None}
    for number in range(count):
        for _ in range(TRIES):
            drawn = [draw.randint(1, max(12, 2 * n)) if i in used else n for i, n in enumerate(numbers)]
            values = results(equation, drawn)
            if values is not None:
                yield replace(
                    example,
                    id=f"{example.id}~{number}",
                    question=_with_numbers(example.question, drawn),
                    gold=str(values[-1]),
                    rationale=rationale(equation, drawn),
                )
                break


def _with_numbers(question: str, numbers: Sequence[int]) -> str:
    remaining = iter(numbers)
    return NUMBER.sub(lambda match: str(next(remaining)), question)


def _candidates(count: int) -> Iterator[Equation]:
    """Equations over `count` numbers, the simplest first."""
    for (left, right), operation in product(permutations(range(count), 2), OPERATIONS):
        yield (Step(left=left, operation=operation, right=right),)
    for (a, b, c), (first, second) in product(permutations(range(count), 3), product(OPERATIONS, repeat=2)):
        start = Step(left=a, operation=first, right=b)
        yield (start, Step(left=None, operation=second, right=c))
        yield (start, Step(left=c, operation=second, right=None))
