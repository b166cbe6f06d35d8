"""Configuration of where rows come from, and of what they must not repeat."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from flatpeak.utils.schema import StrictConfig


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
    """Training rows that ask what an evaluation set asks are dropped; the rule is in tasks/overlap.py."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """The evaluation set; only its `question` is read."""
    ngram: Annotated[int, Field(ge=8)] = 13
    """A row is dropped that shares so many consecutive words with a question of the evaluation set."""
    similarity: Annotated[float, Field(gt=0, le=1)] | None = 0.8
    """And a row this similar to one (Jaccard of word sets, numbers masked); null: word runs and equality only."""
