"""The r1_zero layout: what of a transcript is judged, where its thinking ends, and its answer blocks.

A completion in this layout reads `<think>reasoning</think> <answer>result</answer>`. Many prompts end with `<think>`,
so the completion starts inside the thinking: the tag is given back before anything is judged.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatpeak.types import Completion, Prompt

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
_ANSWER_TAG = re.compile(r"</?answer>")


def judged_text(completion: Completion, prompt: Prompt) -> str:
    """The completion's text, after the `<think>` that the prompt ends with, if it ends with one."""
    if prompt.text.rstrip().endswith(THINK_OPEN):
        return prompt.text[prompt.text.rindex(THINK_OPEN) :] + completion.text
    return completion.text


def after_thinking(text: str) -> str:
    """What follows the last `</think>`, up to a `<think>` that stays open; the whole text where nobody thinks.

    A transcript cut in the middle of its thinking therefore has no answer, whatever the thoughts say.
    """
    return text.rpartition(THINK_CLOSE)[2].partition(THINK_OPEN)[0]


def last_answer(text: str) -> str | None:
    """The content of the last complete `<answer>...</answer>` after the thinking, or None.

    A block ends at the first `</answer>` after its `<answer>`: in `<answer>no</answer> 5 </answer>` it is `no`.
    """
    answer, start = None, None
    tail = after_thinking(text)
    for tag in _ANSWER_TAG.finditer(tail):
        if tag.group() == ANSWER_OPEN:
            start = tag.end()
        elif start is not None:
            answer, start = tail[start : tag.start()], None
    return answer


_NUMBER = re.compile(r"(-?)((?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)?)(?:\.(\d+))?")
_INTEGER = re.compile(r"-?\d+")


def normalize_gold(text: str) -> str:
    """One spelling per number: `43.0` is `43`, `1,000` is `1000`, `2.50` is `2.5`; anything else is only stripped.

    Digits are never rounded. Leading zeros (`007`) mark codes and are kept.
    """
    text = text.strip()
    match = _NUMBER.fullmatch(text.replace("−", "-").rstrip(".,"))
    if match is None or not (match[2] or match[3]):
        return text
    whole = match[2].replace(",", "") or "0"
    fraction = (match[3] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return number if number == "0" else match[1] + number


def is_integer(gold: str) -> bool:
    """Whether a normalized gold answer is an integer."""
    return _INTEGER.fullmatch(gold) is not None


def is_number(gold: str) -> bool:
    """Whether a normalized gold answer is an integer or a decimal."""
    match = _NUMBER.fullmatch(gold)
    return match is not None and bool(match[2] or match[3])
