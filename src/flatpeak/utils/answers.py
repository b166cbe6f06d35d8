"""Reading an answer out of a text: after the thinking, in an `<answer>` block, in a box, as a plain number.

A completion in the r1_zero form reads `<think>reasoning</think> <answer>result</answer>`. Many prompts end with
`<think>`, so the completion starts inside the thinking: the tag is put back before the completion is graded.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from flatpeak.types import Completion, Prompt

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
_ANSWER_TAG: Final = re.compile(r"</?answer>")
_BOX_TOKEN: Final = re.compile(
    r"(?P<escape>\\?)\\(?P<command>boxed|fbox)(?![A-Za-z])(?:\s*(?P<brace>\{))?|\\.|[{}]", re.DOTALL
)
_NUMBER: Final = re.compile(r"(-?)((?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)?)(?:\.(\d+))?")
_INTEGER: Final = re.compile(r"-?\d+")
_BLANKS: Final = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and signs that show nothing: fillers of Hangul, and Braille without dots."""


def judged_text(completion: Completion, prompt: Prompt) -> str:
    """The completion's text, after the `<think>` that the prompt's template ends with, if it ends with one."""
    if not prompt.ends_in_question and prompt.text.rstrip().endswith(THINK_OPEN):
        return prompt.text[prompt.text.rindex(THINK_OPEN) :] + completion.text
    return completion.text


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it has only spaces, invisible characters and marks without a letter."""
    return all(character in _BLANKS or unicodedata.category(character)[0] in "CMZ" for character in text)


def after_thinking(text: str) -> str:
    """The text after the last `</think>`, up to a `<think>` that stays open; the whole text without either tag.

    A transcript cut in the middle of its thinking therefore has no answer, whatever the thoughts say.
    """
    return text.rpartition(THINK_CLOSE)[2].partition(THINK_OPEN)[0]


def last_answer(text: str) -> str | None:
    """The content of the last complete `<answer>...</answer>` after the thinking, or None.

    A block ends at the first `</answer>` after its `<answer>`: in `<answer>no</answer> 5 </answer>` it is `no`.
    """
    block = last_block(after_thinking(text))
    return None if block is None else block[1]


def last_block(text: str) -> tuple[int, str] | None:
    """(start of the content, content) of the last complete `<answer>...</answer>` in the whole text, or None."""
    block, start = None, None
    for tag in _ANSWER_TAG.finditer(text):
        if tag.group() == ANSWER_OPEN:
            start = tag.end()
        elif start is not None:
            block, start = (start, text[start : tag.start()]), None
    return block


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    r"""A `\boxed{...}` or `\fbox{...}` whose braces balance, or one of the commands without braces, `\boxed 5`."""

    command: str
    """`boxed` or `fbox`."""
    start: int
    """Index of the content's first character; without braces, of the command's."""
    end: int | None
    """Index after the content; None without braces, where TeX would take one token but authors mean more."""
    escaped_twice: bool
    r"""Whether it is written with two backslashes, `\\boxed{5}`."""


def find_boxes(text: str) -> list[Box]:
    """All boxes of a text, in the order in which they begin; linear in the text."""
    boxes: list[Box] = []
    opened: list[tuple[str | None, bool, int]] = []  # command, escaped_twice, start of every brace
    for token in _BOX_TOKEN.finditer(text):
        bracket, command = token.group(), token["command"]
        if bracket == "{" or token["brace"]:
            opened.append((command, bool(token["escape"]), token.end()))
        elif command:
            boxes.append(Box(command=command, start=token.start(), end=None, escaped_twice=bool(token["escape"])))
        elif bracket == "}" and opened:
            command, escaped_twice, start = opened.pop()
            if command:
                boxes.append(Box(command=command, start=start, end=token.start(), escaped_twice=escaped_twice))
    # In `\boxed{\boxed 5}` both begin at one place, the outer one first.
    return sorted(boxes, key=lambda box: (box.start, box.end is None))


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces balance, or None."""
    for box in reversed(find_boxes(text)):
        if box.command == "boxed" and box.end is not None and not box.escaped_twice:
            return text[box.start : box.end]
    return None


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
