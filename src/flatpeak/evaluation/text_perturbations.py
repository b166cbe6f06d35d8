"""Perturbations of a question's wording, and the parts that they keep: numbers, formulas, code, options, labels."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from flatpeak.types import Example

DISTRACTORS: Final = (
    "The library across the street closes at six in the evening.",
    "A neighbor has painted the garden fence green.",
    "It had been raining since early in the morning.",
    "The bus that stops at the corner holds 45 passengers.",
    "Last year the town planted 12 new trees along the river.",
    "The clock on the wall is 5 minutes fast.",
    "A cat was asleep on the windowsill the whole time.",
    "The nearest train station was built 80 years ago.",
    "Someone on the radio was talking about the weather.",
    "The building next door has 9 floors and a red roof.",
)
"""Sentences that are irrelevant to any question; those with a number distract models most (Shi et al. 2023, arXiv
2302.00093)."""
FRAMES: Final = (
    "Here is something to work out. {question}",
    "Consider the following. {question}",
    "Please deal with this one: {question}",
    "Take your time with the next question. {question}",
    "What follows is the task. {question}",
)
"""Introductions of a question. They come before it, because the end of a prompt says how to answer."""
PREAMBLES: Final = (
    "Below you find multiple choice questions with their answers; the subject is {subject}.",
    "These are questions on {subject}, each with lettered options and its answer.",
    "Each of the questions below, on {subject}, has several options, and the answer is given.",
)
"""Other wordings of the published preamble of multiple-choice questions."""
_PREAMBLE: Final = re.compile(
    r"The following are multiple choice questions \(with answers\)(?: about ([^.\n]+?))?\s*\."
)
_NUMBER_WORDS: Final = re.compile(
    r"(?:three|four(?:th)?|five|fifth|sixth|seven(?:th)?|eighth?|nine|ninth|tenth|eleven|twelve|third|zero"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|[mb]illion"
    r"|half|twice|thrice|double|triple|quarters?|dozens?|percent)",
    re.IGNORECASE,
)
"""Numbers in words."""
_WORDS_PER_TYPO: Final = 12
"""Words per misspelled word; each question has at least one typo."""
_NAMES: Final[dict[str, str]] = tomllib.loads(Path(__file__).with_name("first_names.toml").read_text("utf-8"))
FIRST_NAMES: Final = tuple(tuple(names.split()) for names in _NAMES.values())
INTERCHANGEABLE: Final = {name: names for names in FIRST_NAMES for name in names}
"""The list of names that can replace each name."""
# The line of the first option, if a line of the second option follows; options may have several lines.
_OPTIONS: Final = re.compile(
    r"^[ \t]*(?:Options|Choices):[ \t]*$|^[ \t]*(\(?)A([.)])[ \t]+\S(?=.*?\n[ \t]*\1B\2[ \t]+\S)",
    re.MULTILINE | re.DOTALL,
)
_LABEL: Final = re.compile(r"^\s*(?:Question|Problem|Q):\s*")
_ANSWER_CUE: Final = re.compile(r"\n\s*(?:Answer|A|Solution):[^\n]*\s*$")
PROTECTED: Final = re.compile(
    r"```.*?```|`[^`\n]*`"
    r"|\$\$.*?\$\$|\\\[.*?\\\]|\\\(.*?\\\)|\\begin\{(\w+\*?)\}.*?\\end\{\1\}"
    # A dollar sign before a number is money, unless a formula closes on the same line.
    r"|\$(?![\s\d])[^$\n]*\$|\$\d[^$\n]*?[\\^_={}+*/<>][^$\n]*\$"
    r"|\\[A-Za-z]+\s*(?:\{[^{}]*\})*"
    r"|https?://\S+|\S*[\w/]\.\w+\(\S*|\{[^{}\n]*\}"
    r"|[^\s]*[\d_^=<>\\@#|][^\s]*",
    re.DOTALL,
)
_ABBREVIATION: Final = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|vs|etc|approx|e\.g|i\.e|[A-Z])|[ap]\.m)\.$")
_SENTENCE_END: Final = re.compile(r"[.!?][\"')\u201d]*(?=\s)")


def add_distractor(example: Example, draw: random.Random) -> Example | None:
    """Insert an irrelevant sentence before the last question."""
    label, text, tail = split_question(example.question)
    if next(words(text, min_letters=3), None) is None:
        return None
    start = last_sentence(text)
    gap = "" if start == 0 or text[start - 1].isspace() else " "
    return replace(example, question=f"{label}{text[:start]}{gap}{draw.choice(DISTRACTORS)} {text[start:]}{tail}")


def add_framing(example: Example, draw: random.Random) -> Example | None:
    """Put a sentence before the question, and reword a published preamble that introduces it."""
    label, text, tail = split_question(example.question)
    framed = draw.choice(FRAMES).format(question="\0").replace("\0", text)
    rewording = draw.choice(PREAMBLES)
    preamble = _PREAMBLE.sub(
        lambda match: rewording.format(subject=(match[1] or "various matters").strip()), example.preamble
    )
    return replace(example, question=f"{label}{framed}{tail}", preamble=preamble)


def rename_people(example: Example, draw: random.Random) -> Example | None:
    """Replace first names consistently, except those with a surname or title, who may be public figures."""
    label, text, tail = split_question(example.question)
    names = list(dict.fromkeys(match[0] for match in words(text, min_letters=2) if match[0] in INTERCHANGEABLE))
    if tail:  # In a multiple-choice question, a person named only once may be a scholar or a saint.
        names = [name for name in names if len(re.findall(rf"\b{name}\b", text)) > 1]
    used = {*re.findall(r"\w+", example.question), *re.findall(r"\w+", example.gold)}
    new_names: dict[str, str] = {}
    for name in names:
        unused = [other for other in INTERCHANGEABLE[name] if other not in used]
        if _is_public_figure(name, text) or name in re.findall(r"\w+", f"{tail} {example.gold}") or not unused:
            continue
        new_names[name] = draw.choice(unused)
        used.add(new_names[name])
    if not new_names:
        return None
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, new_names))})\b(?![_\d])")
    return replace(example, question=f"{label}{pattern.sub(lambda match: new_names[match[0]], text)}{tail}")


def _is_public_figure(name: str, text: str) -> bool:
    """Whether the name is anywhere next to a capitalized word that is neither a first name nor a sentence start."""
    for match in re.finditer(rf"\b{re.escape(name)}\b", text):
        after = re.match(r"(?:\.? )([A-Z][\w.]*)", text[match.end() :])
        if after is not None and text[match.end()] != ".":
            return True
        before = re.search(r"([^\s]+)\s+$", text[: match.start()])
        if before is not None and before[1][0].isupper() and before[1] not in INTERCHANGEABLE:
            sentence_start = re.search(r"(?:^|[.!?][\"')\u201d]*\s+)$", text[: before.start()])
            if sentence_start is None or before[1].endswith("."):
                return True
    return False


def add_typos(example: Example, draw: random.Random) -> Example | None:
    """Swap two letters or drop one in a few words of at least four letters, never the first or the last letter."""
    label, text, tail = split_question(example.question)
    candidates = [
        match
        for match in words(text, min_letters=4)
        if not match[0].isupper() and match[0] not in INTERCHANGEABLE and not _NUMBER_WORDS.fullmatch(match[0])
    ]
    if not candidates:
        return None
    chosen = draw.sample(candidates, max(1, len(candidates) // _WORDS_PER_TYPO))
    for match in sorted(chosen, key=lambda match: match.start(), reverse=True):
        text = f"{text[: match.start()]}{_misspelled(match[0], draw)}{text[match.end() :]}"
    return replace(example, question=f"{label}{text}{tail}")


def _misspelled(word: str, draw: random.Random) -> str:
    swaps = [index for index in range(1, len(word) - 2) if word[index] != word[index + 1]]
    if swaps and draw.random() < 0.5:
        index = draw.choice(swaps)
        return f"{word[:index]}{word[index + 1]}{word[index]}{word[index + 2 :]}"
    index = draw.randrange(1, len(word) - 1)
    return word[:index] + word[index + 1 :]


def split_question(question: str) -> tuple[str, str, str]:
    """Split into label, text and tail: a leading `Question:`, the text, and the options or a final `Answer:`."""
    label = _LABEL.match(question)
    start = label.end() if label else 0
    following = _OPTIONS.search(question, start) or _ANSWER_CUE.search(question, start)
    end = following.start() if following else len(question)
    while end > start and question[end - 1].isspace():
        end -= 1
    return question[:start], question[start:end], question[end:]


def protected_ranges(text: str) -> list[tuple[int, int]]:
    """The (start, end) of numbers, LaTeX and code, in order."""
    return [match.span() for match in PROTECTED.finditer(text)]


def words(text: str, *, min_letters: int) -> Iterator[re.Match[str]]:
    """The words with at least `min_letters` letters outside of protected ranges."""
    ranges = protected_ranges(text)
    for match in re.finditer(rf"[^\W\d_]{{{min_letters},}}", text):
        if not any(start < match.end() and match.start() < end for start, end in ranges):
            yield match


def last_sentence(text: str) -> int:
    """The start of the last question, or of the last sentence if there is no question; 0 for a single sentence."""
    ranges = protected_ranges(text)
    starts = [0]
    for match in _SENTENCE_END.finditer(text):
        inside = any(start < match.start() < end - 1 for start, end in ranges)
        if not inside and not _ABBREVIATION.search(text[: match.start() + 1]):
            starts.append(match.end() + len(text[match.end() :]) - len(text[match.end() :].lstrip()))
    starts = [start for start in starts if start < len(text)]
    ends = [*starts[1:], len(text)]
    questions = [
        start for start, end in zip(starts, ends, strict=True) if text[start:end].rstrip("\"') \n").endswith("?")
    ]
    return (questions or starts)[-1] if starts else 0
