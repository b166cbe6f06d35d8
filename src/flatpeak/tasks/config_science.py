"""Configuration of science, puzzles and preference data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from flatpeak.tasks.config_sources import OverlapConfig
from flatpeak.utils.schema import StrictConfig


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
