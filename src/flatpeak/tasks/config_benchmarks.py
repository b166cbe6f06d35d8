"""Configuration of MATH, MMLU, MMLU-Pro and multiple choice in general."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flatpeak.utils.schema import StrictConfig

Wording = Literal["official", "plain"]


class MATHConfig(StrictConfig):
    """MATH: `EleutherAI/hendrycks_math` from the Hub, or local files in its layout or in that of the original."""

    type: Literal["math"] = "math"
    path: str | None = None
    """A directory with train.jsonl and test.jsonl (columns problem, level, type, solution) or with the original tree
    `train/algebra/1.json`; null loads from the Hub."""
    split: Literal["official", "math500"] = "official"
    """official: 7,500 problems train, 5,000 test. math500: the 500 of MATH-500 test, the other 12,000 train."""
    math500_path: str | None = None
    """With split=math500: a local file of the 500; null is `math500.jsonl` in `path`, or the Hub where that is null."""
    levels: tuple[Annotated[int, Field(ge=1, le=5)], ...] = ()
    """Only problems of these levels, 1 to 5; empty is all, with the two that have no level."""
    subjects: tuple[str, ...] = ()
    """Only these subjects ("Number Theory" or number_theory); empty is all seven."""
    train_size: Annotated[int, Field(ge=1)] | None = None
    """The first so many; null is all."""
    test_size: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0
    """Of the order of the rows, which stand sorted by subject in the files."""


class MMLUConfig(StrictConfig):
    """MMLU: `cais/mmlu` from the Hub, or the original tree of CSV files without headers."""

    type: Literal["mmlu"] = "mmlu"
    path: str | None = None
    """A directory with dev/, val/ and test/ (and auxiliary_train/) that hold SUBJECT_test.csv and so on; null loads
    from the Hub."""
    wording: Wording = "official"
    """official: preamble, shots, and `Answer:` for the model to go on from. plain: the question and its lettered
    options alone, for templates that say how to answer."""
    shots: Annotated[int, Field(ge=0, le=5)] = 5
    """With wording=official: worked examples from the dev split of the same subject."""
    subjects: tuple[str, ...] = ()
    """Only these of the 57 (high_school_physics or "high school physics"); empty is all."""
    train: Literal["validation", "auxiliary_train"] = "validation"
    """What is trained on. The auxiliary rows have no subject and no shots."""
    train_size: Annotated[int, Field(ge=1)] | None = None
    """The first so many; null is all."""
    test_size: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0
    """Of the order of the rows, which stand sorted by subject in the files."""


class MMLUProConfig(StrictConfig):
    """MMLU-Pro: `TIGER-Lab/MMLU-Pro` from the Hub, or its `validation` and `test` files in a local directory."""

    type: Literal["mmlu_pro"] = "mmlu_pro"
    path: str | None = None
    """A directory with validation.jsonl and test.jsonl, or the Hub's Parquet files; null loads from the Hub."""
    wording: Wording = "official"
    """official: preamble, worked examples, and `Answer: Let's think step by step.` for the model to go on from.
    plain: the question and its lettered options alone."""
    shots: Annotated[int, Field(ge=0, le=5)] = 5
    """With wording=official: worked examples from the validation split of the same category."""
    categories: tuple[str, ...] = ()
    """Only these of the 14; empty is all."""
    train_size: Annotated[int, Field(ge=1)] | None = None
    """The first so many; null is all."""
    test_size: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0
    """Of the order of the rows, which stand sorted by category in the files."""


class ChoiceSourceConfig(StrictConfig):
    """Where multiple-choice rows come from (a file or a Hub data set), and which of their columns say what."""

    path: str | None = None
    hub: str | None = None
    hub_config: str | None = None
    split: str = "train"
    """Hub split; ignored for files."""
    question: str = "question"
    """A column name."""
    options: str | tuple[str, ...] | None = None
    """A column with a list of texts, or one column per option; not with `incorrect`."""
    correct: str = "answer"
    """A column with the right option: its letter, its index from 0, or its text. With `incorrect`: its text."""
    incorrect: tuple[str, ...] = ()
    """Columns with the wrong options, where the right one stands in a column of its own."""
    id: str | None = None
    """A column with unique ids; null numbers the rows."""
    rationale: str | None = None
    """A column with a worked answer for SFT; null: none."""
    subsets: dict[str, str] = Field(default_factory=dict)
    """What evaluation makes tables by: name of the table -> column."""


class ChoicesConfig(StrictConfig):
    """Any multiple-choice data set, by column mapping."""

    type: Literal["choices"] = "choices"
    name: str = "choices"
    train: tuple[ChoiceSourceConfig, ...] = ()
    """One or more sources, concatenated. Rows whose question is in the test sources are left out."""
    test: tuple[ChoiceSourceConfig, ...] = ()
    """Empty: `test_fraction` of the training rows is held out, by a seeded hash of the question."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    shuffle: bool = True
    """Shuffle each row's options, by `seed` and the row's id."""
    seed: int = 0
