"""The task `rows`: any data set with a question and an answer, by column mapping."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field

from flatpeak.errors import UnreachableDataError, UserError
from flatpeak.tasks.bad_rows import BadRowLog, BadRows
from flatpeak.tasks.conversations import conversation_text, read_messages, split_answer
from flatpeak.tasks.data_files import ExampleTask, Row, SeededConfig, SourceConfig, cell_of, read_source
from flatpeak.tasks.decontamination import (
    OverlapConfig,
    cluster_keys,
    find_overlap,
    is_held_out,
    near_any,
    question_key,
    repetition_notices,
)
from flatpeak.tasks.prompts import field_names, fill
from flatpeak.types import Example, Message
from flatpeak.utils.answers import is_integer, normalize_gold

Sides = tuple[tuple[Example, ...], tuple[Example, ...]]


class RowsConfig(SeededConfig):
    """Any data set with a question and an answer column, by column mapping."""

    type: Literal["rows"] = "rows"
    name: str = "rows"
    """The task's name, in metrics as `eval/<name>/accuracy`."""
    train: tuple[SourceConfig, ...] = ()
    """One or more sources, concatenated. Empty: only `test`, as for `evaluation.sets`."""
    test: tuple[SourceConfig, ...] = ()
    """Sources of held-out rows, concatenated. Empty: `test_fraction` of the training rows is held out, by a seeded hash
    of the question's cluster."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The share of training rows held out if `test` is empty."""
    deduplicate: bool = False
    """Keep only the first of training rows whose questions are equal, ignoring case, punctuation and spacing, and drop
    those that are also in `test`."""
    near_duplicates: Annotated[float, Field(gt=0, le=1)] | None = None
    """Questions this similar (Jaccard of word sets, numbers masked) stay on one side of a split by fraction. With
    `test`, test rows this similar to a training row are marked, and accuracy/not_near_train leaves them out. null: a
    split keeps only equal questions on one side."""
    overlap: OverlapConfig | None = None
    """Drop training rows that overlap an evaluation set; null: keep them."""
    integers_only: bool = False
    """Keep only rows whose gold answer is an integer."""
    bad_rows: BadRows = "refuse"
    """The treatment of rows that cannot be read or lack a question or an answer. refuse: raise an error at the first.
    skip: leave them out and count them, up to ten, or one in a hundred if these are more; beyond, raise an error."""

    def load(self) -> ExampleTask:
        """Read the sources and split them.

        Without test sources, whole clusters of near duplicates are held out. With test sources and `near_duplicates`,
        the column `near_train` of each test example says whether a training question is this similar, so that accuracy
        can be reported without such questions. `deduplicate` keeps the first of equal training questions and drops
        questions that are in the test sources; the test sources stay whole.

        `overlap` applies only to the training side, after the split.
        """
        if not self.train and not self.test:
            raise UnreachableDataError("task names no data: give task.train or task.test at least one source")
        train, test, notices = _split(self)
        if self.overlap is not None and train:
            train, notice = drop_overlap(train, self.overlap)
            notices += (notice,)
        notices += repetition_notices(train, test, remedy="task.deduplicate=true drops them")
        return ExampleTask(name=self.name, train=train, test=test, notices=notices)


def drop_overlap(train: Sequence[Example], config: OverlapConfig) -> tuple[tuple[Example, ...], str]:
    """The training examples that do not overlap the evaluation set, and a notice. UserError if none is left."""
    evaluation: list[str] = []
    for position, source in enumerate(config.sources):
        option = f"task.overlap.sources.{position}"
        for row in read_source(source, option=option):
            cell = None if "{" in source.question else cell_of(row, source.question, option=f"{option}.question")
            if isinstance(cell, list | tuple):
                evaluation.append(_question(row, source, option=option)[0])
            elif question := _compose(source.question, row, option=f"{option}.question"):
                evaluation.append(question)
    overlap = find_overlap([example.question for example in train], evaluation=evaluation, config=config)
    kept = tuple(example for example, drop in zip(train, overlap.overlapping, strict=True) if not drop)
    if not kept:
        raise UserError("every training row overlaps task.overlap: take the training data out of its sources")
    return kept, overlap.notice


