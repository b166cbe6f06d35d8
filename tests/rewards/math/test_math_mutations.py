r"""Gold answers of published data sets, changed in value and written in other ways.

Each change gives another value: what could keep it (a digit of 0, 3 9/8 beside 3 3/8) is left out.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Final

import pytest
from test_math_data import golds

from support.graded_cases import grade

pytestmark = pytest.mark.skipif("FLATPEAK_DATA" not in os.environ, reason="FLATPEAK_DATA names no folder of data sets")

NAMES: Final = ("gsm8k", "math", "asdiv", "svamp", "mawps")
SIZES: Final = {"gsm8k": 8792, "math": 12500, "asdiv": 2215, "svamp": 1000, "mawps": 2065}
Rewrite = Callable[[str, random.Random], str | None]

_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")
_PLAIN: Final = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_WORDS: Final = re.compile(r"[A-Za-z]{3,}")


_HEDGES: Final = (
    *(
        "{0} or {1}",
        "not {0}",
        "about {0}",
        "{0}, {1}",
        "> {0}",
        "{0} million",
        "{0} squared",
        "{0} hundredths",
        "{0}..",
    ),
    *("{0}/{1}1", "{0} \\ne {1}", "{0}!!", "{0} wrong", "{0} lakh", "{0}\\infty", "{0} = {1}", "{1} = {0}", "{0}万"),
    *(
        "\\text{{The answer is not }}{0}",
        "{0} \\Rightarrow {1}",
        "{1} \\Rightarrow {0}",
        "(A) {0}",
        "3\\color{{red}}{{{0}}}",
    ),
    *(
        "{0} \\text{{ if }} x>0",
        "x \\ge {0}",
        "[{0},{1}]",
        "\\overline{{{0}}}",
        "{0}_9",
        "{0} R 3",
        "\\color{{white}}{{{0}}}",
    ),
    "\\begin{{cases}} {0} & x>0 \\\\ {1} & x<0 \\end{{cases}}",
    "{0} \\text{{ since }} x>0, \\text{{ else }} {1}",
)
"""Texts that state something else than the number in them; {1} is another number."""
_SMALL: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS: Final = "twenty thirty forty fifty sixty seventy eighty ninety"


def _spliced(text: str, start: int, end: int, new: str) -> str:
    return text[:start] + new + text[end:]


def other_digit(gold: str, rng: random.Random) -> str | None:
    positions = [match.start() for match in re.finditer(r"\d", gold)]
    if not positions or re.search(r"\d\s*\\[dt]?frac", gold):  # 3 9/8 is no mixed number, and may be 3 3/8 as a product
        return None
    place = rng.choice(positions)
    return _spliced(gold, place, place + 1, rng.choice([digit for digit in "123456789" if digit != gold[place]]))


def longer_number(gold: str, rng: random.Random) -> str | None:
    numbers = list(re.finditer(r"(?<![\d,.}])[1-9]\d*(?![\d,.}])", gold))
    if not numbers or re.search(r"frac\s*\d", gold):  # \frac121 is a half times 1
        return None
    number = rng.choice(numbers)
    return _spliced(gold, number.end(), number.end(), rng.choice("0123456789"))


def negated(gold: str, rng: random.Random) -> str | None:
    if not _PLAIN.fullmatch(gold) or not gold.strip("-0.,"):
        return None
    return gold[1:] if gold.startswith("-") else f"-{gold}"


def plus_one(gold: str, rng: random.Random) -> str | None:
    if re.search(r"[,;=<>:&]|\\(?:text|mbox|in|cup|pm|[lg]e|begin|emptyset)|\^\{?\\circ|%", gold) or "_" in gold:
        return None
    if gold == "-1":  # twice it and one more
        return None
    return rng.choice([f"{gold}+1", f"1+{gold}", f"2({gold})+1", f"({gold})-2"])


def other_ends(gold: str, rng: random.Random) -> str | None:
    if not re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", gold):
        return None
    return (
        {"(": "[", "[": "("}[gold[0]] + gold[1:] if rng.random() < 0.5 else gold[:-1] + {")": "]", "]": ")"}[gold[-1]]
    )


def swapped(gold: str, rng: random.Random) -> str | None:
    match = re.fullmatch(r"([(\[])([^()\[\],]*),([^()\[\],]*)([)\]])", gold)
    if match is None or match[2].strip() == match[3].strip():
        return None
    return f"{match[1]}{match[3]},{match[2]}{match[4]}"


def other_unit(gold: str, rng: random.Random) -> str | None:
    match = re.fullmatch(r"(-?[\d.,]+) \(([a-z ]+)\)|(.*\d)\s*\\(?:text|mbox)\{\s*([a-z ]+)\}(?:\^\d)?", gold)
    if match is None or "unit" in gold:  # which unit is left open
        return None
    number = match[1] or match[3]
    unit = rng.choice(["zebras", r"km^3", "thousand", "hundredths", "squared", "mil", "per hour", "元"])
    return None if (match[2] or match[4]).strip() == unit else rf"{number}\text{{ {unit}}}"


def hedged(gold: str, rng: random.Random) -> str | None:
    if not _PLAIN.fullmatch(gold) or abs(float(gold.replace(",", ""))) <= 2:  # 2! is 2, and 0/5 is 0
        return None
    number = float(gold.replace(",", ""))
    return rng.choice(_HEDGES).format(gold, f"{2 * abs(number) + 3:.0f}")


def wrapped(gold: str, rng: random.Random) -> str | None:
    changed = other_digit(gold, rng)
    return None if changed is None else rng.choice(WRAPPINGS)(changed, rng)


def _format(form: str) -> Rewrite:
    return lambda gold, rng: form.replace("@", gold)


_FRAMES: Final = (
    *(r"\text{The answer is }@", r"\text{Answer: }@", "@。", r"\color{blue}{@}", r"\begin{aligned} @ \end{aligned}"),
    *(
        r"@\quad\text{(answer)}",
        r"@ \text{ since } x>0",
        r"@ \;(\text{final answer})",
        "答案：@",
        r"\textcolor{red}{@}",
    ),
    *("  @ ", "$@$", r"\(@\)", r"\displaystyle @", "@."),
)
WRAPPINGS: Final[tuple[Rewrite, ...]] = tuple(map(_format, _FRAMES))
MUTATIONS: Final[tuple[Rewrite, ...]] = (
    other_digit, longer_number, negated, plus_one, other_ends, swapped, other_unit, hedged, wrapped,
)  # fmt: skip


def _spelled(number: int) -> str:
    small, tens = _SMALL.split(), _TENS.split()
    if number < 20:
        return small[number]
    if number < 100:
        return tens[number // 10 - 2] + (f"-{small[number % 10]}" if number % 10 else "")
    scale, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = f" {_spelled(number % scale)}" if number % scale else ""
    return f"{_spelled(number // scale)} {name}{rest}"


def other_spelling(gold: str, rng: random.Random) -> str | None:
    """Of a plain number."""
    if not _PLAIN.fullmatch(gold):
        return None
    bare = gold.replace(",", "")
    whole = int(bare) if bare.lstrip("-").isdigit() else None
    spellings = [
        "@.0" if whole is not None else "@0",
        "x = @",
        "+@" if not gold.startswith("-") else "@",
        r"\frac{@}{1}",
    ]
    spellings += [
        "@ eggs",
        r"@\text{ cm}^2",
        "@ 元",
        "@厘米",
        r"@\,\frac{\text{m}}{\text{s}}",
        r"@\ \Omega",
        "Rs. @",
        r"\pounds @",
    ]
    spellings += [
        r"2x = 4, x>0 \Rightarrow x = @",
        r"\begin{aligned} x &= @ \end{aligned}",
        "@ red apples",
        "@ (dollars)",
    ]
    if gold.startswith("-"):
        spellings = [form for form in spellings if not form.startswith(("Rs", r"\pounds"))]
    if whole is not None and 0 <= whole < 10**6:
        spellings.append(_spelled(whole))
    return rng.choice(spellings).replace("@", bare)


def same_text(gold: str, rng: random.Random) -> str | None:
    if not gold or gold[-1] in ".,;":  # a sentence ends once
        return None
    changed = rng.choice(WRAPPINGS)(gold, rng)
    # `Bryan, since ...` is prose.
    return gold + " " if changed is not None and "since" in changed and not re.search(r"\d", gold) else changed


def _cases(name: str, rewrites: tuple[Rewrite, ...]) -> list[tuple[str, str]]:
    rng, cases = random.Random(name), []
    for gold in golds(name):
        for rewrite in rng.sample(rewrites, len(rewrites)):
            changed = rewrite(gold, rng)
            if changed is not None and changed != gold:
                cases.append((gold, changed))
                break
    return cases


def _verdicts(name: str, cases: list[tuple[str, str]]) -> list[bool | None]:
    started = time.monotonic()
    verdicts = grade([(rf"So it is $\boxed{{{changed}}}$.", gold) for gold, changed in cases])
    sys.stdout.write(f"{name}: {len(cases)} of {SIZES[name]} golds rewritten, {time.monotonic() - started:.1f} s\n")
    return verdicts


@pytest.mark.parametrize("name", NAMES)
def test_a_gold_answer_that_is_changed_in_value_is_wrong(name: str) -> None:
    cases = _cases(name, MUTATIONS)
    assert len(cases) > 0.9 * SIZES[name]
    verdicts = _verdicts(name, cases)
    assert [case for case, verdict in zip(cases, verdicts, strict=True) if verdict is not False] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_gold_answer_that_is_written_in_another_way_is_right(name: str) -> None:
    cases = _cases(name, (other_spelling, same_text))
    assert len(cases) > 0.99 * SIZES[name]
    verdicts = _verdicts(name, cases)
    assert [case for case, verdict in zip(cases, verdicts, strict=True) if verdict is not True] == []
