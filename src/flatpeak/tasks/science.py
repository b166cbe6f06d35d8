"""Open-ended science questions with reference answers, for a judge: CamelAI and Dr. SCI.

CamelAI (Li et al. 2023, arXiv 2303.17760): per subject 20,000 problems, namely 32 for each of 25 sub-topics of 25
topics. The solutions are by GPT-4 and unchecked, a noisy reference. Dr. SCI (arXiv 2602.08321): about a million
questions collected from other sets; the published files are an unofficial reproduction.

Both are published as one split. First, equal and nearly equal questions are dropped. Then whole cells (topics) are held
out by a hash, so that both sides share no cell and added rows move no cell to the other side. Finally, training rows
that overlap an evaluation set are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from flatpeak.errors import UserError, did_you_mean
from flatpeak.tasks.data_files import (
    ExampleTask,
    Row,
    SeededConfig,
    cell_of,
    directory,
    fetch_file,
    read_file,
    read_objects,
)
from flatpeak.tasks.decontamination import OverlapConfig, first_occurrences, is_held_out, question_key
from flatpeak.tasks.rows import drop_overlap
from flatpeak.types import Example

DR_SCI_HUB_NAME: Final = "MiniByte-666/Dr.SCI"
MAX_UNUSABLE: Final = 0.01
"""The largest share of rows with an empty question or answer, which are dropped; more is an error."""
_LOCAL_FILE: Final = "task.path, a directory with the file"


class FilteredConfig(SeededConfig):
    """A data set that holds out a part of its rows and drops some of the others."""

    near_duplicates: Annotated[float, Field(gt=0, le=1)] | None = 0.9
    """Keep only the first of questions this similar (Jaccard of word sets, numbers masked); null: of equal ones."""
    overlap: OverlapConfig | None = None
    """Drop training rows that overlap an evaluation set; null: keep them."""


class CamelAIConfig(FilteredConfig):
    """CamelAI science: `camel-ai/biology`, `chemistry`, `physics` from the Hub, or from a local directory."""

    type: Literal["camel_ai"] = "camel_ai"
    subjects: tuple[Literal["biology", "chemistry", "physics"], ...] = Field(
        default=("biology", "chemistry", "physics"), min_length=1
    )
    """The subjects whose problems are read."""
    path: str | None = None
    """A directory with, per subject, `biology.zip`, a folder `biology` of JSON files, or `biology.jsonl` or `.json`;
    null: load the zip files from the Hub."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """The share of (subject, topic, sub-topic) cells held out, by a seeded hash of the cell."""

    def load(self) -> ExampleTask:
        """Read the problems. `gold` is the whole published solution; subsets are subject and topic."""
        questions, notices = _usable(row for subject in self.subjects for row in _camel_rows(subject, self))
        return _split_by_cell(questions, self, notices)


class DrSCIConfig(FilteredConfig):
    """Dr. SCI as reproduced in `MiniByte-666/Dr.SCI` (arXiv 2602.08321): two parquet files, from the Hub or local.

    Columns are named by their path: `extra_info.question` is the field `question` of the column `extra_info`.
    """

    type: Literal["dr_sci"] = "dr_sci"
    parts: tuple[Literal["open-ended", "verifiable"], ...] = Field(default=("open-ended",), min_length=1)
    """The files that are read."""
    path: str | None = None
    """A directory with `Dr_SCI_open-ended.parquet` and `Dr_SCI_verifiable.parquet`; null: load them from the Hub."""
    rows: Annotated[int, Field(ge=1)] | None = None
    """The number of rows to read from each file; null: all (about 476,000 and 415,000)."""
    subjects: tuple[str, ...] = ()
    """Only rows of these subjects; empty: all."""
    question: str = "extra_info.question"
    """The column of the question."""
    answer: str = "reward_model.ground_truth"
    """The column of the reference answer."""
    rubric: str = "reward_model.rubric"
    """The column of the row's criteria, a list of {title, description, weight}; becomes the example's column `rubric`,
    empty if the row has none."""
    subject: str = "extra_info.subject"
    """The column of the subject, for which evaluations make a table."""
    topic: str | None = None
    """The column whose values the split keeps together; null: each question alone (published files have no topic)."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """The share of questions (with `topic`: of topics) held out, by a seeded hash."""

    def load(self) -> ExampleTask:
        """Read the questions. The column `rubric` holds the row's criteria as {title, description, weight}."""
        questions, notices = _usable(row for source in self.parts for row in _dr_sci_rows(source, self))
        return _split_by_cell(questions, self, notices)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """An example, and the cell that the split keeps together."""

    example: Example
    cell: str


def _usable(rows: Iterable[tuple[str, _Question | None]]) -> tuple[list[_Question], list[str]]:
    """The questions; questions without text are dropped and counted, up to a share of `MAX_UNUSABLE`."""
    questions: list[_Question] = []
    empty: list[str] = []
    for where, question in rows:
        if question is None:
            empty.append(where)
        else:
            questions.append(question)
    total = len(questions) + len(empty)
    if not total:
        raise UserError("no rows: the files under task.path are empty, or nothing in them is of task.subjects")
    if len(empty) > MAX_UNUSABLE * total:
        raise UserError(
            f"{len(empty)} of {total} rows lack a question, an answer or a topic ({', '.join(empty[:3])}); "
            "check the files under task.path, or fetch them again"
        )
    return questions, [
        f"{len(empty)} rows without a question, an answer or a topic dropped, {empty[0]} first"
    ] if empty else []


