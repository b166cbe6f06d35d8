"""What the rules cannot decide, asked of math-verify (and so of SymPy), in a process that can be killed."""

from __future__ import annotations

import logging
import sys
from typing import Final

from flatpeak.rewards.math.rules import read_answer, rule_verdict, worth_asking

RECURSION_LIMIT: Final = 1000
DIGITS: Final = 40
"""To which values have to agree where math-verify compares them as decimals; its own 6 let approximations pass."""

# The parser builds its tables, and SymPy its caches, as they are used: after these a worker's first verdict takes 5 to
# 45 ms instead of 60 to 210 ms.
_FIRST: Final = (
    (r"\sum_{k=1}^{2} \frac{k}{2}+\sqrt{2}\cdot\sin(x)", r"\int_0^1 x^2 dx"),
    (r"\lim_{x\to0} x", "0"),
    (r"\max(1,2)", "2"),
)


class Symbolic:
    """(answer, gold) -> whether they are equal, by the rules with all their digits, else by math-verify.

    Unpickling it loads math-verify: a worker does that once, before the clock of its first call runs.
    """

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _load, ()

    def __call__(self, answer: str, gold: str) -> bool:
        """The two as they were extracted. What a text wants of the stack counts as memory."""
        try:
            verdict = rule_verdict(answer, gold)
            if verdict is None:
                return worth_asking(answer, gold) and verify(read_answer(answer)[0], read_answer(gold)[0])
            return verdict
        except RecursionError:
            raise MemoryError from None


def verify(answer: str, gold: str) -> bool:
    """math-verify's verdict on two cleaned texts. Only values count: text that it merely copies does not.

    What it cannot read or compare is not equal. MemoryError and RecursionError, which it would call unequal too, are
    passed on: they are failures.
    """
    try:
        return _verified(answer, gold)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # of the parser and of SymPy, about any text
        return False


def _verified(answer: str, gold: str) -> bool:
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as equal

    config = (LatexExtractionConfig(boxed_match_priority=0),)
    values = []
    for text in (gold, answer):
        # Its own time limits would take the worker's alarm signal away.
        parsed = parse(rf"\boxed{{{text}}}", extraction_config=config, parsing_timeout=None, raise_on_error=True)
        found = [value for value in parsed if not isinstance(value, str)]
        if not found:
            return False
        values.append(found)
    digits = {"float_rounding": DIGITS, "numeric_precision": 2 * DIGITS}
    return bool(equal(*values, **digits, timeout_seconds=None, raise_on_error=True))


def _load() -> Symbolic:
    import math_verify

    logging.getLogger(math_verify.__name__).setLevel(logging.CRITICAL)
    sys.setrecursionlimit(RECURSION_LIMIT)
    for answer, gold in _FIRST:
        verify(answer, gold)
    return Symbolic()
