"""Reading an answer from a text: after the thinking, in an `<answer>` block, in a box, or as a plain number.

A completion in r1_zero form is `<think>reasoning</think> <answer>result</answer>`. Many prompts end with `<think>`, so
that the completion starts inside the thinking: grading first puts the tag back.
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
_GAP: Final = r"(?:\s|\\[,;:! ])*"
_SIGNS: Final = r"[-\u2212\u00b1]|\\(?:pm|mp)(?![A-Za-z])"
_SIGN: Final = re.compile(
    r"(?:^|[=$(\[{,]|\\approx|:\**\s|\b(?:and|or|is|are|equals|get|gives)[\s}]+)\s*(?P<touching>[-\u2212])\Z"
    rf"|(?:=\s*|\$|\\[(\[]\s*|\\approx\s*)(?P<apart>[-\u2212]){_GAP}\Z"
    rf"|(?P<both>\u00b1|\\(?:pm|mp)){_GAP}\Z",
    re.MULTILINE,
)
"""The sign of a box. A minus with a space after it is a sign only in a formula, elsewhere a dash."""
_GOES_ON: Final = re.compile(
    r"[.,/]?\d|[\u00b2\u00b3\u00b9\u00bc-\u00be\u2150-\u215e]|\^\s*\{?\s*-?\s*(?:\d|[a-np-z](?![A-Za-z]))|_\s*\{?\s*\d"
    r"|(?:[ \t]|\\[,;: ])*(?:(?:\+[ \t]*)?\\(?:[dt]?frac|sqrt|pi)(?![A-Za-z])"
    r"|(?:[+/]|\\(?:cdot|times|div)(?![A-Za-z]))\s*\d(?![^$\n=]{0,64}=)|-\s*\d+(?:\.\d+)?\s*(?:\$|\\[)\]]))"
)
"""Text after a box that changes its number; not degrees, percent and units, nor the rest of `\boxed{4} + 3 = 7`."""
_FORMULA_ENDS: Final = re.compile(r"\$|\\[)\]]|\n|\Z")
_COMPOUND: Final = re.compile(r"[+\-,=<>/\s]")
_NAME: Final = re.compile(rf"(?<![\w\\])(\w{{1,3}}\s*=\s*)(?:{_SIGNS})?{_GAP}\Z")
_SPACE: Final = r"(?:[\s$*~]|\\[()\[\],;!: ]|\\q?quad)*"
_UNIT: Final = (
    r"(?:\\?%|\^\s*\{?\s*\\circ\s*\}?|\u00b0|(?:\s|\\[, ])*\\(?:text|mathrm)\s*\{\s*[A-Za-z]{1,12}\s*\}(?:\^\d)?)?"
)
_WORD: Final = (
    r"(?:(?:and|or)\b(?:/or\b)?|\\(?:text[a-z]*|m(?:box|athrm))\s*\{\s*,?\s*(?:and|or)\s*\}|\\l(?:and|or)(?![a-z])"
    r"|\u6216\u8005?|[\u548c\u4e0e\u53ca])"
)
_JOINT: Final = re.compile(
    rf"{_UNIT}{_SPACE}(?:[,;\u3001\uff0c]{_SPACE}{_WORD}?|{_WORD}){_SPACE}(?:\w{{1,3}}\s*=)?{_SPACE}(?:{_SIGNS})?{_GAP}"
    r"\\{1,2}(?:boxed|fbox)\s*\{",
    re.IGNORECASE,
)
_LONGEST_JOINT: Final = 48
_WINDOW: Final = 24
"""Characters before a box that contain its name and its sign."""
_NUMBER: Final = re.compile(r"(-?)((?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)?)(?:\.(\d+))?")
_INTEGER: Final = re.compile(r"-?\d+")
_BLANKS: Final = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Invisible letters and signs: Hangul fillers, and Braille without dots."""


def judged_text(completion: Completion, prompt: Prompt) -> str:
    """The completion's text, preceded by the `<think>` at the end of the prompt's template, if there is one."""
    if not prompt.ends_in_question and prompt.text.rstrip().endswith(THINK_OPEN):
        return prompt.text[prompt.text.rindex(THINK_OPEN) :] + completion.text
    return completion.text


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: only spaces, invisible characters and marks without a letter."""
    return all(character in _BLANKS or unicodedata.category(character)[0] in "CMZ" for character in text)


def after_thinking(text: str) -> str:
    """The text after the last `</think>`, up to a `<think>` that stays open; the whole text without either tag.

    So a transcript that is cut off in its thinking has no answer, for any content of the thoughts.
    """
    return text.rpartition(THINK_CLOSE)[2].partition(THINK_OPEN)[0]


def last_answer(text: str) -> str | None:
    """The content of the last complete `<answer>...</answer>` after the thinking, or None.

    A block ends at the first `</answer>` after its `<answer>`: for `<answer>no</answer> 5 </answer>` it is `no`.
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
    r"""A `\boxed{...}` or `\fbox{...}` with balanced braces, or such a command without braces, `\boxed 5`."""

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
    # In `\boxed{\boxed 5}` both boxes begin at the same index, the outer one first.
    return sorted(boxes, key=lambda box: (box.start, box.end is None))


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxedAnswer:
    """The answer in a box as printed, with the name before it."""

    name: str
    """`x = ` for `x = \\boxed{5}`; else empty."""
    text: str
    r"""The content with text outside that changes it: `-5` for `-\boxed{5}`, `5\sqrt2` for `\boxed{5}\sqrt2`."""


def joined_answers(text: str, boxes: list[Box]) -> list[BoxedAnswer]:
    """The answers in the last of some boxes with braces, and in boxes joined to it by a comma, `and` or `or`."""
    joined = boxes[-1:]
    for box in reversed(boxes[:-1]):
        blank = any(not text[each.start : each.end].strip() for each in (box, joined[-1]))
        start, end = joined[-1].start, box.end
        if blank or end is None or start - end > _LONGEST_JOINT or not _JOINT.fullmatch(text, end + 1, start):
            break
        joined.append(box)
    return [_printed(text, box) for box in reversed(joined)]


def _printed(text: str, box: Box) -> BoxedAnswer:
    end, command = box.end or box.start, text.rindex("\\", 0, box.start) - box.escaped_twice
    before, content = max(0, command - _WINDOW), text[box.start : end]
    named = _NAME.search(text, before, command)
    signed, goes_on = _SIGN.search(text, before, command), _GOES_ON.match(text, end + 1)
    if signed is not None or goes_on is not None:
        sign = "" if signed is None else signed["both"] or "-"
        formula_end = _FORMULA_ENDS.search(text, end + 1)
        following = text[end + 1 : formula_end.start()] if goes_on and formula_end else ""
        content = f"{sign}({content}){following}" if _COMPOUND.search(content) else f"{sign}{content}{following}"
    return BoxedAnswer(name="" if named is None else named[1], text=content)


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` with balanced braces, or None."""
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
