"""The cases of tests/rewards/math/cases.yaml, and a grader for them that the tests of a session share."""

from __future__ import annotations

import atexit
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from flatpeak.rewards.config import MathExtraction
from flatpeak.rewards.math.grader import MathGrader
from support.tables import read_tables


class Case(NamedTuple):
    """One question to the grader."""

    answer: str
    """A whole transcript."""
    gold: str
    correct: bool
    kind: str
    """The class of the case, a short name."""


TABLES: Final = read_tables(Path(__file__).parents[1] / "rewards/math/cases.yaml")


def _cases(table: str, frame: str) -> tuple[Case, ...]:
    """The cases of a table, each answer put into the place of `%` in the frame."""
    return tuple(
        Case(frame.replace("%", answer), gold, correct, kind)
        for kind, rows in TABLES[table].items()
        for answer, gold, correct in rows
    )


IN_A_BOX: Final = r"Therefore the answer is $\boxed{%}$."
RULES: Final = _cases("rules", IN_A_BOX) + _cases("rules_of_transcripts", "%")
CASES: Final = _cases("answers", IN_A_BOX) + _cases("transcripts", "%")
BARE: Final = _cases("answers", "%")
"""The same answers without a box around them, for the extraction `any`."""


@cache
def grader(limit: float, extraction: MathExtraction = "auto") -> MathGrader:
    """One for each time limit, in seconds: the tests of a session share its workers."""
    made = MathGrader(timeout=limit, extraction=extraction)
    atexit.register(made.close)
    return made


def grade(
    pairs: Iterable[tuple[str, str]], *, limit: float = 60.0, extraction: MathExtraction = "auto"
) -> list[bool | None]:
    """A verdict for each (transcript, gold); `limit` is what one pair may take, in seconds."""
    return grader(limit, extraction).grade(pairs)
