"""MATH (Hendrycks et al. 2021, arXiv 2103.03874): competition problems, and MATH-500 (Lightman et al. 2023, arXiv
2305.20050), a test set of 500 of them that leaves 12,000 to train on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from flatpeak.errors import UserError
from flatpeak.tasks.config import GSM8KConfig, MATHConfig
from flatpeak.tasks.data_files import (
    Row,
    chosen,
    directory,
    read_file,
    read_hub,
    read_jsonl,
    read_objects,
    read_split,
    sized,
    slug,
)
from flatpeak.tasks.multiple_choice import text_of
from flatpeak.types import Example
from flatpeak.utils.answers import Box, find_boxes, is_number, normalize_gold

HUB_NAME, HUB_500 = "EleutherAI/hendrycks_math", "HuggingFaceH4/MATH-500"
_LOCAL = "task.path, a directory with train.jsonl and test.jsonl"
SUBJECTS = (
    "Algebra",
    "Counting & Probability",
    "Geometry",
    "Intermediate Algebra",
    "Number Theory",
    "Prealgebra",
    "Precalculus",
)
_FORMULA_END = re.compile(r"\\[)\]]|[$\n]")
_LONGEST_BARE = 200
UNUSABLE = 0.01
"""More rows than this share without an answer are no accident."""
_NO_ANSWER = "no \\boxed{} with balanced braces in the solution"
_LEVEL = re.compile(r"(?:Level\s*)?([0-9?])")


def math_examples(config: MATHConfig) -> tuple[tuple[Example, ...], tuple[Example, ...], tuple[str, ...]]:
    """Train and test, each in a seeded order, and notices.

    With `split=math500` every one of the 12,500 problems trains whose text is none of the 500's, spaces aside. Rows
    without an answer, of which the published training set has two, are left out and counted; UserError where they are
    more than a few.
    """
    subjects = chosen(config.subjects, SUBJECTS, option="task.subjects")
    train, unanswered = _answered(_split(config, "train"))
    test, more = _answered(_split(config, "test"))
    unanswered += more
    if len(unanswered) > UNUSABLE * (len(train) + len(test) + len(unanswered)):
        raise UserError(f"{unanswered[0]}: {_NO_ANSWER}, as in {len(unanswered)} rows in all; repair or remove them")
    if config.split == "math500":
        held_out, _ = _answered((f"math500/{index}", row) for index, row in enumerate(_math500(config)))
        known = {_key(example.question) for example in held_out}
        train = [example for example in train + test if _key(example.question) not in known]
        test = held_out
    train, test = ([e for e in examples if _wanted(e, config, subjects)] for examples in (train, test))
    notices = (
        [f"{len(unanswered)} rows without an answer are left out: {', '.join(unanswered[:3])}"] if unanswered else []
    )
    return (
        sized(train, config.train_size, seed=config.seed, option="task.train_size"),
        sized(test, config.test_size, seed=config.seed, option="task.test_size"),
        tuple(notices),
    )


def boxed_answer(solution: str) -> str | None:
    """The content of the last `\\boxed{}` that is not blank, or what follows a bare `\\boxed 5` in its formula.

    Of `\\fbox{}` where nothing is boxed; None where nothing is in a frame either. Linear in the text.
    """
    boxes = [box for box in find_boxes(solution) if not box.escaped_twice]
    for command in ("boxed", "fbox"):
        for box in reversed(boxes):
            if box.command == command and (content := _content(solution, box)):
                return content
    return None


def _content(solution: str, box: Box) -> str:
    if box.end is not None:
        return solution[box.start : box.end].strip()
    start = box.start + len("\\") + len(box.command)
    return _FORMULA_END.split(solution[start : start + _LONGEST_BARE])[0].rstrip(" .,").strip()


def _split(config: MATHConfig, split: str) -> Iterator[tuple[str, Row]]:
    """(id, row) of each row of a published split."""
    if config.path is None:
        for subject in SUBJECTS:
            rows = read_hub(HUB_NAME, config=slug(subject), split=split, path_option=_LOCAL)
            for index, row in enumerate(rows):
                yield f"{split}/{slug(subject)}/{index}", row
        return
    tree = Path(config.path).expanduser() / split
    if not tree.is_dir():
        for index, row in enumerate(read_split(config.path, split, option="task.path")):
            yield f"{split}/{index}", row
        return
    empty = True
    for row in read_objects(str(tree), option="task.path"):
        empty = False
        yield f"{split}/{Path(row.where).relative_to(tree).with_suffix('').as_posix()}", row
    if empty:
        raise UserError(f"task.path={config.path}: no .json files in {split}/; unpack the original archive there")


def _math500(config: MATHConfig) -> Iterator[Row]:
    if config.math500_path is not None:
        return read_file(config.math500_path, option="task.math500_path")
    if config.path is not None:
        return read_split(config.path, "math500", option="task.path")
    return read_hub(HUB_500, config=None, split="test", path_option="task.math500_path")


def _answered(rows: Iterable[tuple[str, Row]]) -> tuple[list[Example], list[str]]:
    """The examples, and where the rows stand that have no answer."""
    examples, unanswered = list[Example](), list[str]()
    for id, row in rows:
        example = _example(row, id=id)
        if example is None:
            unanswered.append(row.where)
        else:
            examples.append(example)
    return examples, unanswered


def _example(row: Row, *, id: str) -> Example | None:
    """The example; None where its solution boxes nothing."""
    problem, solution = (text_of(row, column, option="MATH") for column in ("problem", "solution"))
    # MATH-500 names the answer, and calls the type subject.
    gold = str(row.values.get("answer") or "").strip() or boxed_answer(solution)
    if not gold:
        return None
    subject = text_of(row, "subject" if "subject" in row.values else "type", option="MATH")
    level = _LEVEL.fullmatch(text_of(row, "level", option="MATH"))
    if level is None:
        raise UserError(f"{row.where}: level {row.values['level']!r} is not such as `Level 3`; repair the row")
    return Example(
        id=id,
        question=problem,
        gold=gold,
        rationale=solution,
        columns=row.values,
        subsets={"subject": subject, "level": level[1]},
    )


def _wanted(example: Example, config: MATHConfig, subjects: frozenset[str]) -> bool:
    level, subject = example.subsets["level"], slug(example.subsets["subject"])
    return (not config.levels or level in map(str, config.levels)) and (not subjects or subject in subjects)


def _key(problem: str) -> str:
    return "".join(problem.split())


GSM8K_HUB_NAME = "openai/gsm8k"
HUB_CONFIG = "main"
_GSM8K_FILES = "task.path, a directory with train.jsonl and test.jsonl"


def gsm8k_examples(config: GSM8KConfig) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Train and test, the published splits, each cut to its size. The rationale is the whole published answer.

    With `shots`, questions are worded as the lm-evaluation-harness task gsm8k words them: `Question: ...\\nAnswer:`
    after so many worked examples. Those are the first training rows, which then are not trained on.
    """
    if not config.shots:
        return _gsm8k_split(config, "train", config.train_size), _gsm8k_split(config, "test", config.test_size)
    size = None if config.train_size is None else config.train_size + config.shots
    train, test = _gsm8k_split(config, "train", size), _gsm8k_split(config, "test", config.test_size)
    if len(train) <= config.shots:
        raise UserError(f"task.shots={config.shots}: the train split has only {len(train)} rows; lower task.shots")
    shots = tuple(f"{_cued(example)} {example.rationale}\n\n" for example in train[: config.shots])
    worded = (tuple(_shown(example, shots) for example in side) for side in (train[config.shots :], test))
    return next(worded), next(worded)


