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
