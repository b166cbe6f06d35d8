"""MMLU-Pro (Wang et al. 2024, arXiv 2406.01574): up to ten options, answered after reasoning.

Prompts are those of the official `evaluate_from_local.py` (TIGER-AI-Lab/MMLU-Pro, commit f418b11), byte for byte: its
strings, its five examples of the same category in their order, questions and worked answers with their own spaces and
line breaks. Its randomness is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase as LETTERS

from flatpeak.errors import UserError
from flatpeak.tasks.choices import Choices, cell_of, check_choices, raw_text_of, text_of
from flatpeak.tasks.config_benchmarks import MMLUProConfig
from flatpeak.tasks.selection import chosen, sized, slug
from flatpeak.tasks.sources import Row, read_hub, read_split
from flatpeak.types import Example

HUB_NAME = "TIGER-Lab/MMLU-Pro"
_LOCAL = "task.path, a directory with validation.jsonl and test.jsonl (or .parquet)"
CATEGORIES = (
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
class _Item:
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
    categories = chosen(config.categories, CATEGORIES, option="task.categories")
    validation, test = (_items(config, split, categories) for split in ("validation", "test"))
    by_category: dict[str, list[_Item]] = defaultdict(list)
    for item in validation:
        by_category[item.category].append(item)
    return (
        sized(
            [_example(item, config, by_category) for item in validation],
            config.train_size,
            seed=config.seed,
            option="task.train_size",
        ),
        sized(
            [_example(item, config, by_category) for item in test],
            config.test_size,
            seed=config.seed,
            option="task.test_size",
        ),
    )


def _items(config: MMLUProConfig, split: str, categories: frozenset[str]) -> list[_Item]:
    if config.path is None:
        rows = read_hub(HUB_NAME, config=None, split=split, path_option=_LOCAL)
    else:
        rows = read_split(config.path, split, option="task.path")
    items = (_item(row, f"{split}/") for row in rows)
    return [item for item in items if not categories or slug(item.category) in categories]


def _item(row: Row, prefix: str) -> _Item:
    return _Item(
        row=row,
        id=prefix + text_of(row, "question_id", option="MMLU-Pro"),
        question=raw_text_of(row, "question", option="MMLU-Pro"),
        choices=_choices(row),
        category=text_of(row, "category", option="MMLU-Pro"),
        worked=str(row.values.get("cot_content") or ""),
    )


def _choices(row: Row) -> Choices:
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


def _example(item: _Item, config: MMLUProConfig, by_category: Mapping[str, Sequence[_Item]]) -> Example:
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
