"""Extraction of the answer from a transcript (last box or answer block, after the thinking) and from a gold column."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Final

from flatpeak.rewards.math.rule_grader import normalized
from flatpeak.rewards.math.syntax_tree import MAX_BOXES, MAX_CHARACTERS
from flatpeak.utils.answers import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    Box,
    after_thinking,
    find_boxes,
    joined_answers,
    last_block,
)

if TYPE_CHECKING:
    from flatpeak.rewards.base import MathExtraction

_BOX_BEGINS: Final = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+[^\s{}$\\<>])")
_BARE: Final = re.compile(r"\\{1,2}(?:boxed|fbox)\s+([^\s{}$\\<>]{1,64})")
"""A box without braces: its content ends at a space."""
_UNFINISHED: Final = (r"\boxed", r"\fbox", ANSWER_OPEN, ANSWER_CLOSE)
_MARK: Final = "####"


def extract_answer(text: str, extraction: MathExtraction = "auto") -> str | None:
    """The answer in a transcript, as written there, or None.

    It is in the last box with balanced braces (`\\boxed{}`, `\\fbox{}`, `\\boxed 5`), together with signs that change
    it (`-\\boxed{5}`) and boxes joined to it by a comma, `and` or `or`; or in the last complete `<answer>` block. The
    later of the two counts. It must be after the thinking, which must be closed; a box in a block counts. With `boxed`,
    blocks do not count. With `any`, a text without boxes and blocks, complete or not, has its answer after the last
    `####` on that line; otherwise the whole text is the answer, if it is short. With `r1_zero`, the answer is in the
    last block of a text with `</think> <answer>`. A text with more than `MAX_BOXES` boxes has no answer.
    """
    if extraction == "r1_zero":
        return block_answer(text) if "</think> <answer>" in text and "</answer>" in text else None
    text = after_thinking(text)
    if _has_too_many_boxes(text):
        return None
    block = last_block(text) if extraction != "boxed" else None
    answers = [each for each in (block, _last_box(text)) if each is not None]
    if answers:
        return max(answers, key=lambda each: each[0])[1]
    if extraction != "any" or any(mark in text for mark in _UNFINISHED):
        return None
    if _MARK in text:
        return _marked(text)
    text = text.strip()
    return text if len(text) <= MAX_CHARACTERS else None


def block_answer(text: str) -> str | None:
    """The last box in the last complete `<answer>` block after the thinking, else the whole block, or None."""
    block = last_block(after_thinking(text))
    if block is None or _has_too_many_boxes(block[1]):
        return None
    box = _last_box(block[1])
    return block[1] if box is None else box[1]


def gold_answer(gold: str) -> str:
    """The answer in a gold column: in the last box of a solution, after GSM8K's `####`, or the whole text."""
    box = None if _has_too_many_boxes(gold) else _last_box(gold)
    if box is not None:
        return box[1]
    return _marked(gold) if _MARK in gold else gold.strip()


def _marked(text: str) -> str:
    return text.rpartition(_MARK)[2].strip().partition("\n")[0].strip()


def _has_too_many_boxes(text: str) -> bool:
    """Whether a text has more than MAX_BOXES boxes, including those with unbalanced braces."""
    return next(islice(_BOX_BEGINS.finditer(text), MAX_BOXES, None), None) is not None


def _last_box(text: str) -> tuple[int, str] | None:
    """(start, content) of the box that begins last; linear in the text."""
    boxes = find_boxes(text)
    for index, box in reversed(list(enumerate(boxes))):
        if box.end is not None:
            return box.start, _joined(text, boxes[: index + 1])
        if (bare := _BARE.match(text, box.start)) is not None:
            return box.start, bare[1].rstrip(".,;:!?)")
    return None


def _joined(text: str, boxes: list[Box]) -> str:
    """The answer in the last box, or the list of boxes joined to it; several spellings of one value count as one."""
    answers = joined_answers(text, boxes)
    names = {answer.name for answer in answers if answer.name}
    if len(answers) == 1 or (len(names) < 2 and len({normalized(answer.text) for answer in answers}) == 1):
        return answers[-1].text
    return ", ".join(answer.name + answer.text for answer in answers)
