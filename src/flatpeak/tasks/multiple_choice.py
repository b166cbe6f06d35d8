"""Multiple choice: lettered options, and any data set of such questions by column mapping."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase as LETTERS
from typing import Any

from flatpeak.errors import UserError, did_you_mean
from flatpeak.tasks.config import ChoicesConfig, ChoiceSourceConfig
from flatpeak.tasks.data_files import Row, read_file, read_hub
from flatpeak.tasks.decontamination import held_out, question_key
from flatpeak.types import Example

Loaded = tuple[tuple[Example, ...], tuple[Example, ...], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """A question's options in the order in which they are shown."""

    options: tuple[str, ...]
    right: int
    """Which of them is right, from 0."""

    @property
    def letter(self) -> str:
        """The gold answer."""
        return LETTERS[self.right]

    def lettered(self) -> str:
        """`A. first`, `B. second` and so on, one per line."""
        return "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, self.options, strict=False))

    def shuffled(self, *, seed: int, id: str) -> Choices:
        """In an order that depends on the seed and the question's id alone."""
        order = list(range(len(self.options)))
        random.Random(f"{seed}:{id}").shuffle(order)
        return Choices(options=tuple(self.options[index] for index in order), right=order.index(self.right))


def check_choices(options: Sequence[str], right: int, *, where: str) -> Choices:
    """The options as Choices; UserError where they are not 2 to 26 texts, or `right` is none of them."""
    if not 2 <= len(options) <= len(LETTERS):
        raise UserError(f"{where}: {len(options)} options; a question needs 2 to {len(LETTERS)}")
    if not 0 <= right < len(options):
        raise UserError(
            f"{where}: the right option has index {right}, from 0, of {len(options)} options; repair the row"
        )
    return Choices(options=tuple(options), right=right)


def choices_examples(config: ChoicesConfig) -> Loaded:
    """Train, test and notices; no question is in both. UserError where a source lacks a column, or a row sense."""
    if not config.train and not config.test:
        raise UserError("task names no data: give task.train or task.test at least one source")
    train = _load(config, "train", config.train)
    test = _load(config, "test", config.test)
    if config.test:
        known = {question_key(str(example.columns["question"])) for example in test}
        kept = [e for e in train if question_key(str(e.columns["question"])) not in known]
        dropped = len(train) - len(kept)
        if dropped and not kept:
            raise UserError(f"task.train: all {dropped} questions are questions of task.test too; give others")
        notices = (f"{dropped} of {len(train)} training rows dropped: test rows ask the same",) if dropped else ()
        return tuple(kept), tuple(test), notices
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example in train:
        key = question_key(str(example.columns["question"]))
        sides[held_out(key, fraction=config.test_fraction, seed=config.seed)].append(example)
    if not all(sides):
        raise UserError(
            f"task.test_fraction={config.test_fraction} splits {len(train)} rows into {len(sides[0])} train and "
            f"{len(sides[1])} test: change task.test_fraction or task.seed, or name test sources in task.test"
        )
    return tuple(sides[0]), tuple(sides[1]), ()


def _load(config: ChoicesConfig, side: str, sources: Sequence[ChoiceSourceConfig]) -> list[Example]:
    examples: list[Example] = []
    for position, source in enumerate(sources):
        option = f"task.{side}.{position}"
        places: dict[str, str] = {}
        for index, row in enumerate(_rows(source, option=option)):
            own = str(index) if source.id is None else text_of(row, source.id, option=f"{option}.id")
            if own in places:
                raise UserError(
                    f"{row.where}: id {own!r} occurs already at {places[own]}; make ids unique, or number the rows "
                    f"with {option}.id=null"
                )
            places[own] = row.where
            examples.append(_example(row, source, config, id=f"{side}.{position}/{own}", option=option))
        if not places:
            raise UserError(f"{option}: no row in {source.path or source.hub}; give a source with questions")
    return examples


