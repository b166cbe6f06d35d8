"""The spelling of gold answers."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(-?)((?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)?)(?:\.(\d+))?")
_INTEGER = re.compile(r"-?\d+")


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
