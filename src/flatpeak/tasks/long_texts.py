"""Tokens of texts that may be far too long: the time depends on the limit instead of the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_ALWAYS_WHOLE: Final = 100_000
"""Texts of up to this many characters are always tokenized whole."""
_USUAL_TOKEN: Final = 16
"""The characters of a token; most have fewer."""
_CUT_MARGIN: Final = 1000
"""The tokens that a cut through a text may change; usually a few."""


def bounded_tokens(text: str, limit: int, *, encode: Callable[[str], list[int]]) -> tuple[int, ...]:
    """The token ids of a text; of a long text that exceeds the limit, only those of its beginning.

    A long text is measured by beginnings of growing length, because to tokenize 50 MB takes minutes.
    """
    window = whole_up_to(limit)
    while window < len(text):
        beginning = encode(text[:window])
        if len(beginning) > limit + _CUT_MARGIN:
            return tuple(beginning)
        window *= 2
    return tuple(encode(text))


def whole_up_to(limit: int) -> int:
    """The characters up to which a text is tokenized whole."""
    return max(_ALWAYS_WHOLE, _USUAL_TOKEN * (limit + _CUT_MARGIN))
