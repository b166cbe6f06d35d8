"""The verdict of the rules on an extracted answer, and what of the rest is worth asking a computer algebra system."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from flatpeak.rewards.math.equality import equal
from flatpeak.rewards.math.intervals import Reading, has_words
from flatpeak.rewards.math.nodes import OverLimitError, UndefinedError
from flatpeak.rewards.math.normalize import clean
from flatpeak.rewards.math.structures import read
from flatpeak.rewards.math.values import PRECISE

_TEXT: Final = re.compile(r"\\text\s*\{([^{}]*)\}")
_GOLD: Final = re.compile(r"\(?\s*([A-J])\s*\)?\.?")
_NAMED: Final = r"(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)\s*:?\s*)"
_CHOSEN: Final = re.compile(
    rf"{_NAMED}?[(\[]\s*(?P<bracketed>[A-J])\s*[)\]]\s*[.:,]?(?P<after_bracket>.*)"
    rf"|{_NAMED}?(?P<labelled>[A-J])\s*(?:\)|(?P<point>[.:])(?=\s|$))(?P<after_label>.*)"
    rf"|{_NAMED}(?P<named>[A-J])\.?",
    re.IGNORECASE | re.DOTALL,
)
_ANOTHER: Final = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])|[(\[]\s*[a-j]\s*[)\]]")
_ABOUT_THE_LETTER: Final = re.compile(
    r"\s*(?:[?/&|+\-*^_=<>]|\\(?:cdot|times|cup|cap|setminus|pm|mp|le|ge|ne|in|approx|to|Rightarrow)\b"
    r"|(?:and|or|but|nor|is|was|isn't|are|does|not|wrong|incorrect|false|no)\b(?! enough))",
    re.IGNORECASE,
)


def gold_letter(text: str) -> str | None:
    """The letter that a cleaned gold answer is: `B`, `(B)`, `\\text{(B)}`."""
    match = _GOLD.fullmatch(_plain(text))
    return None if match is None else match[1]


def chosen_letter(text: str) -> str | None:
    """The letter that a cleaned answer names, alone or before the option's text; None if it names none or another.

    A bare letter is left to the rules: it may be a variable.
    """
    match = _CHOSEN.fullmatch(_plain(text))
    if match is None:
        return None
    letter = match["bracketed"] or match["labelled"] or match["named"]
    if letter == "i" or (match["point"] and letter.islower()):  # a number, and the end of a word
        return None
    rest = match["after_bracket"] or match["after_label"] or ""
    if _ANOTHER.search(rest) or _ABOUT_THE_LETTER.match(rest):
        return None
    return letter.upper()


def _plain(text: str) -> str:
    return _TEXT.sub(r"\1 ", text).strip()


_LEAD: Final = (
    r"(?:(?:so|thus|hence|therefore),?\s*)?(?:(?:the|our|my)\s+)?(?:(?:final|correct)\s+)?(?:answer|ans\b\.?|solution|result)"
    r"\s*(?:is\s*:?|:|=)\s*|(?:最终)?答案\s*(?:是|为|:)\s*:?\s*"
)
_PREFIXES: Final = (
    (re.compile(rf"^\\text\s*\{{\s*(?:{_LEAD})\}}\s*(?=\S)", re.IGNORECASE), ""),
    (re.compile(rf"^\\text\s*\{{\s*(?:{_LEAD})(?=[^\s}}])", re.IGNORECASE), r"\\text{"),
    (re.compile(rf"^(?:{_LEAD})(?=\S)", re.IGNORECASE), ""),
)
_NOTE: Final = re.compile(
    r"\s*(?:\(\s*(?:final )?(?:answer|ans)\.?\s*\)|\\text\s*\{\s*\(\s*(?:final )?(?:answer|ans)\.?\s*\)\s*\}"
    r"|\(\s*\\text\s*\{\s*(?:final )?(?:answer|ans)\.?\s*\}\s*\))$",
    re.IGNORECASE,
)
_REASON: Final = re.compile(
    r"^(?P<body>.*?\S)[\s,;]*(?:\(\s*)?(?:\\text\s*\{[\s,;]*(?:\(\s*)?)?(?<![A-Za-z])(?:since|because)\b(?P<reason>.*)$",
    re.IGNORECASE,
)
_MATHEMATICS: Final = re.compile(r"\d|\\[a-z]|[=<>]")
_ANOTHER_ANSWER: Final = re.compile(r"\b(?:or|if|else|otherwise|unless|alternatively|maybe|but)\b", re.IGNORECASE)
_UNIT_IN_PARENTHESES: Final = re.compile(r"\(\s*\\text\s*\{([^{}()]*)\}\s*\)$")


def bare_answer(text: str) -> str:
    """A text from `clean` without an announcement before it, a reason after it, or a note that it is the answer."""
    for prefix, replacement in _PREFIXES:
        stripped = prefix.sub(replacement, text, count=1)
        if stripped != text:
            text = stripped
            break
    text = _NOTE.sub("", text) or text
    match = _REASON.match(text)
    if match is not None and _MATHEMATICS.search(match["body"]) and not _ANOTHER_ANSWER.search(match["reason"]):
        text = match["body"]
    return _UNIT_IN_PARENTHESES.sub(r"\\text{(\1)}", text)


_PROSE: Final = re.compile(r"\\text|\\[a-z]?dots|\.\.")
_OPERATORS: Final = re.compile(r"\\(?:int|sum|prod|lim|max|min|gcd|lcm|cap|setminus|bmod|det|sup)(?![A-Za-z])")
_RELATIONS: Final = frozenset({"equation", "inequality"})


def rule_verdict(answer: str, gold: str, *, precise: bool = True) -> bool | None:
    """What the rules say of an extracted answer and a gold answer; None where they say nothing.

    An answer beyond a limit is False: no gold is. A gold beyond one is an OverLimitError. Without `precise`, values are
    compared as fractions and in double precision only, which is always fast, and equal irrational ones stay open.
    """
    if not answer.strip() or not gold.strip() or answer.strip() == gold.strip():
        return answer.strip() == gold.strip()
    read_answer(gold)
    token = PRECISE.set(precise)
    try:
        return _rules(answer, gold)
    except (OverLimitError, UndefinedError):
        return False
    finally:
        PRECISE.reset(token)


def worth_asking(answer: str, gold: str) -> bool:
    """Whether math-verify is asked of a pair that the rules cannot decide.

    It reads as much of a text as it understands, a 5 of `5\\ldots` and of `5\\text{ of } 6`: it is asked only of texts
    without words or dots, whose braces balance, and of those that the rules cannot read only where there is an
    operator that it is known for.
    """
    (given, stated), (expected, reference) = read_answer(answer), read_answer(gold)
    if any(_PROSE.search(text) or has_words(text) or not _balanced(text) for text in (given, expected)):
        return False
    if reference.kind != stated.kind and not _RELATIONS.isdisjoint((reference.kind, stated.kind)):
        return False
    readable = not _unread(stated) and not _unread(reference)
    return readable or any(_OPERATORS.search(text) is not None for text in (given, expected))


@lru_cache(maxsize=8192)
def read_answer(text: str, *, join_thousands: bool = True) -> tuple[str, Reading]:
    """(cleaned, read); OverLimitError if it is too long or too deep."""
    cleaned = clean(text, join_thousands=join_thousands)
    return cleaned, read(bare_answer(cleaned))


def normalized(answer: str) -> str:
    """An extracted answer in one spelling, for counting votes: `3/4` for every spelling of a rational number."""
    try:
        cleaned, reading = read_answer(answer)
        while reading.kind == "named":
            reading = reading.items[0]
        exact = reading.expression.exact if reading.kind == "scalar" and reading.expression is not None else None
        return "".join(cleaned.split()) if exact is None else str(exact)
    except Exception:  # over a limit, without a value, too long for a decimal: nothing a text does may stop a run
        return "".join(answer.split())[:256]


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0


def _rules(answer: str, gold: str) -> bool | None:
    (given, stated), (expected, reference) = read_answer(answer), read_answer(gold)
    if not given or not expected or given == expected:
        return given == expected != ""
    letter = gold_letter(expected)
    if letter is not None and (chosen := chosen_letter(bare_answer(given))) is not None:
        return chosen == letter
    verdict = equal(reference, stated)
    return _as_lists(gold, answer) if verdict is False and "," in gold + answer else verdict


def _as_lists(gold: str, answer: str) -> bool | None:
    """With `81,256` as two numbers, where the other is a list: it has several commas, or spaces after them."""
    readings = [[read_answer(text)[1], read_answer(text, join_thousands=False)[1]] for text in (gold, answer)]
    if "list" not in (readings[0][0].kind, readings[1][0].kind):
        return False
    return equal(readings[0][1], readings[1][1])


def _unread(reading: Reading) -> bool:
    return reading.kind == "unread" or any(map(_unread, reading.items))
