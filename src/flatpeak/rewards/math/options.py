r"""Letters of multiple choice: `\textbf{(B)}\ 5`, `B) 5`, `Option A`, `(a)`."""

from __future__ import annotations

import re
from typing import Final

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
