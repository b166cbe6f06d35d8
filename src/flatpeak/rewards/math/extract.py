"""Where a text says its answer: in its last box or its last answer block, after the thinking."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from flatpeak.rewards.math.nodes import MAX_BOXES, MAX_CHARACTERS, OverLimitError
from flatpeak.utils.answers import ANSWER_CLOSE, ANSWER_OPEN, after_thinking

if TYPE_CHECKING:
    from flatpeak.rewards.config import MathExtraction

_BRACES: Final = re.compile(
    r"\\{1,2}(?:boxed|fbox)\s*\{|\\{1,2}(?:boxed|fbox)\s+(?P<bare>[^\s{}$\\<>]{1,64})|\\.|[{}]", re.DOTALL
)
_TAG: Final = re.compile(f"{ANSWER_OPEN}|{ANSWER_CLOSE}")
_UNFINISHED: Final = (r"\boxed", r"\fbox", ANSWER_OPEN, ANSWER_CLOSE)
_MARK: Final = "####"


def extract_answer(text: str, extraction: MathExtraction = "auto") -> str | None:
    """The answer that a text states, as it is written there, or None.

    After the thinking (none if it is not closed), what comes last decides: a box whose braces balance (`\\boxed{}`,
    `\\fbox{}`, `\\boxed 5`) or a complete `<answer>` block, in which a box decides. Nothing else is searched for
    numbers. With `boxed`, blocks do not count. With `any`, where there is neither and none was begun: what follows the
    last `####` on its line, else the whole text, if it is short; it is then an answer only if all of it is. More than
    `MAX_BOXES` boxes are an OverLimitError.
    """
    text = after_thinking(text)
    box, block = _last_box(text), _last_block(text) if extraction != "boxed" else None
    if box is not None and (block is None or box[0] > block[0]):
        return box[1]
    if block is not None:
        return block[1]
    if extraction != "any" or any(mark in text for mark in _UNFINISHED):
        return None
    if _MARK in text:
        return _marked(text)
    text = text.strip()
    return text if len(text) <= MAX_CHARACTERS else None


def block_answer(text: str) -> str | None:
    """The answer in the last complete `<answer>` block after the thinking: its last box, or all of it; None if none."""
    block = _last_block(after_thinking(text))
    if block is None:
        return None
    box = _last_box(block[1])
    return block[1] if box is None else box[1]


def gold_answer(gold: str) -> str:
    """The answer in a gold column: in the last box of a solution, after GSM8K's `####`, or the whole."""
    try:
        box = _last_box(gold)
    except OverLimitError:
        box = None
    if box is not None:
        return box[1]
    return _marked(gold) if _MARK in gold else gold.strip()


def _marked(text: str) -> str:
    return text.rpartition(_MARK)[2].strip().partition("\n")[0].strip()


def _last_box(text: str) -> tuple[int, str] | None:
    """(where it begins, its content) of the balanced box that begins last; linear in the text."""
    opened: list[tuple[bool, int]] = []
    last: tuple[int, str | None, int] | None = None
    boxes = 0
    for token in _BRACES.finditer(text):
        word = token.group()
        if token["bare"]:
            boxes += 1
            last = (token.start(), token["bare"].rstrip(".,;:!?)"), 0)
        elif word.endswith("{") and word != r"\{":
            boxes += len(word) > 1
            opened.append((len(word) > 1, token.end()))
        elif word == "}" and opened:
            boxed, start = opened.pop()
            if boxed and (last is None or start > last[0]):
                last = (start, None, token.start())
        if boxes > MAX_BOXES:
            raise OverLimitError(f"more than {MAX_BOXES} boxes")
    if last is None:
        return None
    start, bare, end = last
    return start, text[start:end] if bare is None else bare


def _last_block(text: str) -> tuple[int, str] | None:
    last, start = None, None
    for tag in _TAG.finditer(text):
        if tag.group() == ANSWER_OPEN:
            start = tag.end()
        elif start is not None:
            last, start = (start, text[start : tag.start()]), None
    return last
