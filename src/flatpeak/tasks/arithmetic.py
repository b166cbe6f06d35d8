"""Integer arithmetic: the smallest task on which everything can be seen to work."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from itertools import islice

from flatpeak.errors import UserError
from flatpeak.tasks.config import ArithmeticConfig
from flatpeak.tasks.format_strings import check_fields, fill
from flatpeak.types import Example

Problem = tuple[int, str, int]
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_COMMUTES = frozenset("+*")


def arithmetic_examples(config: ArithmeticConfig) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Train and test problems drawn without replacement from all a, op, b of the range.

    A problem whose twin `b op a` is held out is not trained on: knowing one is knowing the other.
    UserError where the range cannot supply both sizes, or a format string has a wrong field.
    """
    operators = tuple(dict.fromkeys(config.operators))
    values = config.max_value - config.min_value + 1
    if values < 1:
        raise UserError(
            f"task.min_value={config.min_value} exceeds task.max_value={config.max_value}: swap or widen them"
        )
    if not operators:
        raise UserError("task.operators is empty: name at least one of +, -, *")
    told_apart = ("a", "b", "op") if len(operators) > 1 else ("a", "b")
    check_fields(config.question, allowed=("a", "op", "b"), required=told_apart, option="task.question")
    check_fields(config.rationale, allowed=("a", "op", "b", "answer"), option="task.rationale")

    total = values * values * len(operators)
    problems = (_problem(index, values, operators, config.min_value) for index in _shuffled(total, seed=config.seed))
    test = list(islice(problems, config.test_size))
    held_out = {twin for problem in test for twin in _twins(problem)}
    train = list(islice((problem for problem in problems if problem not in held_out), config.train_size))
    _check_sizes(config, total=total, train=len(train), test=len(test))
    return tuple(_example(p, config) for p in train), tuple(_example(p, config) for p in test)


def _shuffled(total: int, *, seed: int) -> Iterator[int]:
    """0..total-1 in random order. A Fisher-Yates shuffle that stores only what it moved: total may be 10^30."""
    generator = random.Random(seed)
    moved: dict[int, int] = {}
    for position in range(total):
        other = generator.randrange(position, total)
        yield moved.get(other, other)
        moved[other] = moved.pop(position, position)


def _problem(index: int, values: int, operators: tuple[str, ...], min_value: int) -> Problem:
    pair, op = divmod(index, len(operators))
    a, b = divmod(pair, values)
    return min_value + a, operators[op], min_value + b


def _twins(problem: Problem) -> tuple[Problem, ...]:
    a, op, b = problem
    return (problem, (b, op, a)) if op in _COMMUTES else (problem,)


def _check_sizes(config: ArithmeticConfig, *, total: int, train: int, test: int) -> None:
    if test == config.test_size and train == config.train_size:
        return
    wanted = f"task.train_size={config.train_size} and task.test_size={config.test_size}"
    if train == 0:
        raise UserError(f"{wanted}: the range has only {total} problems; widen task.max_value or lower the sizes")
    raise UserError(
        f"{wanted}: of {total} problems, {train} remain for training once the held-out ones and their commuted "
        f"twins are set aside; lower task.train_size to {train} or widen task.max_value"
    )


def _example(problem: Problem, config: ArithmeticConfig) -> Example:
    a, op, b = problem
    answer = _APPLY[op](a, b)
    fields: dict[str, object] = {"a": a, "op": op, "b": b}
    return Example(
        id=f"{a}{op}{b}",
        question=fill(config.question, fields, option="task.question"),
        gold=str(answer),
        rationale=fill(config.rationale, {**fields, "answer": answer}, option="task.rationale"),
        columns=fields,
    )