def _split_by_cell(
    questions: Sequence[_Question], config: CamelAIConfig | DrSCIConfig, notices: list[str]
) -> ExampleTask:
    keep = first_occurrences([question.example.question for question in questions], threshold=config.near_duplicates)
    kept = [question for question, is_first in zip(questions, keep, strict=True) if is_first]
    if len(kept) < len(questions):
        notices.append(f"{len(questions) - len(kept)} of {len(questions)} rows dropped: their questions repeat others")
    sides: tuple[list[Example], list[Example]] = ([], [])
    for question in kept:
        sides[is_held_out(question.cell, fraction=config.test_fraction, seed=config.seed)].append(question.example)
    train, test = map(tuple, sides)
    if not train or not test:
        cells = {question.cell for question in kept}
        raise UserError(
            f"task.test_fraction={config.test_fraction} splits {len(kept)} rows in {len(cells)} cells into "
            f"{len(train)} train and {len(test)} test: change task.test_fraction or task.seed"
        )
    if config.overlap is not None:
        train, notice = drop_overlap(train, config.overlap)
        notices.append(notice)
    return ExampleTask(name=config.type, train=train, test=test, notices=tuple(notices))


def _camel_rows(subject: str, config: CamelAIConfig) -> Iterator[tuple[str, _Question | None]]:
    for index, row in enumerate(_camel_files(subject, config)):
        columns = {name.removesuffix(";"): value for name, value in row.values.items()}
        names = ("topic", "sub_topic", "message_1", "message_2")
        topic, sub_topic, problem, solution = texts = [_text(row, columns, name) for name in names]
        if not all(texts):
            yield row.where, None
            continue
        example = Example(
            id=f"{subject}/{index}",
            question=problem,
            gold=solution,
            columns={**columns, "subject": subject},
            subsets={"subject": subject, "topic": topic},
        )
        yield row.where, _Question(example=example, cell=f"{subject}/{topic}/{sub_topic}")


def _camel_files(subject: str, config: CamelAIConfig) -> Iterator[Row]:
    if config.path is None:
        file = fetch_file(f"camel-ai/{subject}", f"{subject}.zip", path_option=_LOCAL_FILE)
        return read_objects(str(file), option="task.path")
    folder = directory(config.path, option="task.path")
    for name in (f"{subject}.zip", subject):
        if (folder / name).exists():
            return read_objects(str(folder / name), option="task.path")
    for name in (f"{subject}.jsonl", f"{subject}.json"):
        if (folder / name).is_file():
            return read_file(str(folder / name), option="task.path")
    raise UserError(
        f"task.path={config.path}: neither {subject}.zip, nor a folder {subject}, {subject}.jsonl or {subject}.json in "
        "it; put one there, or leave the subject out of task.subjects"
    )


def _dr_sci_rows(source: str, config: DrSCIConfig) -> Iterator[tuple[str, _Question | None]]:
    name = f"Dr_SCI_{source}.parquet"
    if config.path is None:
        file = fetch_file(DR_SCI_HUB_NAME, name, path_option=_LOCAL_FILE)
    else:
        file = directory(config.path, option="task.path") / name
    if not file.is_file():
        raise UserError(f"task.path={config.path}: no {name} in it; put it there, or leave {source} out of task.parts")
    for index, row in enumerate(islice(read_file(str(file), option="task.path"), config.rows)):
        subject = str(cell_of(row, config.subject, option="task.subject") or "")
        if config.subjects and subject not in config.subjects:
            continue
        question, gold = (
            str(cell_of(row, path, option=f"task.{option}") or "").strip()
            for path, option in ((config.question, "question"), (config.answer, "answer"))
        )
        if not question or not gold:
            yield row.where, None
            continue
        topic = None if config.topic is None else str(cell_of(row, config.topic, option="task.topic"))
        # Only the open-ended file has rubrics. The column `prompt` repeats the question with more text.
        rubric = cell_of(row, config.rubric, option="task.rubric") if source == "open-ended" else None
        example = Example(
            id=f"{source}/{index}",
            question=question,
            gold=gold,
            columns={name: value for name, value in row.values.items() if name != "prompt"} | {"rubric": rubric or []},
            subsets={"part": source, "subject": subject} | ({} if topic is None else {"topic": topic}),
        )
        cell = question_key(question) if topic is None else f"{subject}/{topic}"
        yield row.where, _Question(example=example, cell=cell)


def _text(row: Row, columns: dict[str, Any], name: str) -> str:
    if name not in columns:
        raise UserError(
            f"{row.where}: no column {name!r}{did_you_mean(name, columns)}; CamelAI rows have role_1, topic, "
            "sub_topic, message_1 and message_2"
        )
    value = columns[name]
    return value.strip() if isinstance(value, str) else ""
