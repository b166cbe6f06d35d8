"""Any data set with a question and an answer, by column mapping."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import permutations, product
from typing import Any

from flatpeak.errors import UserError, did_you_mean
from flatpeak.tasks.config import RowsConfig, SourceConfig
from flatpeak.tasks.data_files import Row, read_file, read_hub
from flatpeak.tasks.decontamination import cluster_keys, find_overlap, held_out, near_any, question_key
from flatpeak.tasks.prompts import field_names, fill
from flatpeak.types import Example
from flatpeak.utils.answers import is_integer, normalize_gold

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


Split = tuple[tuple[Example, ...], tuple[Example, ...]]


def rows_examples(config: RowsConfig) -> tuple[tuple[Example, ...], tuple[Example, ...], tuple[str, ...]]:
    """Train, test and notices.

    Without test sources, whole clusters of near duplicates are held out. With them and `near_duplicates`, each test
    example says in its column `near_train` whether some training question is that similar, so that accuracy can be
    told apart on questions that training has and has not all but seen. `deduplicate` keeps the first of equal
    training questions and drops those that stand in the test sources; the test sources stay whole.

    `overlap`, `equations` and `variants` touch the training side only, after the split.
    """
    train, test = _split(config)
    notices: tuple[str, ...] = ()
    if config.overlap is not None:
        evaluation = source_questions(config.overlap.sources, option="task.overlap.sources")
        overlap = find_overlap([one.question for one in train], evaluation=evaluation, config=config.overlap)
        train = tuple(one for one, found in zip(train, overlap.found, strict=True) if not found)
        notices = (overlap.notice,)
        if not train:
            raise UserError("every training row overlaps task.overlap: take the training data out of its sources")
    if config.equations:
        train = tuple(worked(example) for example in train)
    if config.variants:
        train += tuple(v for example in train for v in variants(example, config.variants, seed=config.seed))
    return train, test, notices


def source_questions(sources: Sequence[SourceConfig], *, option: str) -> list[str]:
    """The questions of some sources, laid end to end; empty ones are passed over."""
    questions: list[str] = []
    for position, source in enumerate(sources):
        place = f"{option}.{position}"
        for row in _rows(source, option=place):
            question = _compose(source.question, row, option=f"{place}.question")
            if question is not None:
                questions.append(question)
    return questions


def _split(config: RowsConfig) -> Split:
    train = _load(config, "train", config.train)
    test = _load(config, "test", config.test)
    if config.deduplicate:
        train = _without_duplicates(train, known={question_key(example.question) for example in test})
    if not config.test:
        return _split_by_fraction(train, config)
    for side, examples in (("train", train), ("test", test)):
        if not examples:
            raise UserError(f"task.{side}: no row is left; check the files, task.integers_only and task.deduplicate")
    if config.near_duplicates is not None:
        near = near_any(
            [example.question for example in test],
            [example.question for example in train],
            threshold=config.near_duplicates,
        )
        test = [
            replace(example, columns={**example.columns, "near_train": is_near})
            for example, is_near in zip(test, near, strict=True)
        ]
    return tuple(train), tuple(test)


def _load(config: RowsConfig, side: str, sources: Sequence[SourceConfig]) -> list[Example]:
    """The sources' examples, laid end to end. Ids gain the source's place where there is more than one source."""
    alone = len(config.train) + len(config.test) == 1
    examples: list[Example] = []
    for position, source in enumerate(sources):
        option = f"task.{side}.{position}"
        prefix = "" if alone else f"{side}.{position}/"
        examples += _read(source, option=option, prefix=prefix, integers_only=config.integers_only)
    return examples


def _read(source: SourceConfig, *, option: str, prefix: str, integers_only: bool) -> list[Example]:
    pattern = _pattern(source, option=option)
    examples: list[Example] = []
    places: dict[str, str] = {}
    for index, row in enumerate(_rows(source, option=option)):
        gold = _gold(row, source, pattern, option=option, integers_only=integers_only)
        if gold is None:
            continue
        id = str(index) if source.id is None else _compose(source.id, row, option=f"{option}.id") or ""
        if not id or id in places:
            at_fault = f"id {id!r} occurs already at {places[id]}" if id else f"no id in column {source.id!r}"
            raise UserError(f"{row.where}: {at_fault}; make ids unique, or number the rows with {option}.id=null")
        places[id] = row.where
        question = _compose(source.question, row, option=f"{option}.question")
        if question is None:
            raise UserError(
                f"{row.where}: the question ({option}.question={source.question}) is empty; repair or remove it"
            )
        examples.append(
            Example(
                id=prefix + id,
                question=question,
                gold=gold,
                rationale=_rationale(source, row, gold, option=f"{option}.rationale"),
                columns=row.values,
            )
        )
    return examples


def _rows(source: SourceConfig, *, option: str) -> Iterator[Row]:
    if source.path is not None and source.hub is not None:
        raise UserError(f"{option} has both a path and a hub name; set {option}.hub=null to read the file")
    if source.path is not None:
        return read_file(source.path, option=f"{option}.path")
    if source.hub is not None:
        return read_hub(
            source.hub,
            config=source.hub_config,
            split=source.split,
            path_option=f"{option}.path with {option}.hub=null",
        )
    raise UserError(f"{option} names no data: give {option}.path=FILE or {option}.hub=NAME")


def _pattern(source: SourceConfig, *, option: str) -> re.Pattern[str] | None:
    if source.answer_pattern is None:
        return None
    try:
        return re.compile(source.answer_pattern)
    except re.error as error:
        raise UserError(f"{option}.answer_pattern={source.answer_pattern!r}: {error}; repair the expression") from error


def _gold(
    row: Row, source: SourceConfig, pattern: re.Pattern[str] | None, *, option: str, integers_only: bool
) -> str | None:
    """The normalized gold answer; None for a row that `integers_only` leaves out."""
    answer = _compose(source.answer, row, option=f"{option}.answer")
    if answer is None:
        raise UserError(f"{row.where}: the answer ({option}.answer={source.answer}) is empty; repair or remove the row")
    if pattern is not None:
        match = pattern.search(answer)
        found = match and (match[1] if pattern.groups else match[0])
        if not found and integers_only:
            return None
        if not found:
            raise UserError(
                f"{row.where}: {option}.answer_pattern finds nothing in {answer[:60]!r}; widen it, or drop such rows "
                "with task.integers_only=true"
            )
        answer = str(found)
    gold = normalize_gold(answer)
    return None if integers_only and not is_integer(gold) else gold


def _rationale(source: SourceConfig, row: Row, gold: str, *, option: str) -> str | None:
    """The SFT target; None where the row has none (a column of it is empty)."""
    if source.rationale is None:
        return None
    with_gold = Row(where=row.where, values={**row.values, "gold": gold})
    return _compose(source.rationale, with_gold, option=option, need_all=True)


def _compose(expression: str, row: Row, *, option: str, need_all: bool = False) -> str | None:
    """The text of a column or format string; None where all (with need_all: any) of its columns are empty."""
    is_template = "{" in expression
    values: dict[str, object] = {}
    for column in field_names(expression, option=option) if is_template else (expression,):
        if column not in row.values:
            raise UserError(
                f"{row.where}: no column {column!r} ({option}){did_you_mean(column, row.values)}; "
                f"it has {', '.join(map(repr, row.values))}"
            )
        values[column] = _text(row.values[column], where=f"{row.where}: column {column!r}")
    filled = [bool(value) for value in values.values()]
    if not (all(filled) if need_all else any(filled)):
        return None
    # An empty first column ("{Body} {Question}") leaves a space behind; line breaks are the format string's own.
    return fill(expression, values, option=option).lstrip(" ") if is_template else str(values[expression])


def _text(value: Any, *, where: str) -> str:
    match value:
        case None:
            return ""
        case float():
            return "" if math.isnan(value) else format(Decimal(repr(value)), "f")
        case str() | bool() | int():
            return str(value).strip()
        case _:
            raise UserError(f"{where} holds a {type(value).__name__}, not a text or number; name another column")


def _without_duplicates(examples: Sequence[Example], *, known: set[str]) -> list[Example]:
    kept = []
    for example in examples:
        key = question_key(example.question)
        if key not in known:
            known.add(key)
            kept.append(example)
    return kept


def _split_by_fraction(examples: Sequence[Example], config: RowsConfig) -> Split:
    if not examples:
        raise UserError("task.train: no row is left; check the files, task.integers_only and task.deduplicate")
    keys = cluster_keys([example.question for example in examples], threshold=config.near_duplicates)
    train: list[Example] = []
    test: list[Example] = []
    for example, key in zip(examples, keys, strict=True):
        (test if held_out(key, fraction=config.test_fraction, seed=config.seed) else train).append(example)
    if not train or not test:
        raise UserError(
            f"task.test_fraction={config.test_fraction} splits {len(examples)} rows in {len(set(keys))} clusters into "
            f"{len(train)} train and {len(test)} test: change task.test_fraction, task.seed or task.near_duplicates, "
            "or name test files in task.test"
        )
    return tuple(train), tuple(test)
