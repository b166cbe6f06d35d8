"""The score in a judge's verdict."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from typing import Final

from flatpeak.rewards.number import parse_number
from flatpeak.utils.answers import after_thinking

_TAG: Final = re.compile(r"<score>([^<>]*)</score>", re.IGNORECASE)
_NUMBER: Final = r"(?:(?<![\w.)\]])-)?(?<![A-Za-z0-9_])(?<![0-9][.,])\.?[0-9][0-9.,]*+(?!\w)"
_RATED: Final = re.compile(rf"({_NUMBER})(?:\s*(?:/|out of)\s*({_NUMBER}))?", re.IGNORECASE)


def parse_judge_score(text: str, *, low: float = 0.0, high: float = 1.0) -> float | None:
    """The score of a verdict, or None if it has none between `low` and `high`.

    The judge's own thinking (all up to `</think>`) does not count. Then the last `<score>x</score>` decides, even if x
    is no valid score; without such a tag, the last number. `x/y` and `x out of y` are x, if y is `high`, else nothing.
    A score out of range is no score: it is never clipped into one.
    """
    verdict = after_thinking(text).replace("\u2212", "-")
    tags = _TAG.findall(verdict)
    rated = _RATED.fullmatch(tags[-1].strip()) if tags else _last(verdict)
    if rated is None:
        return None
    score, scale = rated.groups()
    value, bottom, top = _read(score), Fraction(str(low)), Fraction(str(high))
    if value is None or not bottom <= value <= top or (scale is not None and _read(scale) != top):
        return None
    return float(value)


def _last(verdict: str) -> re.Match[str] | None:
    matches = deque(_RATED.finditer(verdict), maxlen=1)
    return matches[0] if matches else None


def _read(number: str) -> Fraction | None:
    return parse_number(number.rstrip(".,"))
