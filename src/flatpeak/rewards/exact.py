"""The reward for answers that must be given word for word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatpeak.rewards.base import Rule, TextExtraction
from flatpeak.rewards.numeric_answer import whole_text
from flatpeak.utils.answers import after_thinking, judged_text, normalize_gold

if TYPE_CHECKING:
    from flatpeak.types import Completion, Prompt, Score


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactReward(Rule):
    """1 if the extracted text equals a gold answer of the row, up to white space (and case, if ignored), else 0.

    The spelling of a number does not matter: `1,000` is `1000`, and `2.50` is `2.5`.
    """

    extraction: TextExtraction = "whole"
    ignore_case: bool = False

    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """The score, 1.0 or 0.0."""
        golds = {self._spelled(gold) for gold in prompt.example.golds}
        answer = self.answer(completion, prompt)
        # A gold number has lost the spelling that its row gives it.
        return float(answer is not None and not golds.isdisjoint((answer, normalize_gold(answer))))

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The extracted text in one spelling, or None."""
        text = extract_text(judged_text(completion, prompt), self.extraction)
        return None if text is None else self._spelled(text) or None

    def _spelled(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


def extract_text(text: str, extraction: TextExtraction) -> str | None:
    """The text that a transcript gives as its answer, or None if it gives none."""
    if extraction != "last_line":
        return whole_text(text, extraction)
    lines = [line for line in after_thinking(text).splitlines() if line.strip()]
    return lines[-1] if lines else None
