"""Open-ended science questions with reference answers, for a judge: CamelAI and Dr. SCI.

CamelAI (Li et al. 2023, arXiv 2303.17760): per subject 20,000 problems, 32 for each of 25 sub-topics of 25 topics, with
solutions by GPT-4 that nobody checked: a noisy reference. Dr. SCI (arXiv 2602.08321): about a million questions
gathered from other sets; the published files are those of an unofficial reproduction.

Both are published as one split. Whole topics are held out by a hash, so that the sides share no cell and more rows move
none across; before that, repeated and nearly repeated questions are dropped from all of it, and after it training rows
that overlap an evaluation set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from flatpeak.errors import UserError, did_you_mean
from flatpeak.tasks.config import CamelAIConfig, DrSCIConfig
from flatpeak.tasks.data_files import Row, directory, fetch_file, read_file, read_objects
from flatpeak.tasks.decontamination import find_overlap, first_of_near, held_out, question_key
from flatpeak.tasks.rows import source_questions
from flatpeak.types import Example

DR_SCI_HUB: Final = "MiniByte-666/Dr.SCI"
_LOCAL: Final = "task.path, a directory with the file"
UNUSABLE: Final = 0.01
"""Up to this share of rows may have an empty question or answer; they are dropped. More is an error."""

Loaded = tuple[tuple[Example, ...], tuple[Example, ...], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    example: Example
    cell: str
    """What the split keeps together."""


def camel_ai_examples(config: CamelAIConfig) -> Loaded:
    """Train, test and notices. `gold` is the whole published solution; subsets are subject and topic."""
    questions, notices = _usable(row for subject in config.subjects for row in _camel_rows(subject, config))
    return _divided(questions, config, notices)


def dr_sci_examples(config: DrSCIConfig) -> Loaded:
    """Train, test and notices. The column `rubric` holds the row's criteria as {title, description, weight}."""
    questions, notices = _usable(row for part in config.parts for row in _dr_sci_rows(part, config))
    return _divided(questions, config, notices)


def _usable(rows: Iterable[tuple[str, _Question | None]]) -> tuple[list[_Question], list[str]]:
    """The questions; those without text are dropped and counted, up to a share of `UNUSABLE`."""
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
    if len(empty) > UNUSABLE * total:
        raise UserError(
            f"{len(empty)} of {total} rows lack a question, an answer or a topic ({', '.join(empty[:3])}); "
            "check the files under task.path, or fetch them again"
        )
    return questions, [
        f"{len(empty)} rows without a question, an answer or a topic dropped, {empty[0]} first"
    ] if empty else []


def _divided(questions: Sequence[_Question], config: CamelAIConfig | DrSCIConfig, notices: list[str]) -> Loaded:
    keep = first_of_near([one.example.question for one in questions], threshold=config.near_duplicates)
    kept = [one for one, is_kept in zip(questions, keep, strict=True) if is_kept]
    if len(kept) < len(questions):
        notices.append(f"{len(questions) - len(kept)} of {len(questions)} rows dropped: their questions repeat others")
    sides: tuple[list[Example], list[Example]] = ([], [])
    for one in kept:
        sides[held_out(one.cell, fraction=config.test_fraction, seed=config.seed)].append(one.example)
    train, test = sides
    if not train or not test:
        raise UserError(
            f"task.test_fraction={config.test_fraction} splits {len(kept)} rows in {len({one.cell for one in kept})} "
            f"cells into {len(train)} train and {len(test)} test: change task.test_fraction or task.seed"
        )
    if config.overlap is not None:
        evaluation = source_questions(config.overlap.sources, option="task.overlap.sources")
        overlap = find_overlap([one.question for one in train], evaluation=evaluation, config=config.overlap)
        train = [one for one, found in zip(train, overlap.found, strict=True) if not found]
        notices.append(overlap.notice)
    if not train:
        raise UserError("every training row overlaps task.overlap: take the training data out of its sources")
    return tuple(train), tuple(test), tuple(notices)


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
        file = fetch_file(f"camel-ai/{subject}", f"{subject}.zip", path_option=_LOCAL)
        return read_objects(str(file), option="task.path")
    place = directory(config.path, option="task.path")
    for name in (f"{subject}.zip", subject):
        if (place / name).exists():
            return read_objects(str(place / name), option="task.path")
    for name in (f"{subject}.jsonl", f"{subject}.json"):
        if (place / name).is_file():
            return read_file(str(place / name), option="task.path")
    raise UserError(
        f"task.path={config.path}: neither {subject}.zip, nor a folder {subject}, {subject}.jsonl or {subject}.json in "
        "it; put one there, or leave the subject out of task.subjects"
    )


def _dr_sci_rows(part: str, config: DrSCIConfig) -> Iterator[tuple[str, _Question | None]]:
    file = f"Dr_SCI_{part}.parquet"
    if config.path is None:
        place = fetch_file(DR_SCI_HUB, file, path_option=_LOCAL)
    else:
        place = directory(config.path, option="task.path") / file
    if not place.is_file():
        raise UserError(f"task.path={config.path}: no {file} in it; put it there, or leave {part} out of task.parts")
    for index, row in enumerate(islice(read_file(str(place), option="task.path"), config.rows)):
        subject = str(_at(row, config.subject, option="task.subject") or "")
        if config.subjects and subject not in config.subjects:
            continue
        question, gold = (
            str(_at(row, path, option=f"task.{option}") or "").strip()
            for path, option in ((config.question, "question"), (config.answer, "answer"))
        )
        if not question or not gold:
            yield row.where, None
            continue
        topic = None if config.topic is None else str(_at(row, config.topic, option="task.topic"))
        # Open-ended rows have a rubric; the verifiable file has no such field. Prompts repeat the question at length.
        rubric = _at(row, config.rubric, option="task.rubric") if part == "open-ended" else None
        example = Example(
            id=f"{part}/{index}",
            question=question,
            gold=gold,
            columns={name: value for name, value in row.values.items() if name != "prompt"} | {"rubric": rubric or []},
            subsets={"part": part, "subject": subject} | ({} if topic is None else {"topic": topic}),
        )
        cell = question_key(question) if topic is None else f"{subject}/{topic}"
        yield row.where, _Question(example=example, cell=cell)


def _at(row: Row, path: str, *, option: str) -> Any:
    """The value at a path such as `extra_info.question`; UserError where a name on the way is not there."""
    value: Any = row.values
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            known = list(value) if isinstance(value, dict) else []
            raise UserError(
                f"{row.where}: no {name!r} ({option}={path}){did_you_mean(name, known)}; "
                f"there is {', '.join(map(repr, known)) or type(value).__name__}"
            )
        value = value[name]
    return value


def _text(row: Row, columns: dict[str, Any], name: str) -> str:
    if name not in columns:
        raise UserError(
            f"{row.where}: no column {name!r}{did_you_mean(name, columns)}; CamelAI rows have role_1, topic, "
            "sub_topic, message_1 and message_2"
        )
    value = columns[name]
    return value.strip() if isinstance(value, str) else ""
