"""The letter that a completion answers a multiple-choice question with."""

from __future__ import annotations

import random
import re
from collections import deque
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING, Final

from flatpeak.errors import UserError
from flatpeak.rewards.stated import stated_letter
from flatpeak.utils.answers import judged_text

if TYPE_CHECKING:
    from flatpeak.rewards.config import ChoiceExtraction
    from flatpeak.types import Completion, Prompt, Score

UNKNOWN_OPTIONS: Final = 10
"""How many options a question is taken to have whose row has no column `options`: A to J."""
GUESS_SEED: Final = 12345

# MMLU-Pro's published extraction has the patterns
#   answer is \(?([A-J])\)?      .*[aA]nswer:\s*([A-J])      \b[A-J]\b(?!.*\b[A-J]\b)
# of which the last two take time quadratic in the text; these find the same letters in linear time.
_OFFICIAL_STATED: Final = re.compile(r"answer is \(?([A-J])")
_OFFICIAL_COLON: Final = re.compile(r"(?=[aA]nswer:\s*([A-J]))")
_OFFICIAL_LONE: Final = re.compile(r"\b[A-J]\b")

_FIRST_LETTER: Final = re.compile(r"\s*\(?([A-Z])(?!\w)")


def official_letter(text: str) -> str | None:
    """MMLU-Pro's published extraction (TIGER-AI-Lab/MMLU-Pro, `evaluate_from_local.py`), quirks and all.

    The first `answer is (X)`; else, in the first line with an `answer: X`, the last one; else the last lone capital
    from A to J. So `answer is Definitely (C)` is D, a hypothesis before the conclusion wins, the pronoun I is an
    answer, and small letters never are.
    """
    stated = _OFFICIAL_STATED.search(text)
    if stated is not None:
        return stated[1]
    after_colon = _official_colon(text)
    if after_colon is not None:
        return after_colon
    lone = deque(_OFFICIAL_LONE.finditer(text), maxlen=1)
    return lone[0].group() if lone else None


def _official_colon(text: str) -> str | None:
    found, line_end = None, -1
    for match in _OFFICIAL_COLON.finditer(text):
        if found is None:
            line_end = text.find("\n", match.start())
        elif 0 <= line_end < match.start():
            break
        found = match[1]
    return found


def first_letter(text: str) -> str | None:
    """The capital that the text begins with, spaces and a parenthesis aside; else None."""
    match = _FIRST_LETTER.match(text)
    return None if match is None else match[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceReward:
    """1 if the extracted letter is the row's gold letter, else 0.

    - `robust`: what the completion states last, after its thinking (see `flatpeak.rewards.stated`).
    - `letter`: the letter that it begins with, if the question has it, as after the `Answer:` of MMLU's prompts.
    - `official`: MMLU-Pro's own extraction, over the whole text. Where that finds no letter, the published script
      draws one of the options at random, from a generator seeded with 12345 for each question anew; so does this,
      and a draw may score 1. It is no answer all the same.
    """

    extraction: ChoiceExtraction = "robust"

    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """1.0 or 0.0; a gold answer that is none of the question's letters is a UserError naming the row."""
        letters = _letters(_options(prompt))
        gold = prompt.example.gold
        if len(gold) != 1 or gold not in letters:
            raise UserError(
                f"the gold answer {gold[:80]!r} of row {prompt.id!r} is no letter from A to {letters[-1]}: use a "
                "multiple-choice task (task.type=choices, mmlu or mmlu_pro), or another reward type"
            )
        letter = self.answer(completion, prompt)
        if letter is None and self.extraction == "official":
            letter = letters[random.Random(GUESS_SEED).randint(0, len(letters) - 1)]
        return float(letter == gold)

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The extracted letter, or None where there is none: what a majority vote and the failure rate count."""
        options = _options(prompt)
        match self.extraction:
            case "robust":
                return stated_letter(judged_text(completion, prompt), options=options, unknown=UNKNOWN_OPTIONS)
            case "letter":
                letter = first_letter(completion.text)
                return letter if letter is not None and letter in _letters(options) else None
            case "official":
                return official_letter(completion.text)


def _options(prompt: Prompt) -> list[str] | None:
    """The options in the order of their letters, where the row has them in its column `options`."""
    options = prompt.example.columns.get("options")
    return [str(option) for option in options] if isinstance(options, list | tuple) and options else None


def _letters(options: list[str] | None) -> str:
    return ascii_uppercase[: UNKNOWN_OPTIONS if options is None else len(options)]
