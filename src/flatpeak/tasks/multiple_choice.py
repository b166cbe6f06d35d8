"""Multiple choice: lettered options, and the task `choices` for any data set of such questions, by column mapping."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase as LETTERS
from typing import Annotated, Any, Literal

from pydantic import Field

from flatpeak.errors import UserError
from flatpeak.tasks.data_files import ExampleTask, Row, RowsSourceConfig, SeededConfig, cell_of, read_source
from flatpeak.tasks.decontamination import is_held_out, question_key
from flatpeak.types import Example


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The options of a question, in the order of their letters."""

    options: tuple[str, ...]
    right: int
    """The index of the right option."""

    @property
    def letter(self) -> str:
        """The letter of the right option: the gold answer."""
        return LETTERS[self.right]

    def lettered(self) -> str:
        """The options with their letters, one per line: `A. first`, `B. second`."""
        return "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, self.options, strict=False))

    def after(self, question: str) -> str:
        """The question, stripped, with its lettered options below."""
        return f"{question.strip()}\n\n{self.lettered()}"

    def shuffled(self, *, seed: int, id: str) -> Choices:
        """The options in an order that depends only on the seed and the question's id."""
        order = list(range(len(self.options)))
        random.Random(f"{seed}:{id}").shuffle(order)
        return Choices(options=tuple(self.options[index] for index in order), right=order.index(self.right))


def check_choices(options: Sequence[str], right: int, *, where: str) -> Choices:
    """The options as Choices; UserError unless there are 2 to 26 and `right` is the index of one."""
    if not 2 <= len(options) <= len(LETTERS):
        raise UserError(f"{where}: {len(options)} options; a question needs 2 to {len(LETTERS)}")
    if not 0 <= right < len(options):
        raise UserError(
            f"{where}: the right option has index {right}, from 0, of {len(options)} options; repair the row"
        )
    return Choices(options=tuple(options), right=right)


def repeated_right_options(examples: Sequence[Example]) -> tuple[str, ...]:
    """A notice about questions whose right option has two letters, only one of which counts; empty without them."""
    repeated = [
        example.id
        for example in examples
        if example.columns["options"].count(example.columns["options"][LETTERS.index(example.gold)]) > 1
    ]
    if not repeated:
        return ()
    count = f"{len(repeated)} of {len(examples)} ({', '.join(repeated[:3])})"
    return (f"questions with their right option under two letters, of which one counts: {count}",)


class ChoiceSourceConfig(RowsSourceConfig):
    """A source of multiple-choice rows and the meaning of its columns."""

    question: str = "question"
    """The column of the question."""
    options: str | tuple[str, ...] | None = None
    """A column with a list of texts, or one column per option; null: `incorrect` and `correct` are the options."""
    correct: str = "answer"
    """A column with the right option: its letter, its index from 0, or its text. With `incorrect`: its text."""
    incorrect: tuple[str, ...] = ()
    """Columns with the wrong options, if the right option has a separate column."""
    rationale: str | None = None
    """A column with a worked answer for SFT; null: none."""
    subsets: dict[str, str] = Field(default_factory=dict)
    """The columns for which evaluation makes tables: name of the table -> column."""


class ChoicesConfig(SeededConfig):
    """Any multiple-choice data set, by column mapping."""

    type: Literal["choices"] = "choices"
    name: str = "choices"
    """The task's name, in metrics as `eval/<name>/accuracy`."""
    train: tuple[ChoiceSourceConfig, ...] = ()
    """One or more sources, concatenated. Rows whose question is in the test sources are left out."""
    test: tuple[ChoiceSourceConfig, ...] = ()
    """Sources of held-out rows, concatenated. Empty: `test_fraction` of the training rows is held out, by a seeded hash
    of the question."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The share of training rows held out if `test` is empty."""
    shuffle: bool = True
    """Shuffle each row's options, by `seed` and the row's id."""

    def load(self) -> ExampleTask:
        """Read the sources; no question is on both sides. UserError if a source or a row is unusable."""
        if not self.train and not self.test:
            raise UserError("task names no data: give task.train or task.test at least one source")
        examples = _read_sources(self, "train", self.train)
        test = _read_sources(self, "test", self.test)
        repeated = repeated_right_options(examples + test)
        if not self.test:
            return replace(_split_by_fraction(examples, self), notices=repeated)
        test_keys = {_key(example) for example in test}
        train = [example for example in examples if _key(example) not in test_keys]
        dropped = len(examples) - len(train)
        if dropped and not train:
            raise UserError(f"task.train: all {dropped} questions are questions of task.test too; give others")
        notices = (f"{dropped} of {len(examples)} training rows dropped: test rows ask the same",) if dropped else ()
        return ExampleTask(name=self.name, train=tuple(train), test=tuple(test), notices=notices + repeated)


def _split_by_fraction(examples: Sequence[Example], config: ChoicesConfig) -> ExampleTask:
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        sides[is_held_out(_key(example), fraction=config.test_fraction, seed=config.seed)].append(example)
    train, test = sides
    if not train or not test:
        raise UserError(
            f"task.test_fraction={config.test_fraction} splits {len(examples)} rows into {len(train)} train and "
            f"{len(test)} test: change task.test_fraction or task.seed, or name test sources in task.test"
        )
    return ExampleTask(name=config.name, train=tuple(train), test=tuple(test))


def _key(example: Example) -> str:
    """The normal form of the question alone, without its options."""
    return question_key(str(example.columns["question"]))