def _rows(source: ChoiceSourceConfig, *, option: str) -> Iterator[Row]:
    if (source.options is None) == (not source.incorrect):
        raise UserError(f"{option}: name either {option}.options or {option}.incorrect")
    if (source.path is None) == (source.hub is None):
        raise UserError(f"{option}: give one of {option}.path=FILE and {option}.hub=NAME, and null for the other")
    if source.path is not None:
        return read_file(source.path, option=f"{option}.path")
    return read_hub(
        str(source.hub),
        config=source.hub_config,
        split=source.split,
        path_option=f"{option}.path with {option}.hub=null",
    )


def _example(row: Row, source: ChoiceSourceConfig, config: ChoicesConfig, *, id: str, option: str) -> Example:
    asked = text_of(row, source.question, option=f"{option}.question")
    choices = _choices(row, source, option=option)
    if config.shuffle:
        choices = choices.shuffled(seed=config.seed, id=id)
    rationale = None if source.rationale is None else cell_of(row, source.rationale, option=f"{option}.rationale")
    return Example(
        id=id,
        question=f"{asked}\n\n{choices.lettered()}",
        gold=choices.letter,
        rationale=str(rationale) if rationale else None,
        columns={**row.values, "question": asked, "options": list(choices.options)},
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
    return check_choices(options, _right(correct, options, labels, row, option=f"{option}.correct"), where=row.where)


def _options(row: Row, columns: str | tuple[str, ...], *, option: str) -> tuple[list[str], list[str]]:
    """The options, and their labels where the row has some: a cell may be `{"text": [...], "label": [...]}`."""
    if not isinstance(columns, str):
        return _whole([cell_of(row, column, option=option) for column in columns], row, option=option), []
    cell = cell_of(row, columns, option=option)
    labels: list[Any] = []
    if isinstance(cell, dict):
        labels = cell.get("label") or []
        cell = cell.get("text")
    if not isinstance(cell, list | tuple):
        raise UserError(f"{row.where}: column {columns!r} ({option}) holds no list; name one column per option instead")
    return _whole(cell, row, option=option), [str(label).strip() for label in labels]


def _whole(cells: Sequence[Any], row: Row, *, option: str) -> list[str]:
    """The options without empty ones at the end. Left out elsewhere they would change what letters and indices mean."""
    options = ["" if cell is None else str(cell).strip() for cell in cells]
    while options and not options[-1]:
        options.pop()
    if not all(options):
        raise UserError(
            f"{row.where}: option {LETTERS[options.index('')]} ({option}) is empty; repair or remove the row"
        )
    return options


def _right(correct: Any, options: Sequence[str], labels: Sequence[str], row: Row, *, option: str) -> int:
    """The index of the right option, from its label, index, text or letter."""
    if isinstance(correct, int) and not isinstance(correct, bool):
        return correct
    said = str(correct).strip()
    if said in labels:
        return labels.index(said)
    by_text = [index for index, text in enumerate(options) if text == said]
    letters = LETTERS[: len(options)]
    by_letter = [letters.index(said.upper())] if len(said) == 1 and said.upper() in letters else []
    readings = set(by_text) | set(by_letter)
    if not readings and said.isdecimal():
        return int(said)
    if len(readings) != 1:
        problem = "could mean several of its options" if readings else "is none of its options"
        raise UserError(
            f"{row.where}: {said!r} ({option}) {problem}; give the letter, the index from 0 or the whole text of one"
        )
    return readings.pop()


def cell_of(row: Row, column: str, *, option: str) -> Any:
    """A cell of the row. UserError where there is no such column."""
    if column not in row.values:
        raise UserError(
            f"{row.where}: no column {column!r} ({option}){did_you_mean(column, row.values)}; "
            f"it has {', '.join(map(repr, row.values))}"
        )
    return row.values[column]


def raw_text_of(row: Row, column: str, *, option: str) -> str:
    """A cell's text as it stands, for prompts that repeat a published script's bytes. UserError where it is empty."""
    text_of(row, column, option=option)
    return str(row.values[column])


def text_of(row: Row, column: str, *, option: str) -> str:
    """A cell's text, stripped. UserError where it is empty."""
    cell = cell_of(row, column, option=option)
    text = "" if cell is None else str(cell).strip()
    if not text:
        raise UserError(f"{row.where}: column {column!r} ({option}) is empty; repair or remove the row")
    return text
