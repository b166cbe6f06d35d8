"""Mathematics in words: GSM8K (grade school) and MATH (competitions).

GSM8K is Cobbe et al. 2021, arXiv 2110.14168. MATH is Hendrycks et al. 2021, arXiv 2103.03874; MATH-500 (Lightman et al.
2023, arXiv 2305.20050) is a test set of 500 of its problems, which leaves 12,000 for training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from flatpeak.errors import UserError
from flatpeak.tasks.data_files import (
    ExampleTask,
    Row,
    SeededConfig,
    SizesConfig,
    directory,
    known_slugs,
    read_file,
    read_hub,
    read_jsonl,
    read_objects,
    read_split,
    shuffled,
    slug,
)
from flatpeak.tasks.decontamination import repetition_notices
from flatpeak.tasks.multiple_choice import text_of
from flatpeak.types import Example
from flatpeak.utils.answers import Box, find_boxes, is_number, joined_answers, normalize_gold

GSM8K_HUB_NAME: Final = "openai/gsm8k"
MATH_HUB_NAME: Final = "EleutherAI/hendrycks_math"
MATH500_HUB_NAME: Final = "HuggingFaceH4/MATH-500"
SUBJECTS: Final = (
    "Algebra",
    "Counting & Probability",
    "Geometry",
    "Intermediate Algebra",
    "Number Theory",
    "Prealgebra",
    "Precalculus",
)
"""The subjects of MATH, as named in its rows."""
MAX_UNANSWERED: Final = 0.01
"""The largest share of MATH rows without an answer; more is an error."""
_LOCAL_FILES: Final = "task.path, a directory with train.jsonl and test.jsonl"
_NO_ANSWER: Final = "no \\boxed{} with balanced braces in the solution"
_LEVEL: Final = re.compile(r"(?:Level\s*)?([0-9?])")
_SECOND_NUMBER: Final = re.compile(r"\d|\b(?:dozen|hundred|thousand|million|billion|trillion)s?\b", re.IGNORECASE)
"""A further number or a magnitude on a line that should state one number."""
_REMEDY: Final = "take them out of the training files"
_FORMULA_END: Final = re.compile(r"\\[)\]]|[$\n]")
_LONGEST_BARE: Final = 200
"""Characters to read after a `\\boxed` without braces."""


class GSM8KConfig(SizesConfig):
    """GSM8K: `openai/gsm8k` from the Hub, or `train.jsonl` and `test.jsonl` in a local directory."""

    type: Literal["gsm8k"] = "gsm8k"
    path: str | None = None
    """A directory with the two files in the published layout; null: load them from the Hub."""
    shots: Annotated[int, Field(ge=0)] = 0
    """The number of worked examples before each question, from the first training rows, which are then not trained on.
    They are formatted as `Question: ...` and `Answer: ...`. 0: none, and the question stays unchanged."""

    def load(self) -> ExampleTask:
        """Read the published splits, each cut to its size. The rationale is the whole published answer.

        With `shots`, questions are formatted as in the lm-evaluation-harness task gsm8k, `Question: ...\\nAnswer:`,
        after that many worked examples. These are the first training rows, which are not trained on.
        """
        size = None if self.train_size is None else self.train_size + self.shots
        train, test = _gsm8k_split(self, "train", size), _gsm8k_split(self, "test", self.test_size)
        notices = repetition_notices(train, test, remedy=_REMEDY) if self.path is not None else ()
        if self.shots:
            if len(train) <= self.shots:
                raise UserError(
                    f"task.shots={self.shots}: the train split has only {len(train)} rows; lower task.shots"
                )
            shots = tuple(f"{_cue(example)} {example.rationale}\n\n" for example in train[: self.shots])
            train, test = (
                tuple(_with_shots(example, shots) for example in side) for side in (train[self.shots :], test)
            )
        return ExampleTask(name=self.type, train=train, test=test, notices=notices)


def _cue(example: Example) -> str:
    return f"Question: {example.question}\nAnswer:"


def _with_shots(example: Example, shots: tuple[str, ...]) -> Example:
    return replace(example, question=_cue(example), rationale=f" {example.rationale}", shots=shots)


def gsm8k_gold(answer: str) -> str | None:
    """The number after the last `####`, without `$`, commas and a final dot; None if there is none, or several."""
    _, mark, tail = answer.rpartition("####")
    number, _, rest = tail.replace("$", "").strip().partition("\n")[0].partition(" ")
    gold = normalize_gold(number) if mark else ""
    return gold if is_number(gold) and not _SECOND_NUMBER.search(rest) else None


def _gsm8k_split(config: GSM8KConfig, split: str, size: int | None) -> tuple[Example, ...]:
    examples = tuple(
        _gsm8k_example(row, f"{split}/{index}") for index, row in enumerate(islice(_gsm8k_rows(config, split), size))
    )
    if not examples:
        raise UserError(f"task.path={config.path}: the {split} split has no rows; fetch the files again")
    if size is not None and len(examples) < size:
        raise UserError(f"task.{split}_size={size}: the {split} split has only {len(examples)} rows; use null for all")
    return examples


def _gsm8k_rows(config: GSM8KConfig, split: str) -> Iterable[Row]:
    if config.path is None:
        return read_hub(GSM8K_HUB_NAME, config="main", split=split, path_option=_LOCAL_FILES)
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
        raise UserError(
            f"{row.where}: the answer has no number after `####`, or several; end it with a line such as `#### 18`"
        )
    return Example(id=id, question=str(question).strip(), gold=gold, rationale=str(answer), columns=row.values)


class MATHConfig(SeededConfig, SizesConfig):
    """MATH: `EleutherAI/hendrycks_math` from the Hub, or local files in its layout or the original one."""

    type: Literal["math"] = "math"
    path: str | None = None
    """A directory with train.jsonl and test.jsonl (columns problem, level, type, solution) or with the original tree
    `train/algebra/1.json`; null: load from the Hub."""
    split: Literal["official", "math500"] = "official"
    """official: 7,500 problems train, 5,000 test. math500: the 500 of MATH-500 test, the other 12,000 train."""
    math500_path: str | None = None
    """With split=math500: a local file of the 500; null: `math500.jsonl` in `path`, or the Hub if `path` is null."""
    levels: tuple[Annotated[int, Field(ge=1, le=5)], ...] = ()
    """Only problems of these levels, 1 to 5; empty: all, including the two without a level."""
    subjects: tuple[str, ...] = ()
    """Only these subjects ("Number Theory" or number_theory); empty: all seven."""

    def load(self) -> ExampleTask:
        """Read train and test, each in a seeded order.

        With `split=math500`, all 12,500 problems but the 500 train; spaces do not matter in this comparison. Rows
        without an answer (two in the published training set) are left out and counted; UserError if there are more than
        a few.
        """
        subjects = known_slugs(self.subjects, SUBJECTS, option="task.subjects")
        train, unanswered = _answered(_math_rows(self, "train"))
        test, more = _answered(_math_rows(self, "test"))
        unanswered += more
        if len(unanswered) > MAX_UNANSWERED * (len(train) + len(test) + len(unanswered)):
            raise UserError(
                f"{unanswered[0]}: {_NO_ANSWER}, as in {len(unanswered)} rows in all; repair or remove them"
            )
        if self.split == "math500":
            math500, _ = _answered((f"math500/{index}", row) for index, row in enumerate(_math500_rows(self)))
            test_keys = {_without_spaces(example.question) for example in math500}
            train = [example for example in train + test if _without_spaces(example.question) not in test_keys]
            test = math500
        train, test = ([e for e in side if _is_selected(e, self, subjects)] for side in (train, test))
        notices = repetition_notices(train, test, remedy=_REMEDY) if self.path is not None else ()
        if unanswered:
            notices = (f"{len(unanswered)} rows without an answer are left out: {', '.join(unanswered[:3])}", *notices)
        return ExampleTask(
            name="math" if self.split == "official" else self.split,
            train=shuffled(train, self.train_size, seed=self.seed, option="task.train_size"),
            test=shuffled(test, self.test_size, seed=self.seed, option="task.test_size"),
            notices=notices,
        )


def _math_rows(config: MATHConfig, split: str) -> Iterator[tuple[str, Row]]:
    """The rows of a published split, each with its id."""
    if config.path is None:
        for subject in SUBJECTS:
            rows = read_hub(MATH_HUB_NAME, config=slug(subject), split=split, path_option=_LOCAL_FILES)
            for index, row in enumerate(rows):
                yield f"{split}/{slug(subject)}/{index}", row
        return
    folder = Path(config.path).expanduser() / split
    if not folder.is_dir():
        for index, row in enumerate(read_split(config.path, split, option="task.path")):
            yield f"{split}/{index}", row
        return
    empty = True
    for row in read_objects(str(folder), option="task.path"):
        empty = False
        yield f"{split}/{Path(row.where).relative_to(folder).with_suffix('').as_posix()}", row
    if empty:
        raise UserError(f"task.path={config.path}: no .json files in {split}/; unpack the original archive there")


def _math500_rows(config: MATHConfig) -> Iterator[Row]:
    if config.math500_path is not None:
        return read_file(config.math500_path, option="task.math500_path")
    if config.path is not None:
        return read_split(config.path, "math500", option="task.path")
    return read_hub(MATH500_HUB_NAME, config=None, split="test", path_option="task.math500_path")


def _answered(rows: Iterable[tuple[str, Row]]) -> tuple[list[Example], list[str]]:
    """The examples, and the positions of the rows without an answer."""
    examples, unanswered = list[Example](), list[str]()
    for id, row in rows:
        example = _math_example(row, id=id)
        if example is None:
            unanswered.append(row.where)
        else:
            examples.append(example)
    return examples, unanswered


def _math_example(row: Row, *, id: str) -> Example | None:
    """The example of a row; None if its solution has no boxed answer."""
    problem, solution = (text_of(row, column, option="MATH") for column in ("problem", "solution"))
    # MATH-500 has columns `answer`, and `subject` instead of `type`.
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


def _is_selected(example: Example, config: MATHConfig, subjects: frozenset[str]) -> bool:
    level, subject = example.subsets["level"], slug(example.subsets["subject"])
    return (not config.levels or level in map(str, config.levels)) and (not subjects or subject in subjects)


def _without_spaces(problem: str) -> str:
    return "".join(problem.split())


def boxed_answer(solution: str) -> str | None:
    r"""The last `\boxed{}` that is not blank, or the text after a bare `\boxed 5` in its formula.

    This is the content together with signs in front that change it (`-5` for `-\boxed{5}`). Boxes joined by a comma,
    `and` or `or` stay boxes, `\boxed{2}, \boxed{3}`: the grader reads them by its rule for answers. If nothing is
    boxed, the content of `\fbox{}`; None if there is no frame either. Takes time linear in the text.
    """
    boxes = [box for box in find_boxes(solution) if not box.escaped_twice]
    for command in ("boxed", "fbox"):
        framed = [box for box in boxes if box.command == command]
        while framed and not (content := _content(solution, framed[-1])):
            framed.pop()
        if framed:
            return content if framed[-1].end is None else _read_alike(solution, framed)
    return None


def _read_alike(solution: str, boxes: list[Box]) -> str:
    answers = joined_answers(solution, boxes)
    if len(set(answers)) == 1:
        return answers[0].text.strip()
    return ", ".join(rf"{answer.name}\boxed{{{answer.text.strip()}}}" for answer in answers)


def _content(solution: str, box: Box) -> str:
    if box.end is not None:
        return solution[box.start : box.end].strip()
    start = box.start + len("\\") + len(box.command)
    return _FORMULA_END.split(solution[start : start + _LONGEST_BARE])[0].rstrip(" .,").strip()
