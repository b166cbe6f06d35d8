"""MMLU (Hendrycks et al. 2021, arXiv 2009.03300): 57 subjects, four options, five worked examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase as LETTERS

from flatpeak.errors import UserError
from flatpeak.tasks.config import MMLUConfig, MMLUProConfig
from flatpeak.tasks.data_files import Row, chosen, directory, read_csv_cells, read_hub, read_split, sized, slug
from flatpeak.tasks.multiple_choice import Choices, cell_of, check_choices, raw_text_of, text_of
from flatpeak.types import Example

HUB_NAME, HUB_CONFIG = "cais/mmlu", "all"
_LOCAL = "task.path, the original archive's directory with dev, val and test"
FOLDERS = {"dev": "dev", "validation": "val", "test": "test", "auxiliary_train": "auxiliary_train"}
"""The splits as the Hub and as the original archive call them."""
COLUMNS = ("question", "A", "B", "C", "D", "answer")
_SUBJECTS = {
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
CATEGORIES = {subject: category for category, subjects in _SUBJECTS.items() for subject in subjects.split()}
"""The published grouping of the subjects (the repository hendrycks/test)."""


def mmlu_examples(config: MMLUConfig) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Train (validation, or the auxiliary rows) and test, each in a seeded order."""
    subjects = chosen(config.subjects, CATEGORIES, option="task.subjects")
    shots = _shots(config, subjects) if config.wording == "official" and config.shots else {}
    # The auxiliary rows belong to no subject, so no filter can be meant for them.
    of_train = frozenset[str]() if config.train == "auxiliary_train" else subjects
    train = [_example(item, config, shots) for item in _items(config, config.train, of_train)]
    test = [_example(item, config, shots) for item in _items(config, "test", subjects)]
    return (
        sized(train, config.train_size, seed=config.seed, option="task.train_size"),
        sized(test, config.test_size, seed=config.seed, option="task.test_size"),
    )


class _Item:
    """A row, read."""

    def __init__(self, row: Row, *, split: str, subject: str, number: int) -> None:
        self.row = row
        self.subject = subject
        self.id = f"{split}/{subject or 'rows'}/{number}"
        self.question = raw_text_of(row, "question", option="MMLU")
        self.choices = _choices(row)

    def worded(self) -> str:
        """As the published script (hendrycks/test, `evaluate.py`) has it; nothing is stripped there."""
        return f"{self.question}\n{self.choices.lettered()}\nAnswer:"


def _items(config: MMLUConfig, split: str, subjects: frozenset[str]) -> Iterator[_Item]:
    numbers: dict[str, int] = defaultdict(int)
    for row, subject in _local(config.path, split) if config.path is not None else _hub(split):
        if not subjects or subject in subjects:
            yield _Item(row, split=split, subject=subject, number=numbers[subject])
            numbers[subject] += 1


def _local(path: str, split: str) -> Iterator[tuple[Row, str]]:
    place = directory(path, option="task.path")
    files = sorted((place / FOLDERS[split]).glob("*.csv"))
    if not files:
        around = (place.resolve().parent, *sorted(place.iterdir()))
        near = [str(one) for one in around if next((one / FOLDERS[split]).glob("*.csv"), None)]
        fix = f"did you mean task.path={near[0]}?" if near else "put that folder of the original archive there"
        raise UserError(f"task.path={path}: no .csv files in {FOLDERS[split]}/; {fix}")
    for file in files:
        subject = "" if split == "auxiliary_train" else slug(file.stem.removesuffix(f"_{FOLDERS[split]}"))
        for row in read_csv_cells(file, columns=COLUMNS):
            yield row, subject


def _hub(split: str) -> Iterator[tuple[Row, str]]:
    for row in read_hub(HUB_NAME, config=HUB_CONFIG, split=split, path_option=_LOCAL):
        yield row, slug(str(row.values.get("subject") or ""))


def _choices(row: Row) -> Choices:
    """From the columns A to D and a letter, or from the Hub's list `choices` and an index."""
    answer = cell_of(row, "answer", option="MMLU")
    if "A" in row.values:
        options = [str(row.values[letter]) for letter in LETTERS[:4]]
        answer = str(answer).strip()
        right = LETTERS.index(answer) if len(answer) == 1 and answer in LETTERS else -1
    else:
        options, right = [str(option) for option in cell_of(row, "choices", option="MMLU")], answer
    if len(options) != 4 or not isinstance(right, int) or not 0 <= right < 4:
        raise UserError(f"{row.where}: MMLU rows have four options and one of A to D, not {answer!r}; repair the row")
    return check_choices(options, right, where=row.where)


