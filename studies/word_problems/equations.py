"""Word problems with equations: a rationale, which is the first equation over the question's numbers that gives the
answer, and variants of the problem with other numbers.

`word_problems` is a task for `task.type: custom`; word_problems.yaml trains on it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any, Final

from flatpeak.config.load import parse_config, read_recipe
from flatpeak.tasks.config import build_task
from flatpeak.tasks.data_files import ExampleTask
from flatpeak.types import Example

MAX_NUMBERS: Final = 6
"""With more numbers in a question, too many equations fit by chance."""
_NUMBER: Final = re.compile(r"(?<![\w.,/:])\d{1,6}(?![.,/:]?\d)(?![\w/%])")
"""A whole number that is not part of a longer expression: not the 3 of `3.5`, `3rd`, `1,300` or `3/4`."""
_OPERATIONS: Final = "+-*/"
_DRAWS: Final = 20
"""Attempts at new numbers for one variant."""


def word_problems(
    mawps: str, asdiv: str, *, test: Sequence[dict[str, Any]] = (), copies: int = 6, seed: int = 0
) -> ExampleTask:
    """MAWPS and ASDiv from files, without duplicates; a fifth is held out, unless `test` names other sources.

    Training rows with an equation get it as rationale, and up to `copies` variants with other numbers.
    """
    settings = {
        "task.train.0.path": mawps,
        "task.train.1.path": asdiv,
        "task.train.1.hub": None,
        "task.test": list(test),
        "task.seed": seed,
    }
    task = build_task(parse_config(read_recipe("flatpeak:tasks/word_problems", settings)).task)
    train = tuple(worked(example) for example in task.train)
    train += tuple(variant for example in train for variant in variants(example, copies, seed=seed))
    return ExampleTask(name=task.name, train=train, test=task.test)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation on two of the question's numbers, or on the last result (None) and one of the numbers."""

    left: int | None
    operation: str
    right: int | None


Equation = tuple[Step, ...]
"""One or two steps, whose operands are indices into the numbers of the question."""


def numbers_in(question: str) -> list[int]:
    """The whole numbers of a question, in order."""
    return [int(match[0]) for match in _NUMBER.finditer(question)]


def find_equation(question: str, gold: str) -> Equation | None:
    """The first equation of one or two steps over distinct numbers of the question that gives the gold answer."""
    numbers = numbers_in(question)
    if len(numbers) > MAX_NUMBERS or not re.fullmatch(r"\d+", gold):
        return None
    return next((e for e in _candidates(len(numbers)) if (r := results(e, numbers)) and r[-1] == int(gold)), None)


def results(equation: Equation, numbers: Sequence[int]) -> list[int] | None:
    """The result of each step, or None if a step is negative, not an integer, or a division by zero."""
    values: list[int] = []
    for step in equation:
        left = values[-1] if step.left is None else numbers[step.left]
        right = values[-1] if step.right is None else numbers[step.right]
        if step.operation == "/" and (right == 0 or left % right):
            return None
        values.append(
            {"+": left + right, "-": left - right, "*": left * right, "/": left // right if right else 0}[
                step.operation
            ]
        )
        if values[-1] < 0:
            return None
    return values


def rationale(equation: Equation, numbers: Sequence[int]) -> str:
    """The steps and the answer in GSM8K's format: `20-12=8 8*5=40`, a line break, and `#### 40`."""
    values = results(equation, numbers)
    assert values is not None
    steps = []
    for index, (step, value) in enumerate(zip(equation, values, strict=True)):
        left = values[index - 1] if step.left is None else numbers[step.left]
        right = values[index - 1] if step.right is None else numbers[step.right]
        steps.append(f"{left}{step.operation}{right}={value}")
    return f"{' '.join(steps)}\n#### {values[-1]}"


def worked(example: Example) -> Example:
    """The example with its equation as rationale; unchanged if it has none."""
    equation = find_equation(example.question, example.gold)
    if equation is None:
        return example
    return replace(example, rationale=rationale(equation, numbers_in(example.question)))


def variants(example: Example, count: int, *, seed: int) -> Iterator[Example]:
    """Up to `count` examples of the same wording with new random numbers in the equation and a recomputed answer."""
    equation = find_equation(example.question, example.gold)
    if equation is None:
        return
    draw = random.Random(f"{seed}/{example.id}")
    numbers = numbers_in(example.question)
    used = {index for step in equation for index in (step.left, step.right) if index is not None}
    for number in range(count):
        for _ in range(_DRAWS):
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
    return _NUMBER.sub(lambda match: str(next(remaining)), question)


def _candidates(count: int) -> Iterator[Equation]:
    """Equations over `count` numbers, the simplest first."""
    for (left, right), operation in product(permutations(range(count), 2), _OPERATIONS):
        yield (Step(left=left, operation=operation, right=right),)
    for (a, b, c), (first, second) in product(permutations(range(count), 3), product(_OPERATIONS, repeat=2)):
        start = Step(left=a, operation=first, right=b)
        yield (start, Step(left=None, operation=second, right=c))
        yield (start, Step(left=c, operation=second, right=None))
