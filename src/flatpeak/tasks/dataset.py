"""A Python caller's data set as a task: anything that has rows, with its columns found by their usual names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, cast

from flatpeak.errors import UserError, check_characters
from flatpeak.protocols import Task
from flatpeak.tasks.custom import check_task
from flatpeak.tasks.data_files import ExampleTask, Row, SourceConfig, read_file
from flatpeak.tasks.decontamination import question_key, repetition_notices
from flatpeak.tasks.rows import cell_text, examples_of
from flatpeak.types import Example
from flatpeak.utils.answers import normalize_gold

QUESTIONS: Final = ("prompt", "question", "problem", "messages", "instruction", "query", "input")
"""Names of the column with the question, the most specific first; a text, or chat messages."""
GOLDS: Final = (
    *("answer", "gold", "ground_truth", "solution", "answers", "final_answer", "reference_answer", "correct_answer"),
    *("gold_answer", "expected_answer", "expected", "reference", "target", "label", "reward_model.ground_truth"),
    *("extra_info.answer", "metadata.answer"),
)
"""Names of the column with the gold answer."""
HELD_OUT: Final = ("test", "validation", "eval", "dev")
"""Names of the held-out part of a data set that has parts."""
FRACTION: Final = 0.1
"""The share of questions held out of a data set without parts."""


def task_of(dataset: Any) -> Task:
    """The task of a data set: a `Dataset` or `DatasetDict` of datasets, a DataFrame, a file, or a list of dicts.

    A mapping has the parts `train` and, if it wants, `test` or `validation`. Otherwise a tenth of the questions is held
    out by a hash, at least one. UserError for rows without a question; a Task is returned as it is.
    """
    if _is_task(dataset):
        return cast("Task", dataset)
    # A type checker sees the protocol's members as writable, and those of a frozen dataclass as read-only.
    return cast("Task", _task_of_rows(dataset))


def held_out_task(dataset: Any) -> Task:
    """A task whose held-out questions are all rows of a data set, or those of its held-out part.

    UserError for rows without a question; a Task is returned as it is.
    """
    if _is_task(dataset):
        return check_task(dataset, where="dataset")
    where = "dataset"
    if isinstance(dataset, Mapping):
        split = next((name for name in HELD_OUT if name in dataset), None)
        if split is None:
            raise UserError(
                f"dataset has the parts {', '.join(map(repr, dataset))}: name the one to ask 'test', or give its rows"
            )
        dataset, where = dataset[split], f"dataset[{split!r}]"
    examples, notice = _examples(dataset, where=where)
    return cast("Task", ExampleTask(name="dataset", train=(), test=examples, notices=(notice,)))


def _is_task(dataset: Any) -> bool:
    return not hasattr(dataset, "columns") and all(hasattr(dataset, name) for name in ("name", "train", "test"))


def _task_of_rows(dataset: Any) -> ExampleTask:
    if not isinstance(dataset, Mapping):
        examples, notice = _examples(dataset, where="dataset")
        return _split(examples, notice)
    if "train" not in dataset:
        raise UserError(
            f"dataset has the parts {', '.join(map(repr, dataset))}: name the one to train on 'train', as in "
            "{'train': rows, 'test': rows}"
        )
    train, notice = _examples(dataset["train"], where="dataset['train']", prefix="train/")
    test_part = next((name for name in HELD_OUT if name in dataset), None)
    if test_part is None:
        return _split(train, notice)
    test, of_test = _examples(dataset[test_part], where=f"dataset[{test_part!r}]", prefix=f"{test_part}/")
    repeated = repetition_notices(train, test, remedy="leave them out of dataset['train']")
    return ExampleTask(name="dataset", train=train, test=test, notices=(notice, of_test, *repeated))


def _examples(rows: Any, *, where: str, prefix: str = "") -> tuple[list[Example], str]:
    """The examples, and a notice of the columns that they are made from."""
    listed = list(_rows(rows, where=where))
    if not listed:
        raise UserError(f"{where} has no rows: give some")
    question, gold = _column(listed, QUESTIONS), _column(listed, GOLDS)
    if question is None:
        raise UserError(
            f"{where}: no column of {', '.join(map(repr, listed[0].values))} is a question; name it 'prompt' (a text "
            "or chat messages), or give a recipe with task.type=rows, which maps columns"
        )
    if question.casefold() == "instruction" and (given := _column(listed, ("input",))) is not None:
        for row in listed:
            texts = [
                cell_text(row.values.get(name), where=f"{row.where}: column {name!r}") for name in (question, given)
            ]
            row.values[question] = "\n\n".join(filter(None, texts))
    source = SourceConfig(question=question, answer=gold)
    examples = examples_of(listed, source, option=where, prefix=prefix)
    for example in examples:
        check_characters("".join((example.question, *example.golds)), where=f"{where}, row {example.id}")
    golds = "without gold answers" if gold is None else f"gold answers from {gold!r}"
    return examples, f"{where}: questions from {question!r}, {golds}"


def with_replies_as_golds(task: Task) -> Task | None:
    """The task of a data set with the assistant's replies as gold answers, and a notice; None if it has other golds, or
    no replies."""
    rows = (*task.train, *task.test)
    if not isinstance(task, ExampleTask) or any(one.gold for one in rows) or not any(one.rationale for one in rows):
        return None
    replied = [replace(one, gold=normalize_gold(one.rationale or "")) for one in rows]
    train, test = tuple(replied[: len(task.train)]), tuple(replied[len(task.train) :])
    notice = "no column has gold answers: accuracy is the share of answers that equal the assistant's last messages"
    return replace(task, train=train, test=test, notices=(*task.notices, notice))


def _column(rows: Sequence[Row], names: Iterable[str]) -> str | None:
    """The first of the names that is a column with a value in some row, in any case, or a path into one."""
    for name in names:
        first, *path = name.split(".")
        for column in dict.fromkeys(column for row in rows for column in row.values if column.casefold() == first):
            if any(_value(row.values.get(column), path) is not None for row in rows):
                return ".".join((column, *path))
    return None


def _value(value: Any, path: Sequence[str]) -> Any:
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _rows(rows: Any, *, where: str) -> Iterator[Row]:
    if isinstance(rows, str | Path):
        yield from read_file(str(rows), option=where)
        return
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a DataFrame of pandas, which need not be installed
        rows = rows.to_dict("records")
    if not isinstance(rows, Iterable):
        raise UserError(f"{where} is a {type(rows).__name__}; give a list of dicts, a Dataset, a DataFrame or a file")
    for index, row in enumerate(rows):
        values = {"prompt": row} if isinstance(row, str) else row
        if not isinstance(values, Mapping):
            raise UserError(f"{where}[{index}] is a {type(row).__name__}; a row is a dict with a prompt, or a text")
        yield Row(where=f"{where}[{index}]", values={name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    """A value without NumPy's and torch's types, as a file would give it."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _split(examples: Sequence[Example], notice: str) -> ExampleTask:
    """Hold out the questions whose hashes are the smallest, at least one of them, with all their rows.

    They are in the order of their hashes, so that the first of them (`evaluation.size`) represent sorted data as well.
    """
    keys = [question_key(example.question) for example in examples]
    ordered = sorted(set(keys), key=lambda key: hashlib.sha256(key.encode()).digest())
    if len(ordered) < 2:
        raise UserError("dataset has one question: give at least two, one to train on and one to hold out")
    test_keys = ordered[: max(1, round(FRACTION * len(ordered)))]
    position = {key: index for index, key in enumerate(test_keys)}
    train, test = list[Example](), list[tuple[int, Example]]()
    for example, key in zip(examples, keys, strict=True):
        if key in position:
            test.append((position[key], example))
        else:
            train.append(example)
    test.sort(key=itemgetter(0))
    test_examples = [example for _, example in test]
    repeated = repetition_notices(train, test_examples, remedy="leave them out of dataset")
    return ExampleTask(name="dataset", train=train, test=test_examples, notices=(notice, *repeated))
