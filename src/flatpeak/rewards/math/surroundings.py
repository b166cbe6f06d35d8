r"""Words around an answer that change nothing: `The answer is 5`, `x = 5 \text{ since } x > 0`, `5 (answer)`."""

from __future__ import annotations

import re
from typing import Final

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
_ANOTHER: Final = re.compile(r"\b(?:or|if|else|otherwise|unless|alternatively|maybe|but)\b", re.IGNORECASE)
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
    if match is not None and _MATHEMATICS.search(match["body"]) and not _ANOTHER.search(match["reason"]):
        text = match["body"]
    return _UNIT_IN_PARENTHESES.sub(r"\\text{(\1)}", text)