def _cued(example: Example) -> str:
    return f"Question: {example.question}\nAnswer:"


def _shown(example: Example, shots: tuple[str, ...]) -> Example:
    return replace(example, question=_cued(example), rationale=f" {example.rationale}", shots=shots)


def gsm8k_gold(answer: str) -> str | None:
    """The number after the last `####`, without `$`, commas and a final dot; None where there is no such number."""
    _, mark, tail = answer.rpartition("####")
    words = tail.replace("$", "").split()
    gold = normalize_gold(words[0].replace(",", "")) if mark and words else ""
    return gold if is_number(gold) else None


def _gsm8k_split(config: GSM8KConfig, split: str, size: int | None) -> tuple[Example, ...]:
    if size is not None and size < 1:
        raise UserError(f"task.{split}_size={size}: give at least 1, or null for all rows")
    examples = tuple(
        _gsm8k_example(row, f"{split}/{index}") for index, row in enumerate(islice(_rows(config, split), size))
    )
    if not examples:
        raise UserError(f"task.path={config.path}: the {split} split has no rows; fetch the files again")
    if size is not None and len(examples) < size:
        raise UserError(f"task.{split}_size={size}: the {split} split has only {len(examples)} rows; use null for all")
    return examples


def _rows(config: GSM8KConfig, split: str) -> Iterable[Row]:
    if config.path is None:
        return read_hub(GSM8K_HUB_NAME, config=HUB_CONFIG, split=split, path_option=_GSM8K_FILES)
    file = directory(config.path, option="task.path") / f"{split}.jsonl"
    if not file.is_file():
        raise UserError(f"task.path={config.path}: no {file.name} in it; put train.jsonl and test.jsonl there")
    return read_jsonl(file)


def _gsm8k_example(row: Row, id: str) -> Example:
    question, answer = (row.values.get(column) for column in ("question", "answer"))
    for column, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{row.where}: no text in column {column!r}; GSM8K rows have question and answer")
    gold = gsm8k_gold(str(answer))
    if gold is None:
        raise UserError(f"{row.where}: the answer has no number after `####`; end it with a line such as `#### 18`")
    return Example(id=id, question=str(question).strip(), gold=gold, rationale=str(answer), columns=row.values)