def _split(config: RowsConfig) -> tuple[tuple[Example, ...], tuple[Example, ...], tuple[str, ...]]:
    """The training rows, the test rows, and notices."""
    bad_rows = BadRowLog(config.bad_rows)
    train = _read_sources(config, "train", config.train, bad_rows)
    test = _read_sources(config, "test", config.test, bad_rows)
    notices = bad_rows.notices()
    if config.deduplicate:
        train = _without_duplicates(train, known={question_key(example.question) for example in test})
    if not config.test:
        return *_split_by_fraction(train, config), notices
    for side, sources, examples in (("train", config.train, train), ("test", config.test, test)):
        if sources and not examples:
            raise _no_rows(side, sources)
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
    return tuple(train), tuple(test), notices


def _read_sources(config: RowsConfig, side: str, sources: Sequence[SourceConfig], bad_rows: BadRowLog) -> list[Example]:
    """The examples of all sources, concatenated. If there are several sources, ids contain the source's position."""
    alone = len(config.train) + len(config.test) == 1
    examples: list[Example] = []
    for position, source in enumerate(sources):
        option = f"task.{side}.{position}"
        prefix = "" if alone else f"{side}.{position}/"
        rows = read_source(source, option=option, bad_rows=bad_rows)
        examples += examples_of(
            rows, source, option=option, prefix=prefix, integers_only=config.integers_only, bad_rows=bad_rows
        )
    return examples


def examples_of(
    rows: Iterable[Row],
    source: SourceConfig,
    *,
    option: str,
    prefix: str = "",
    integers_only: bool = False,
    bad_rows: BadRowLog | None = None,
) -> list[Example]:
    """The rows of a source as examples, whose ids begin with `prefix`.

    UserError with the place of a bad row, unless `bad_rows` skips it. `option` is the dotted key of the source.
    `integers_only` leaves out rows whose gold answer is no integer.
    """
    pattern = _pattern(source, option=option)
    _check_expressions(source, option=option)
    bad_rows = bad_rows or BadRowLog()
    examples: list[Example] = []
    where_by_id: dict[str, str] = {}
    for index, row in enumerate(rows):
        with bad_rows:
            golds = _golds(row, source, pattern, option=option, integers_only=integers_only)
            if golds is not None:
                id = str(index) if source.id is None else _compose(source.id, row, option=f"{option}.id") or ""
                _check_id(id, row, where_by_id, option=option, column=source.id)
                examples.append(_example(row, source, golds, id=prefix + id, option=option))
                where_by_id[id] = row.where
            bad_rows.usable += 1
    return examples


def _check_expressions(source: SourceConfig, *, option: str) -> None:
    """UserError for a format string that no row could fill."""
    for name in ("question", "answer", "rationale", "id"):
        expression = getattr(source, name)
        if expression is not None and "{" in expression:
            field_names(expression, option=f"{option}.{name}")


def _check_id(id: str, row: Row, where_by_id: Mapping[str, str], *, option: str, column: str | None) -> None:
    """UserError for an id that is missing or belongs to an earlier row."""
    if not id or id in where_by_id:
        problem = f"id {id!r} occurs already at {where_by_id[id]}" if id else f"no id in column {column!r}"
        raise UserError(f"{row.where}: {problem}; make ids unique, or number the rows with {option}.id=null")


def _example(row: Row, source: SourceConfig, golds: tuple[str, ...], *, id: str, option: str) -> Example:
    question, messages, reply = _question(row, source, option=option)
    return Example(
        id=id,
        question=question,
        gold=golds[0],
        other_golds=golds[1:],
        messages=messages,
        rationale=reply if source.rationale is None else _rationale(source, row, golds[0], option=option),
        columns=row.values,
    )


def _question(row: Row, source: SourceConfig, *, option: str) -> tuple[str, tuple[Message, ...], str | None]:
    """The question as text and, from a column of chat messages, as messages, with the assistant's reply to them."""
    where = f"{option}.question"
    cell = None if "{" in source.question else cell_of(row, source.question, option=where)
    if isinstance(cell, list | tuple):
        place = f"{row.where}: column {source.question!r}"
        messages, reply = split_answer(read_messages(cell, where=place), where=place)
        asked = [message for message in messages if message["role"] != "system"]
        return conversation_text(asked), messages if len(messages) > 1 else (), reply
    question = _compose(source.question, row, option=where)
    if question is None:
        raise UserError(f"{row.where}: the question ({where}={source.question}) is empty; repair or remove it")
    return question, (), None


def _pattern(source: SourceConfig, *, option: str) -> re.Pattern[str] | None:
    if source.answer_pattern is None:
        return None
    try:
        return re.compile(source.answer_pattern)
    except re.error as error:
        raise UserError(f"{option}.answer_pattern={source.answer_pattern!r}: {error}; repair the expression") from error


