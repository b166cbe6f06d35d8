r"""The gold answers of published data sets, against themselves and against each other.

Whether two different golds are equal is decided here by other means than the grader's: exact fractions and spelling.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import pytest

from flatpeak.rewards.math.unevaluated import is_evaluated, only_evaluated
from support.graded_cases import grade

pytestmark = pytest.mark.skipif("FLATPEAK_DATA" not in os.environ, reason="FLATPEAK_DATA names no folder of data sets")

_SPELLING: Final = (
    (r"\\(?:left|right|displaystyle|!|,|;|quad)(?![A-Za-z])|\\ ", ""),
    (r"\{,\}", ","),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(?:textbf|textnormal|mathrm|mbox|mathbf)(?![A-Za-z])", r"\\text"),
    (r"\\frac *(\d) *(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac *(\d) *\{", r"\\frac{\1}{"),
    (r"\\sqrt *(\d)", r"\\sqrt{\1}"),
    (r"\^\{?\\circ\}?|\\?%|\\?\$", ""),
    (r"([\d}]) *\\text\{[^{}]*\}(?:\^\{?\d\}?)?", r"\1"),
    (r"(?<=\d) *\([A-Za-z][^()]*\)", ""),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
)


def rows(path: str) -> Iterator[dict[str, Any]]:
    with (Path(os.environ["FLATPEAK_DATA"]) / path).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def plain(value: float) -> str:
    return format(Decimal(repr(value)).normalize(), "f")


def golds(name: str) -> list[str]:
    match name:
        case "gsm8k":
            return [
                row["answer"].rpartition("####")[2].strip()
                for component in ("train", "test")
                for row in rows(f"gsm8k/{component}.jsonl")
            ]
        case "math":
            return [
                row["answer"]
                for component in ("train", "validation")
                for row in rows(f"math_answers/{component}.jsonl")
            ]
        case "asdiv":
            return [row["answer"] for row in rows("asdiv/test.jsonl")]
        case "svamp":
            return [plain(row["Answer"]) for row in rows("svamp/test.jsonl")]
        case _:
            return [plain(row["target"]) for row in rows("mawps/test.jsonl")]


def key(gold: str) -> object:
    """What equal golds share: a fraction, the keys of a list in any order, or the spelling without its liberties."""
    text = gold.strip().rstrip(".").strip()
    for pattern, replacement in _SPELLING:
        text = re.sub(pattern, replacement, text)
    text = text.replace(" ", "")
    if named := re.fullmatch(r"[A-Za-z]=(.*)", text):
        text = named[1]
    if wrapped := re.fullmatch(r"\\text\{(.*)\}", text):
        text = wrapped[1]
    if mixed := re.fullmatch(r"(-?)(\d+)\\frac\{(\d+)\}\{(\d+)\}", text):
        value = int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))
        return -value if mixed[1] else value
    if fraction := re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}", text):
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}".replace("--", "")
    if re.fullmatch(r"-?\d+/[1-9]\d*|-?(\d+\.?\d*|\.\d+)", text):
        return Fraction(text)
    entries = text.split(",")
    if len(entries) > 1 and not re.search(r"[()\[\]&=]", text):
        return frozenset(Counter(map(key, entries)).items())
    return text


def same(first: str, second: str) -> bool:
    """Whether two golds have one value, and no two units that contradict each other."""
    units = [
        set(re.findall(r"circ|%|\\\$|\\(?:text|mbox|textnormal) *\{[^{}]*\}|\([a-z][^()]*\)$", gold))
        for gold in (first, second)
    ]
    return key(first) == key(second) and (units[0] == units[1] or not all(units))


@pytest.mark.parametrize("name", ["gsm8k", "math", "asdiv", "svamp", "mawps"])
def test_every_gold_answer_is_equal_to_itself(name: str) -> None:
    answers = golds(name)
    verdicts = grade([(rf"So it is $\boxed{{{gold}}}$.", gold) for gold in answers])
    assert [gold for gold, verdict in zip(answers, verdicts, strict=True) if verdict is not True] == []


@pytest.mark.parametrize("name", ["gsm8k", "math", "asdiv", "svamp", "mawps"])
def test_every_gold_answer_is_worked_out_beside_itself_even_if_the_question_has_it(name: str) -> None:
    answers = golds(name)
    pairs = only_evaluated([(gold, gold) for gold in answers], [f"Is it ${gold}$?" for gold in answers])
    assert [gold for gold, (answer, _) in zip(answers, pairs, strict=True) if answer is None] == []
    # In the spellings of models, so that it is not for its text alone.
    respelled = [
        gold.replace(r"\frac", r"\dfrac ").replace("(", r"\left( ").replace(")", r" \right)") for gold in answers
    ]
    pairs = only_evaluated(list(zip(respelled, answers, strict=True)), [""] * len(answers))
    assert [gold for gold, (answer, _) in zip(answers, pairs, strict=True) if answer is None] == []


def test_gold_answers_of_one_value_are_worked_out_beside_each_other() -> None:
    spellings: dict[object, set[str]] = {}
    for gold in golds("math"):
        spellings.setdefault(key(gold), set()).add(gold)
    pairs = [(one, other) for group in spellings.values() for one in group for other in group if one != other]
    assert len(pairs) > 1000
    assert [pair for pair in pairs if not is_evaluated(*pair)] == []


@pytest.mark.parametrize("name", ["gsm8k", "math", "asdiv", "svamp", "mawps"])
def test_a_shuffled_partner_is_equal_only_where_the_values_are(name: str) -> None:
    answers = golds(name)
    partners = random.Random(0).sample(answers, len(answers))
    started = time.monotonic()
    verdicts = grade(
        [(rf"So it is $\boxed{{{partner}}}$.", gold) for gold, partner in zip(answers, partners, strict=True)]
    )
    seconds = time.monotonic() - started
    sys.stdout.write(f"{name}: {len(answers)} shuffled pairs in {seconds:.1f} s\n")
    assert seconds < 60
    compared = list(zip(answers, partners, verdicts, strict=True))
    assert [pair for pair in compared if pair[2] and key(pair[0]) != key(pair[1])] == []
    assert [pair for pair in compared if not pair[2] and same(pair[0], pair[1])] == []
