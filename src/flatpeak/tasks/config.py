"""Configuration of tasks and of how their questions are worded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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


class SourceConfig(StrictConfig):
    """Where rows come from: a file (JSONL, JSON, CSV by its ending) or a Hub data set. Exactly one of the two."""

    path: str | None = None
    hub: str | None = None
    hub_config: str | None = None
    split: str = "train"
    """Hub split; ignored for files."""
    question: str = "question"
    """A column name, or a format string over columns such as "{Body} {Question}"."""
    answer: str = "answer"
    """The column (or format string) of the gold answer."""
    answer_pattern: str | None = None
    """A regular expression whose first group (else whole match) is the gold answer in that column."""
    rationale: str | None = None
    """A column or format string for the SFT target (fields: columns, and `gold`); null: no rationale."""
    id: str | None = None
    """A column with unique ids; null numbers the rows."""


class OverlapConfig(StrictConfig):
    """Training rows that ask what an evaluation set asks are dropped; the rule is in tasks/decontamination.py."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """The evaluation set; only its `question` is read."""
    ngram: Annotated[int, Field(ge=8)] = 13
    """A row is dropped that shares so many consecutive words with a question of the evaluation set."""
    similarity: Annotated[float, Field(gt=0, le=1)] | None = 0.8
    """And a row this similar to one (Jaccard of word sets, numbers masked); null: word runs and equality only."""


class CamelAIConfig(StrictConfig):
    """CamelAI science: `camel-ai/biology`, `chemistry`, `physics` from the Hub, or from a local directory."""

    type: Literal["camel_ai"] = "camel_ai"
    subjects: tuple[Literal["biology", "chemistry", "physics"], ...] = Field(
        default=("biology", "chemistry", "physics"), min_length=1
    )
    path: str | None = None
    """A directory with, per subject, `biology.zip`, a folder `biology` of JSON files, or `biology.jsonl` or `.json`;
    null loads the zips from the Hub."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """The share of (subject, topic, sub-topic) cells held out, by a seeded hash of the cell."""
    near_duplicates: Annotated[float, Field(gt=0, le=1)] | None = 0.9
    """Of questions this similar (Jaccard of word sets, numbers masked) the first is kept; null: of equal ones only."""
    overlap: OverlapConfig | None = None
    seed: int = 0


class DrSCIConfig(StrictConfig):
    """Dr. SCI as reproduced in `MiniByte-666/Dr.SCI` (arXiv 2602.08321): two parquet files, from the Hub or local.

    Columns are named by their path: `extra_info.question` is the field `question` of the column `extra_info`.
    """

    type: Literal["dr_sci"] = "dr_sci"
    parts: tuple[Literal["open-ended", "verifiable"], ...] = Field(default=("open-ended",), min_length=1)
    path: str | None = None
    """A directory with `Dr_SCI_open-ended.parquet` and `Dr_SCI_verifiable.parquet`; null loads them from the Hub."""
    rows: Annotated[int, Field(ge=1)] | None = None
    """Read only the first so many rows of each file; null is all (about 476,000 and 415,000)."""
    subjects: tuple[str, ...] = ()
    """Keep only these; empty keeps all."""
    question: str = "extra_info.question"
    answer: str = "reward_model.ground_truth"
    rubric: str = "reward_model.rubric"
    """A list of {title, description, weight}; becomes the example's column `rubric`, empty where there is none."""
    subject: str = "extra_info.subject"
    topic: str | None = None
    """What the split keeps together; null: each question by itself (the published files name no topic)."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    near_duplicates: Annotated[float, Field(gt=0, le=1)] | None = 0.9
    """As in `camel_ai`."""
    overlap: OverlapConfig | None = None
    seed: int = 0


class CountdownTaskConfig(StrictConfig):
    """Countdown: make `target` of `nums`, each used once. Generated, or `Jiayi-Pan/Countdown-Tasks-3to4`."""

    type: Literal["countdown"] = "countdown"
    source: Literal["generated", "published"] = "generated"
    path: str | None = None
    """Published rows in a file with columns `target` and `nums`; null loads them from the Hub."""
    train_size: Annotated[int, Field(ge=1)] = 327_680
    test_size: Annotated[int, Field(ge=1)] = 1024
    """TinyZero's sizes; of published rows, test follows train in the file."""
    counts: tuple[Annotated[int, Field(ge=2, le=4)], ...] = Field(default=(3, 4), min_length=1)
    """Generated: how many numbers a problem may have."""
    min_number: Annotated[int, Field(ge=1)] = 1
    max_number: Annotated[int, Field(le=999)] = 99
    min_target: Annotated[int, Field(ge=1)] = 10
    max_target: Annotated[int, Field(le=9999)] = 99
    question: str = (
        "Using each of the numbers {nums} exactly once, and only +, -, *, / and parentheses, write an expression that "
        "equals {target}. The answer is the expression alone, without an equals sign."
    )
    """Python format string with fields nums, target."""
    seed: Annotated[int, Field(ge=0)] = 0


class ReasoningGymConfig(StrictConfig):
    """Data sets of reasoning-gym (arXiv 2505.24760), generated and scored by their own code; `flatpeak[tasks]`."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str | None = None
    """One data set by name, with `arguments`; or several in `datasets`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Settings of that data set, by its own names."""
    datasets: dict[str, dict[str, Any]] | None = None
    """Several, each name with its arguments; sizes are shared out evenly."""
    size: Annotated[int, Field(ge=1, lt=1_000_000_000)] = 2000
    test_size: Annotated[int, Field(ge=1, lt=1_000_000_000)] = 200
    seed: Annotated[int, Field(ge=0, lt=1_000_000_000)] = 0


class PreferencesConfig(StrictConfig):
    """Preference pairs, in AlpacaFarm's layout or with columns chosen and rejected, from files or the Hub."""

    type: Literal["preferences"] = "preferences"
    name: str = "preferences"
    path: str | None = None
    """A JSONL, JSON or CSV file; null loads from the Hub."""
    test_path: str | None = None
    hub: str = "tatsu-lab/alpaca_farm"
    hub_file: str | None = "alpaca_human_preference.json"
    """One file of that data set; null reads its splits. AlpacaFarm's come from a script, which `datasets` from version
    4 on refuses to run."""
    hub_config: str | None = None
    split: str = "train"
    test_split: str | None = None
    """Without a test file or split, `test_fraction` of the prompts is held out, by a seeded hash."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    seed: int = 0


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
