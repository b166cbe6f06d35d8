"""Configuration of tasks and of how their questions are worded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from flatpeak.tasks.config_benchmarks import ChoicesConfig, MATHConfig, MMLUConfig, MMLUProConfig
from flatpeak.tasks.config_science import (
    CamelAIConfig,
    CountdownTaskConfig,
    DrSCIConfig,
    PreferencesConfig,
    ReasoningGymConfig,
)
from flatpeak.tasks.config_sources import OverlapConfig, SourceConfig
from flatpeak.utils.schema import StrictConfig


class ArithmeticConfig(StrictConfig):
    """Integer arithmetic, generated: seeded, with train and held-out problems disjoint."""

    type: Literal["arithmetic"] = "arithmetic"
    min_value: int = 0
    max_value: int = 99
    operators: tuple[Literal["+", "-", "*"], ...] = ("+",)
    train_size: Annotated[int, Field(ge=1)] = 8000
    test_size: Annotated[int, Field(ge=1)] = 500
    question: str = "{a}{op}{b}="
    """Python format string with fields a, op, b."""
    rationale: str = "{answer}"
    """The SFT target: fields a, op, b, answer; "{a}{op}{b}={answer}\\n#### {answer}" has GSM8K's layout."""
    seed: int = 0


class GSM8KConfig(StrictConfig):
    """GSM8K: `openai/gsm8k` from the Hub, or `train.jsonl` and `test.jsonl` in a local directory."""

    type: Literal["gsm8k"] = "gsm8k"
    path: str | None = None
    """A directory with the two files in the published layout; null loads from the Hub."""
    train_size: int | None = None
    """The first so many training rows; null is all."""
    test_size: int | None = None
    shots: Annotated[int, Field(ge=0)] = 0
    """Worked examples before each question, the first training rows, worded `Question: ...` and `Answer: ...`. Those
    rows are not trained on."""


class RowsConfig(StrictConfig):
    """Any data set with a question and an answer column, by column mapping."""

    type: Literal["rows"] = "rows"
    name: str = "rows"
    train: tuple[SourceConfig, ...] = Field(min_length=1)
    """One or more sources, concatenated."""
    test: tuple[SourceConfig, ...] = ()
    """Empty: `test_fraction` of the training rows is held out, by a seeded hash of the question's cluster."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    deduplicate: bool = False
    """Drop rows whose normalized question (case, punctuation, numbers kept) already occurred."""
    near_duplicates: Annotated[float, Field(gt=0, le=1)] | None = None
    """With a split by fraction: questions this similar (Jaccard of word sets, numbers masked) stay on one side."""
    overlap: OverlapConfig | None = None
    """Drop training rows that ask what an evaluation set asks."""
    integers_only: bool = False
    """Keep only rows whose gold answer is an integer."""
    equations: bool = False
    """Give training rows the first equation over the question's numbers that fits the answer as their rationale."""
    variants: Annotated[int, Field(ge=0)] = 0
    """Copies of each training row that has such an equation, with other numbers and the answer recomputed."""
    seed: int = 0


class CustomTaskConfig(StrictConfig):
    """A task of your own: `factory` names a function (module:name or file.py:name) that returns an object with
    `name`, `train` and `test`."""

    type: Literal["custom"] = "custom"
    factory: str
    arguments: dict[str, Any] = Field(default_factory=dict)


TaskConfig = Annotated[
    ArithmeticConfig
    | GSM8KConfig
    | MATHConfig
    | MMLUConfig
    | MMLUProConfig
    | ChoicesConfig
    | RowsConfig
    | CamelAIConfig
    | DrSCIConfig
    | CountdownTaskConfig
    | ReasoningGymConfig
    | PreferencesConfig
    | CustomTaskConfig,
    Field(discriminator="type"),
]


class PromptConfig(StrictConfig):
    """How a question becomes the text the model continues."""

    template: str = "plain"
    """plain, r1_zero, question_only, chat, or the path of a text file with {question} in it."""
    system: str | None = None
    """System message of the chat template."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the tokenizer's chat template (enable_thinking: false, say)."""
    max_tokens: int | None = None
    """Longest prompt; null: what the model's context leaves beside rollout.max_new_tokens."""
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """What happens to a longer one. truncate_left shortens the question and keeps the template around it whole."""
