"""The normal form of a question: what two rows share when they ask the same thing of the same numbers."""

from __future__ import annotations

import re
import unicodedata

# A number keeps its inner signs (1.5, 3:4) and a final "!", so that 5! and 5 stay apart; a symbol such as + or ( is
# a token of its own; what the last alternative leaves out is punctuation.
_TOKEN = re.compile(r"\.?\d+(?:[.,:/]\d+)*!?|[^\W\d_]+|[^\w\s.,;:!?'\"`’‘“”…]|_")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_HYPHEN = re.compile(r"(?<=[^\W\d_])-(?=[^\W\d_])")
_DIGIT = re.compile(r"\d")
NUMBER = "#"


def question_key(question: str) -> str:
    """The question without case, punctuation and spacing; numbers and symbols of arithmetic are kept."""
    return " ".join(_tokens(question))


def word_set(question: str) -> frozenset[str]:
    """The words of the question, every number masked: what its wording is made of, whatever it counts."""
    return frozenset(NUMBER if _DIGIT.search(token) else token for token in _tokens(question))


def _tokens(question: str) -> list[str]:
    text = unicodedata.normalize("NFKC", question).casefold()
    return _TOKEN.findall(_THOUSANDS.sub("", _HYPHEN.sub(" ", text)))