def _shots(config: MMLUConfig, subjects: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    by_subject: dict[str, list[str]] = defaultdict(list)
    for item in _items(config, "dev", subjects):
        if len(by_subject[item.subject]) < config.shots:
            by_subject[item.subject].append(f"{item.worded()} {item.choices.letter}\n\n")
    return {subject: tuple(shots) for subject, shots in by_subject.items()}


def _example(item: _Item, config: MMLUConfig, shots: Mapping[str, Sequence[str]]) -> Example:
    official = config.wording == "official"
    own_shots = tuple(shots.get(item.subject, ()))
    if official and item.subject and len(own_shots) < config.shots:
        raise UserError(
            f"task.shots={config.shots}: the dev split has {len(own_shots)} rows of {item.subject}; lower task.shots"
        )
    # The published script puts a space before each word of the subject, the first one after `about ` included.
    about = f" about  {item.subject.replace('_', ' ')}" if item.subject else ""
    subsets = {"subject": item.subject} if item.subject else {}
    if item.subject in CATEGORIES:
        subsets["category"] = CATEGORIES[item.subject]
    letter = item.choices.letter
    return Example(
        id=item.id,
        question=item.worded() if official else f"{item.question.strip()}\n\n{item.choices.lettered()}",
        gold=letter,
        rationale=f" {letter}" if official else f"The answer is ({letter}).",
        columns={**item.row.values, "subject": item.subject, "options": list(item.choices.options)},
        subsets=subsets,
        preamble=f"The following are multiple choice questions (with answers){about}.\n\n" if official else "",
        shots=own_shots,
    )


PRO_HUB_NAME = "TIGER-Lab/MMLU-Pro"
_PRO_FILES = "task.path, a directory with validation.jsonl and test.jsonl (or .parquet)"
PRO_CATEGORIES = (
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
_PREAMBLE = (
    "The following are multiple choice questions (with answers) about {category}. Think step by step and then finish "
    'your answer with "the answer is (X)" where X is the correct letter choice.\n\n\n\n'
)
"""The file `initial_prompt.txt`, which ends in three line breaks, and the one that the script adds."""
_BEGIN = "Let's think step by step."
_CUE = f"Answer: {_BEGIN}"
_WORKED = f"A: {_BEGIN}"
_NOT_AN_OPTION = "N/A"


@dataclass(frozen=True, kw_only=True, slots=True)
class _ProItem:
    row: Row
    id: str
    question: str
    choices: Choices
    category: str
    worked: str
    """`A: Let's think step by step. ...`, as it stands in the row; blank in the test split."""

    @property
    def asked(self) -> str:
        return f"Question:\n{self.question}\nOptions:\n{self.choices.lettered()}\n"

    @property
    def reasoning(self) -> str:
        """The worked answer alone; empty in the test split."""
        return self.worked.strip().removeprefix("A:").strip()

    @property
    def shot(self) -> str:
        return f"{self.asked}{self.worked.replace(_WORKED, _CUE)}\n\n"


def mmlu_pro_examples(config: MMLUProConfig) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Train (the 70 of validation) and test, each in a seeded order. No question is among its own worked examples."""
    categories = chosen(config.categories, PRO_CATEGORIES, option="task.categories")
    validation, test = (_pro_items(config, split, categories) for split in ("validation", "test"))
    by_category: dict[str, list[_ProItem]] = defaultdict(list)
    for item in validation:
        by_category[item.category].append(item)
    return (
        sized(
            [_pro_example(item, config, by_category) for item in validation],
            config.train_size,
            seed=config.seed,
            option="task.train_size",
        ),
        sized(
            [_pro_example(item, config, by_category) for item in test],
            config.test_size,
            seed=config.seed,
            option="task.test_size",
        ),
    )


def _pro_items(config: MMLUProConfig, split: str, categories: frozenset[str]) -> list[_ProItem]:
    if config.path is None:
        rows = read_hub(PRO_HUB_NAME, config=None, split=split, path_option=_PRO_FILES)
    else:
        rows = read_split(config.path, split, option="task.path")
    items = (_item(row, f"{split}/") for row in rows)
    return [item for item in items if not categories or slug(item.category) in categories]


def _item(row: Row, prefix: str) -> _ProItem:
    return _ProItem(
        row=row,
        id=prefix + text_of(row, "question_id", option="MMLU-Pro"),
        question=raw_text_of(row, "question", option="MMLU-Pro"),
        choices=_pro_choices(row),
        category=text_of(row, "category", option="MMLU-Pro"),
        worked=str(row.values.get("cot_content") or ""),
    )


def _pro_choices(row: Row) -> Choices:
    """The options without `N/A`; the right one is found again among those that stay."""
    options = [str(option) for option in cell_of(row, "options", option="MMLU-Pro")]
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


def _pro_example(item: _ProItem, config: MMLUProConfig, by_category: Mapping[str, Sequence[_ProItem]]) -> Example:
    official = config.wording == "official"
    others = [other for other in by_category[item.category] if other.id != item.id and other.reasoning]
    shots = tuple(other.shot for other in others[: config.shots]) if official else ()
    preamble = _PREAMBLE.replace("{category}", item.category) if official else ""
    reasoning = item.reasoning
    if official:
        # The prompt has said the first words already.
        reasoning = f" {reasoning.removeprefix(_BEGIN).strip()}" if reasoning else ""
    return Example(
        id=item.id,
        question=f"{item.asked}{_CUE}" if official else f"{item.question.strip()}\n\n{item.choices.lettered()}",
        gold=item.choices.letter,
        rationale=reasoning or None,
        columns={**item.row.values, "options": list(item.choices.options)},
        subsets={"category": item.category},
        preamble=preamble,
        shots=shots,
    )
