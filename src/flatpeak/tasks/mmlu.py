"""MMLU and MMLU-Pro: multiple-choice questions by subject, with worked examples in the published wording.

MMLU is Hendrycks et al. 2021, arXiv 2009.03300: 57 subjects, four options, five worked examples. MMLU-Pro is Wang et
al. 2024, arXiv 2406.01574: 14 categories, up to ten options, five worked examples with their reasoning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase as LETTERS
from typing import Annotated, Final, Literal

from pydantic import Field

from flatpeak.errors import UserError
from flatpeak.tasks.data_files import (
    ExampleTask,
    Row,
    SeededConfig,
    SizesConfig,
    cell_of,
    directory,
    known_slugs,
    read_csv_cells,
    read_hub,
    read_split,
    shuffled,
    slug,
)
from flatpeak.tasks.multiple_choice import (
    Choices,
    check_choices,
    raw_text_of,
    repeated_right_options,
    text_of,
    texts_of,
)
from flatpeak.types import Example

MMLU_HUB_NAME: Final = "cais/mmlu"
MMLU_PRO_HUB_NAME: Final = "TIGER-Lab/MMLU-Pro"
_MMLU_FILES: Final = "task.path, the original archive's directory with dev, val and test"
_PRO_FILES: Final = "task.path, a directory with validation.jsonl and test.jsonl (or .parquet)"
_FOLDERS: Final = {"dev": "dev", "validation": "val", "test": "test", "auxiliary_train": "auxiliary_train"}
"""The folder of each split in the original archive."""
_CSV_COLUMNS: Final = ("question", "A", "B", "C", "D", "answer")
_SUBJECTS: Final = {
    "STEM": "abstract_algebra astronomy college_biology college_chemistry college_computer_science college_mathematics "
    "college_physics computer_security conceptual_physics electrical_engineering elementary_mathematics "
    "high_school_biology high_school_chemistry high_school_computer_science high_school_mathematics "
    "high_school_physics high_school_statistics machine_learning",
    "humanities": "formal_logic high_school_european_history high_school_us_history high_school_world_history "
    "international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy prehistory "
    "professional_law world_religions",
    "social sciences": "econometrics high_school_geography high_school_government_and_politics "
    "high_school_macroeconomics high_school_microeconomics high_school_psychology human_sexuality "
    "professional_psychology public_relations security_studies sociology us_foreign_policy",
    "other": "anatomy business_ethics clinical_knowledge college_medicine global_facts human_aging management "
    "marketing medical_genetics miscellaneous nutrition professional_accounting professional_medicine virology",
}
CATEGORIES: Final = {subject: category for category, subjects in _SUBJECTS.items() for subject in subjects.split()}
"""The category of each MMLU subject, as published (the repository hendrycks/test)."""
PRO_CATEGORIES: Final = (
    "biology",
    "business",
    "chemistry",
    "computer science",
    "economics",
    "engineering",
    "health",
    "history",
    "law",
    "math",
    "other",
    "philosophy",
    "physics",
    "psychology",
)
"""The categories of MMLU-Pro, as published."""
_PRO_PREAMBLE: Final = (
    "The following are multiple choice questions (with answers) about {category}. Think step by step and then finish "
    'your answer with "the answer is (X)" where X is the correct letter choice.\n\n\n\n'
)
"""The published file `initial_prompt.txt`, which ends in three line breaks, and one more that its script adds."""
_REASONING_START: Final = "Let's think step by step."
_CUE: Final = f"Answer: {_REASONING_START}"
_WORKED_START: Final = f"A: {_REASONING_START}"
_NOT_AN_OPTION: Final = "N/A"

Wording = Literal["official", "plain"]


class LetteredConfig(SeededConfig, SizesConfig):
    """Published questions with lettered options."""

    wording: Wording = "official"
    """official: the published preamble, worked examples and cue, which the model continues. plain: only the question
    and its lettered options, for templates that say how to answer."""
    shots: Annotated[int, Field(ge=0, le=5)] = 5
    """With wording=official: the number of worked examples, from the published split for them, of the same subject or
    category."""


class MMLUConfig(LetteredConfig):
    """MMLU: `cais/mmlu` from the Hub, or the original tree of CSV files without headers."""

    type: Literal["mmlu"] = "mmlu"
    path: str | None = None
    """A directory with dev/, val/ and test/ (and auxiliary_train/) that hold SUBJECT_test.csv and so on; null: load
    from the Hub."""
    subjects: tuple[str, ...] = ()
    """Only these of the 57 subjects (high_school_physics or "high school physics"); empty: all. Rows of auxiliary_train
    have no subject and all stay."""
    train: Literal["validation", "auxiliary_train"] = "validation"
    """The split to train on: validation, or auxiliary_train, whose rows have no subject and no shots."""

    def load(self) -> ExampleTask:
        """Read train (validation, or the auxiliary rows) and test, each in a seeded order."""
        subjects = known_slugs(self.subjects, CATEGORIES, option="task.subjects")
        shots = _shots(self, subjects) if self.wording == "official" and self.shots else {}
        # The auxiliary rows have no subject, so filters do not apply to them.
        train_subjects = frozenset[str]() if self.train == "auxiliary_train" else subjects
        train = [_mmlu_example(question, self, shots) for question in _mmlu_questions(self, self.train, train_subjects)]
        test = [_mmlu_example(question, self, shots) for question in _mmlu_questions(self, "test", subjects)]
        return ExampleTask(
            name=self.type,
            train=shuffled(train, self.train_size, seed=self.seed, option="task.train_size"),
            test=shuffled(test, self.test_size, seed=self.seed, option="task.test_size"),
            notices=repeated_right_options(train + test),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _MMLUQuestion:
    """A row of MMLU with its subject and options."""

    row: Row
    id: str
    question: str
    choices: Choices
    subject: str

    @property
    def official_text(self) -> str:
        """The question in the wording of the published script (hendrycks/test, `evaluate.py`), which strips nothing."""
        return f"{self.question}\n{self.choices.lettered()}\nAnswer:"


def _mmlu_questions(config: MMLUConfig, split: str, subjects: frozenset[str]) -> Iterator[_MMLUQuestion]:
    counts: dict[str, int] = defaultdict(int)
    rows = _hub_rows(split) if config.path is None else _archive_rows(config.path, split)
    for row, subject in rows:
        if not subjects or subject in subjects:
            yield _MMLUQuestion(
                row=row,
                id=f"{split}/{subject or 'rows'}/{counts[subject]}",
                question=raw_text_of(row, "question", option="MMLU"),
                choices=_mmlu_choices(row),
                subject=subject,
            )
            counts[subject] += 1


def _archive_rows(path: str, split: str) -> Iterator[tuple[Row, str]]:
    root = directory(path, option="task.path")
    files = sorted((root / _FOLDERS[split]).glob("*.csv"))
    if not files:
        candidates = (root.resolve().parent, *sorted(root.iterdir()))
        suggestions = [str(folder) for folder in candidates if next((folder / _FOLDERS[split]).glob("*.csv"), None)]
        fix = (
            f"did you mean task.path={suggestions[0]}?"
            if suggestions
            else "put that folder of the original archive there"
        )
        raise UserError(f"task.path={path}: no .csv files in {_FOLDERS[split]}/; {fix}")
    for file in files:
        subject = "" if split == "auxiliary_train" else slug(file.stem.removesuffix(f"_{_FOLDERS[split]}"))
        for row in read_csv_cells(file, columns=_CSV_COLUMNS):
            yield row, subject


def _hub_rows(split: str) -> Iterator[tuple[Row, str]]:
    for row in read_hub(MMLU_HUB_NAME, config="all", split=split, path_option=_MMLU_FILES):
        yield row, slug(str(row.values.get("subject") or ""))


def _mmlu_choices(row: Row) -> Choices:
    """The options from the columns A to D and a letter, or from the Hub's list `choices` and an index."""
    answer = cell_of(row, "answer", option="MMLU")
    if "A" in row.values:
        options = [str(row.values[letter]) for letter in LETTERS[:4]]
        answer = str(answer).strip()
        right = LETTERS.index(answer) if len(answer) == 1 and answer in LETTERS else -1
    else:
        options, right = texts_of(row, "choices", option="MMLU"), answer
    if len(options) != 4 or not isinstance(right, int) or not 0 <= right < 4:
        raise UserError(f"{row.where}: MMLU rows have four options and one of A to D, not {answer!r}; repair the row")
    return check_choices(options, right, where=row.where)


