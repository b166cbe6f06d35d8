"""The verdict of the rules on an extracted answer, and what of the rest is worth asking a computer algebra system."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from flatpeak.rewards.math.arithmetic import UndefinedError
from flatpeak.rewards.math.clean import clean
from flatpeak.rewards.math.compare import equal
from flatpeak.rewards.math.limits import OverLimitError
from flatpeak.rewards.math.options import chosen_letter, gold_letter
from flatpeak.rewards.math.reading import Reading, has_words
from flatpeak.rewards.math.structures import read
from flatpeak.rewards.math.surroundings import bare_answer
from flatpeak.rewards.math.values import PRECISE

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