def _read_sources(config: ChoicesConfig, side: str, sources: Sequence[ChoiceSourceConfig]) -> list[Example]:
    examples: list[Example] = []
    for position, source in enumerate(sources):
        option = f"task.{side}.{position}"
        where_by_id: dict[str, str] = {}
        for index, row in enumerate(_rows(source, option=option)):
            row_id = str(index) if source.id is None else text_of(row, source.id, option=f"{option}.id")
            if row_id in where_by_id:
                raise UserError(
                    f"{row.where}: id {row_id!r} occurs already at {where_by_id[row_id]}; make ids unique, or number "
                    f"the rows with {option}.id=null"
                )
            where_by_id[row_id] = row.where
            examples.append(_example(row, source, config, id=f"{side}.{position}/{row_id}", option=option))
        if not where_by_id:
            raise UserError(f"{option}: no row in {source.path or source.hub}; give a source with questions")
    return examples


def _rows(source: ChoiceSourceConfig, *, option: str) -> Iterator[Row]:
    if (source.options is None) == (not source.incorrect):
        raise UserError(f"{option}: name either {option}.options or {option}.incorrect")
    return read_source(source, option=option)


def _example(row: Row, source: ChoiceSourceConfig, config: ChoicesConfig, *, id: str, option: str) -> Example:
    question = text_of(row, source.question, option=f"{option}.question")
    choices = _choices(row, source, option=option)
    if config.shuffle:
        choices = choices.shuffled(seed=config.seed, id=id)
    rationale = None if source.rationale is None else cell_of(row, source.rationale, option=f"{option}.rationale")
    return Example(
        id=id,
        question=choices.after(question),
        gold=choices.letter,
        rationale=str(rationale) if rationale else None,
        columns={**row.values, "question": question, "options": list(choices.options)},
        subsets={
            name: text_of(row, column, option=f"{option}.subsets.{name}") for name, column in source.subsets.items()
        },
    )


def _choices(row: Row, source: ChoiceSourceConfig, *, option: str) -> Choices:
    if source.incorrect:
        right = text_of(row, source.correct, option=f"{option}.correct")
        wrong = [str(cell_of(row, column, option=f"{option}.incorrect") or "").strip() for column in source.incorrect]
        return check_choices([right, *filter(None, wrong)], 0, where=row.where)
    options, labels = _options(row, source.options or "", option=f"{option}.options")
    correct = cell_of(row, source.correct, option=f"{option}.correct")
    return check_choices(
        options, _right_index(correct, options, labels, row, option=f"{option}.correct"), where=row.where
    )


def _options(row: Row, columns: str | tuple[str, ...], *, option: str) -> tuple[list[str], list[str]]:
    """The options, and their labels if the row has any: a cell may be `{"text": [...], "label": [...]}`."""
    if not isinstance(columns, str):
        return _option_texts([cell_of(row, column, option=option) for column in columns], row, option=option), []
    cell = cell_of(row, columns, option=option)
    labels: list[Any] = []
    if isinstance(cell, dict):
        labels = cell.get("label") or []
        cell = cell.get("text")
    if not isinstance(cell, list | tuple):
        raise UserError(f"{row.where}: column {columns!r} ({option}) holds no list; name one column per option instead")
    return _option_texts(cell, row, option=option), [str(label).strip() for label in labels]


def texts_of(row: Row, column: str, *, option: str) -> list[str]:
    """A cell's list of texts, not stripped. UserError if it is not a list, or if a text is missing."""
    cell = cell_of(row, column, option=option)
    if not isinstance(cell, list | tuple) or any(text is None for text in cell):
        problem = "has an option without a text" if isinstance(cell, list | tuple) else "is not a list of options"
        raise UserError(f"{row.where}: column {column!r} ({option}) {problem}; write it as a JSON list of texts")
    return [str(text) for text in cell]


def _option_texts(cells: Sequence[Any], row: Row, *, option: str) -> list[str]:
    """The options without empty ones at the end. An empty option elsewhere is an error, because letters would shift."""
    options = ["" if cell is None else str(cell).strip() for cell in cells]
    while options and not options[-1]:
        options.pop()
    if not all(options):
        raise UserError(
            f"{row.where}: option {LETTERS[options.index('')]} ({option}) is empty; repair or remove the row"
        )
    return options


def _right_index(correct: Any, options: Sequence[str], labels: Sequence[str], row: Row, *, option: str) -> int:
    """The index of the right option, from its label, index, text or letter."""
    if isinstance(correct, int) and not isinstance(correct, bool):
        return correct
    text = str(correct).strip()
    if text in labels:
        return labels.index(text)
    by_text = [index for index, option_text in enumerate(options) if option_text == text]
    letters = LETTERS[: len(options)]
    by_letter = [letters.index(text.upper())] if len(text) == 1 and text.upper() in letters else []
    candidates = set(by_text) | set(by_letter)
    if not candidates and text.isdecimal():
        return int(text)
    if len(candidates) != 1:
        problem = "could mean several of its options" if candidates else "is none of its options"
        raise UserError(
            f"{row.where}: {text!r} ({option}) {problem}; give the letter, the index from 0 or the whole text of one"
        )
    return candidates.pop()


def raw_text_of(row: Row, column: str, *, option: str) -> str:
    """A cell's text, not stripped, for prompts that repeat a published script's bytes. UserError if it is empty."""
    text_of(row, column, option=option)
    return str(row.values[column])


def text_of(row: Row, column: str, *, option: str) -> str:
    """A cell's text, stripped. UserError if it is empty."""
    cell = cell_of(row, column, option=option)
    text = "" if cell is None else str(cell).strip()
    if not text:
        raise UserError(f"{row.where}: column {column!r} ({option}) is empty; repair or remove the row")
    return text