def _shots(config: MMLUConfig, subjects: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    by_subject: dict[str, list[str]] = defaultdict(list)
    for question in _mmlu_questions(config, "dev", subjects):
        if len(by_subject[question.subject]) < config.shots:
            by_subject[question.subject].append(f"{question.official_text} {question.choices.letter}\n\n")
    return {subject: tuple(shots) for subject, shots in by_subject.items()}


def _mmlu_example(question: _MMLUQuestion, config: MMLUConfig, shots: Mapping[str, Sequence[str]]) -> Example:
    official = config.wording == "official"
    own_shots = tuple(shots.get(question.subject, ()))
    if official and question.subject and len(own_shots) < config.shots:
        raise UserError(
            f"task.shots={config.shots}: the dev split has {len(own_shots)} rows of {question.subject}; "
            "lower task.shots"
        )
    # The published script puts a space before each word of the subject, the first one after `about ` included.
    about = f" about  {question.subject.replace('_', ' ')}" if question.subject else ""
    subsets = {"subject": question.subject} if question.subject else {}
    if question.subject in CATEGORIES:
        subsets["category"] = CATEGORIES[question.subject]
    letter = question.choices.letter
    return Example(
        id=question.id,
        question=question.official_text if official else question.choices.after(question.question),
        gold=letter,
        rationale=f" {letter}" if official else f"The answer is ({letter}).",
        columns={**question.row.values, "subject": question.subject, "options": list(question.choices.options)},
        subsets=subsets,
        preamble=f"The following are multiple choice questions (with answers){about}.\n\n" if official else "",
        shots=own_shots,
    )


class MMLUProConfig(LetteredConfig):
    """MMLU-Pro: `TIGER-Lab/MMLU-Pro` from the Hub, or its `validation` and `test` files in a local directory."""

    type: Literal["mmlu_pro"] = "mmlu_pro"
    path: str | None = None
    """A directory with validation.jsonl and test.jsonl, or the Hub's Parquet files; null: load from the Hub."""
    categories: tuple[str, ...] = ()
    """Only these of the 14 categories; empty: all."""

    def load(self) -> ExampleTask:
        """Read train (the 70 of validation) and test, each in a seeded order.

        A question is never one of its own worked examples.
        """
        categories = known_slugs(self.categories, PRO_CATEGORIES, option="task.categories")
        validation, test = (_pro_questions(self, split, categories) for split in ("validation", "test"))
        by_category: dict[str, list[_ProQuestion]] = defaultdict(list)
        for question in validation:
            by_category[question.category].append(question)
        train_examples, test_examples = (
            [_pro_example(question, self, by_category) for question in side] for side in (validation, test)
        )
        return ExampleTask(
            name=self.type,
            train=shuffled(train_examples, self.train_size, seed=self.seed, option="task.train_size"),
            test=shuffled(test_examples, self.test_size, seed=self.seed, option="task.test_size"),
            notices=repeated_right_options(train_examples + test_examples),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _ProQuestion:
    """A row of MMLU-Pro with its category and options."""

    row: Row
    id: str
    question: str
    choices: Choices
    category: str
    worked: str
    """The worked answer `A: Let's think step by step. ...`, unprocessed; blank in the test split."""

    @property
    def official_text(self) -> str:
        """The question and its options in the published wording, without the cue for the answer."""
        return f"Question:\n{self.question}\nOptions:\n{self.choices.lettered()}\n"

    @property
    def reasoning(self) -> str:
        """The worked answer without its label; empty in the test split."""
        return self.worked.strip().removeprefix("A:").strip()

    @property
    def shot(self) -> str:
        """The question with its worked answer, as an example before other questions."""
        return f"{self.official_text}{self.worked.replace(_WORKED_START, _CUE)}\n\n"


def _pro_questions(config: MMLUProConfig, split: str, categories: frozenset[str]) -> list[_ProQuestion]:
    if config.path is None:
        rows = read_hub(MMLU_PRO_HUB_NAME, config=None, split=split, path_option=_PRO_FILES)
    else:
        rows = read_split(config.path, split, option="task.path")
    questions = (_pro_question(row, split) for row in rows)
    return [question for question in questions if not categories or slug(question.category) in categories]


def _pro_question(row: Row, split: str) -> _ProQuestion:
    return _ProQuestion(
        row=row,
        id=f"{split}/" + text_of(row, "question_id", option="MMLU-Pro"),
        question=raw_text_of(row, "question", option="MMLU-Pro"),
        choices=_pro_choices(row),
        category=text_of(row, "category", option="MMLU-Pro"),
        worked=str(row.values.get("cot_content") or ""),
    )


def _pro_choices(row: Row) -> Choices:
    """The options without `N/A`, with the index of the right one adjusted."""
    options = texts_of(row, "options", option="MMLU-Pro")
    letter = text_of(row, "answer", option="MMLU-Pro")
    right = LETTERS.index(letter) if len(letter) == 1 and letter in LETTERS else -1
    if not 0 <= right < len(options) or row.values.get("answer_index", right) != right:
        raise UserError(
            f"{row.where}: answer {letter!r} (index {row.values.get('answer_index')}) of {len(options)} options; "
            "repair the row"
        )
    kept = [index for index, option in enumerate(options) if option != _NOT_AN_OPTION]
    if right not in kept:
        raise UserError(f"{row.where}: the right option is {_NOT_AN_OPTION}; repair or remove the row")
    return check_choices([options[index] for index in kept], kept.index(right), where=row.where)


def _pro_example(
    question: _ProQuestion, config: MMLUProConfig, by_category: Mapping[str, Sequence[_ProQuestion]]
) -> Example:
    official = config.wording == "official"
    others = [other for other in by_category[question.category] if other.id != question.id and other.reasoning]
    shots = tuple(other.shot for other in others[: config.shots]) if official else ()
    preamble = _PRO_PREAMBLE.replace("{category}", question.category) if official else ""
    reasoning = question.reasoning
    if official:
        # The prompt already ends with these words.
        reasoning = f" {reasoning.removeprefix(_REASONING_START).strip()}" if reasoning else ""
    return Example(
        id=question.id,
        question=f"{question.official_text}{_CUE}" if official else question.choices.after(question.question),
        gold=question.choices.letter,
        rationale=reasoning or None,
        columns={**question.row.values, "options": list(question.choices.options)},
        subsets={"category": question.category},
        preamble=preamble,
        shots=shots,
    )
