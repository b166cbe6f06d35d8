r"""Verdicts that mathematicians agree on, by class: what a grader of mathematical answers has to get right.

The table is math_cases.txt: what stands in the box (`answer`), and whole transcripts (`text`); sections of a `rule` are
questions of convention, settled in docs/grading.md. The classes are the known weaknesses of public graders:
huggingface/Math-Verify issues 14, 41, 60 and 64 and pull request 82, EleutherAI/lm-evaluation-harness issues 2212 and
4030, QwenLM/Qwen2.5-Math issue 50, open-compass/opencompass pull request 2593, hiyouga/MathRuler issue 2, verl,
minerva, PRM800K and the Dr. GRPO grader.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from flatpeak.rewards.config import MathExtraction
from flatpeak.rewards.math.grader import MathGrader


class Case(NamedTuple):
    """One question to the grader."""

    answer: str
    """A whole transcript."""
    gold: str
    correct: bool
    kind: str
    """The class of the case, a short name."""


TABLE = Path(__file__).with_suffix(".txt")


def _spelled(cell: str) -> str:
    """The text of a cell: ⏎ is a line break, ⟨200b⟩ a character by its code, ⟪ ⟫ keep spaces at the ends."""
    cell = re.sub("⟨([0-9a-f]+)⟩", lambda code: chr(int(code[1], 16)), cell.replace("⏎", "\n"))
    return cell[1:-1] if cell.startswith("⟪") else cell


def _read() -> Iterator[tuple[str, Case]]:
    """The sections of the table with their cases: `# SECTION: KIND`, then lines of = or !, answer and gold."""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            section, kind = line[2:].split(": ")
        elif line:
            verdict, answer, gold = line.split("\t")
            yield section, Case(_spelled(answer), _spelled(gold), verdict == "=", kind)


def _boxed(case: Case) -> Case:
    return case._replace(answer=rf"Therefore the answer is $\boxed{{{case.answer}}}$.")


_CASES: Final = tuple(_read())
BARE: Final = tuple(case for section, case in _CASES if section == "answer")
"""The answers without a box around them, for the extraction `any`."""
CASES: Final = (*map(_boxed, BARE), *(case for section, case in _CASES if section == "text"))
RULES: Final = (
    *(_boxed(case) for section, case in _CASES if section == "answer rule"),
    *(case for section, case in _CASES if section == "text rule"),
)


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