def _golds(
    row: Row, source: SourceConfig, pattern: re.Pattern[str] | None, *, option: str, integers_only: bool
) -> tuple[str, ...] | None:
    """The normalized gold answers, without repetitions; None for a row that `integers_only` leaves out."""
    if source.answer is None:
        return ("",)
    cell = None if "{" in source.answer else cell_of(row, source.answer, option=f"{option}.answer, null for none")
    if isinstance(cell, list | tuple):
        texts = [cell_text(item, where=f"{row.where}: column {source.answer!r}") for item in cell]
    else:
        texts = [_compose(source.answer, row, option=f"{option}.answer") or ""]
    texts = [text for text in texts if text]
    if not texts:
        raise UserError(f"{row.where}: the answer ({option}.answer={source.answer}) is empty; repair or remove the row")
    if pattern is not None:
        matches = [match[1] if pattern.groups else match[0] for text in texts if (match := pattern.search(text))]
        if not any(matches) and not integers_only:
            raise UserError(
                f"{row.where}: {option}.answer_pattern finds nothing in {texts[0][:60]!r}; widen it, or drop such rows "
                "with task.integers_only=true"
            )
        texts = [text for text in matches if text]
    golds = tuple(dict.fromkeys(map(normalize_gold, texts)))
    if integers_only:
        golds = tuple(filter(is_integer, golds))
    return golds or None


def _rationale(source: SourceConfig, row: Row, gold: str, *, option: str) -> str | None:
    """The SFT target by the source's column or format string; None if one of its columns is empty."""
    with_gold = Row(where=row.where, values={**row.values, "gold": gold})
    return _compose(str(source.rationale), with_gold, option=f"{option}.rationale", require_all=True)


def _compose(expression: str, row: Row, *, option: str, require_all: bool = False) -> str | None:
    """The text of a column or format string; None if all (with require_all: any) of its columns are empty."""
    is_template = "{" in expression
    values: dict[str, object] = {}
    for column in field_names(expression, option=option) if is_template else (expression,):
        values[column] = cell_text(cell_of(row, column, option=option), where=f"{row.where}: column {column!r}")
    non_empty = [bool(value) for value in values.values()]
    if not (all(non_empty) if require_all else any(non_empty)):
        return None
    # An empty first column ("{Body} {Question}") leaves a leading space; line breaks belong to the format string.
    return fill(expression, values, option=option).lstrip(" ") if is_template else str(values[expression])


def cell_text(value: Any, *, where: str) -> str:
    """A cell as text; empty for None and NaN. UserError for what is neither text nor a number."""
    match value:
        case None:
            return ""
        case float() | Decimal() if math.isinf(value):
            raise UserError(f"{where} holds {value}, which is not a JSON number; write the answer as a text")
        case float() | Decimal():
            return "" if math.isnan(value) else format(Decimal(str(value)), "f")
        case str() | bool() | int():
            return str(value).strip()
        case _:
            raise UserError(f"{where} holds a {type(value).__name__}, not a text or number; name another column")


def _without_duplicates(examples: Sequence[Example], *, known: set[str]) -> list[Example]:
    """The first example of each question whose key is not in `known`; adds the keys to `known`."""
    kept = []
    for example in examples:
        key = question_key(example.question)
        if key not in known:
            known.add(key)
            kept.append(example)
    return kept


def _no_rows(side: str, sources: Sequence[SourceConfig]) -> UserError:
    names = ", ".join(str(source.path or source.hub) for source in sources)
    return UserError(
        f"task.{side}: no row is left of {names}; it is empty, or task.integers_only or task.deduplicate leaves none"
    )


def _split_by_fraction(examples: Sequence[Example], config: RowsConfig) -> Sides:
    if not examples:
        raise _no_rows("train", config.train)
    keys = cluster_keys([example.question for example in examples], threshold=config.near_duplicates)
    train: list[Example] = []
    test: list[Example] = []
    for example, key in zip(examples, keys, strict=True):
        (test if is_held_out(key, fraction=config.test_fraction, seed=config.seed) else train).append(example)
    if not train or not test:
        raise UserError(
            f"task.test_fraction={config.test_fraction} splits {len(examples)} rows in {len(set(keys))} clusters into "
            f"{len(train)} train and {len(test)} test: change task.test_fraction, task.seed or task.near_duplicates, "
            "or name test files in task.test"
        )
    return tuple(train), tuple(test)
