"""The reward for numeric answers, and exact reading of numbers, without rounding and without slow long inputs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from flatpeak.errors import UserError
from flatpeak.rewards.base import Rule
from flatpeak.rewards.math import read_number
from flatpeak.rewards.math.extract import block_answer
from flatpeak.rewards.math.extract import extract_answer as extract_text
from flatpeak.rewards.math.normalize import spelled_fractions
from flatpeak.rewards.math.unevaluated import is_evaluated
from flatpeak.rewards.math.units import DENOMINATORS, MAGNITUDES
from flatpeak.utils.answers import after_thinking, judged_text

if TYPE_CHECKING:
    from flatpeak.rewards.base import NumberExtraction
    from flatpeak.types import Completion, Prompt, Score

MAX_CHARACTERS: Final = 1000
"""Longer texts are not read as numbers: reading takes quadratic time, and a policy can emit any number of digits."""

_MINUS_SIGN: Final = {ord("\u2212"): "-"}
_CURRENCY: Final = "$€£¥₹"
_INTEGER: Final = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER: Final = re.compile(
    rf"(?P<sign>[+-]?)(?:[{_CURRENCY}]\s*(?P<inner_sign>[+-]?))?"
    rf"(?:(?P<decimal>{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)|(?P<numerator>{_INTEGER})\s*/\s*(?P<denominator>{_INTEGER}))"
    rf"\s*[{_CURRENCY}%]?"
)

# Published patterns of the lm-evaluation-harness task gsm8k; the strict one also allows a dollar sign here.
_GSM8K_STRICT: Final = re.compile(r"#### (?P<number>-?\$?-?[0-9.,]*[0-9])(?P<rest>.{0,32})")
_NUMBER_GOES_ON: Final = re.compile(
    r"[eE][+-]?[0-9]|[\^!]|[,;]?\s*(?:(?:[-+*/=×÷^:]|\\[a-z]+|or\b|and\b|to\b)\s*[$({\\-]*)?\$?[0-9]"
)
"""A continuation that turns the preceding digits into another number, or into several numbers."""
_GSM8K_FLEXIBLE: Final = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")

# A whole run of digits, points, commas and slashes, so that a malformed run is refused instead of read in part.
_RUN: Final = re.compile(
    rf"(?<![A-Za-z0-9_])(?<![0-9][.,/])(?:(?<![)\]])-)?(?:[{_CURRENCY}]-?)?\.?[0-9][0-9.,/]*+(?![eE][+-]?[0-9])"
)


def _improper(match: re.Match[str]) -> str:
    whole, numerator, denominator = (int(digits.replace(",", "")) for digits in match.groups() if digits)
    proper = 0 < numerator < denominator
    return f"{whole * denominator + numerator}/{denominator}" if proper else f"{whole} {numerator}/{denominator}"


_LATEX: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (re.compile("[\u2044\u2215]"), "/"),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (
        re.compile(
            r"(?<![A-Za-z0-9_.,/])([0-9]{1,12}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,3})(?:[^\S\n]|\\[,;: ]|~)*"
            r"(?:\\[dt]?frac\{\s*([0-9]{1,12})\s*\}\{\s*([0-9]{1,12})\s*\}|(?<=\s)([0-9]{1,12})/([0-9]{1,12})(?![0-9/]|[.,][0-9]))"
        ),
        _improper,
    ),
    (re.compile(r"\\[dt]?frac\{\s*(-?[0-9]+)\s*\}\{\s*([0-9]+)\s*\}"), r"\1/\2"),
    (re.compile(r"\\(?:text|mathrm)\{([^{}]*)\}"), r" \1"),
    (re.compile(r"\\[,!]"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
)

_WORD: Final = re.compile(r"\s*-?\s*([^\W\d_]+)")
_CHANGING: Final = frozenset({"k", "mil", "squared", "cubed", "factorial"})
"""Words after a number that change its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberReward(Rule):
    """1 if the extracted number equals a gold number of the row, else 0."""

    extraction: NumberExtraction = "whole"
    evaluated: bool = False
    """Require the answer to be worked out (see `flatpeak.rewards.math.unevaluated`)."""
    numbers_only: bool = True
    """UserError for a row whose gold answer is not a number; otherwise its completions have no score."""

    def check_rows(self, prompts: Iterable[Prompt]) -> None:
        """UserError with the row's name if a gold answer is not a number."""
        for prompt in prompts:
            self._golds(prompt)

    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """1.0 or 0.0; UserError with the row's name if a gold answer is not a number, or missing."""
        golds = self._golds(prompt)
        if not golds:
            return None
        text = judged_text(completion, prompt)
        number = extract_answer(text, self.extraction)
        right = (gold for gold, value in golds.items() if number == value)
        return float(any(not self._leaves_work(text, prompt, gold) for gold in right))

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The extracted number in lowest terms (`3/4`, `-5`), or None, for majority votes."""
        text = judged_text(completion, prompt)
        number = extract_answer(text, self.extraction)
        if number is not None and all(self._leaves_work(text, prompt, gold) for gold in prompt.example.golds):
            return f"{number} to be worked out"
        return None if number is None else str(number)

    def _golds(self, prompt: Prompt) -> dict[str, Fraction]:
        golds = {gold: parse_number(gold) for gold in prompt.example.golds}
        strange = next((gold for gold, number in golds.items() if number is None), None)
        if strange is not None and self.numbers_only:
            raise UserError(
                f"the gold answer {strange[:80]!r} of row {prompt.id!r} is not a number: give the task numeric gold "
                "answers (answer_pattern can cut them out), or use another reward type"
            )
        return {gold: number for gold, number in golds.items() if number is not None}

    def _leaves_work(self, text: str, prompt: Prompt, gold: str) -> bool:
        question = prompt.example.question
        return self.evaluated and leaves_work(text, self.extraction, gold=gold, question=question)


def extract_answer(text: str, extraction: NumberExtraction) -> Fraction | None:
    """The number that a transcript gives as its answer, or None.

    - `whole`: the text after the thinking is the number.
    - `answer_tag`: the last `<answer>` block after the thinking holds it, or a box in it (see `read_number_answer`).
    - `boxed`: the last balanced `\\boxed{}` after the thinking holds it (see `read_number_answer`).
    - `last_number`: the last run of digits after the thinking, including a following magnitude (`18 million`); None if
      the run is malformed, as in `1,00`, or a word changes its value, as in `18 squared`.
    - `gsm8k_strict`: the last `#### N` anywhere; a following magnitude counts. None if it continues as another number
      or names a second number: `18/2`, `18e3`, `1,8`, `18 or 19`.
    - `gsm8k_flexible`: the last thing that looks like a number anywhere; commas, dollar signs and a final point are
      ignored.

    The two for GSM8K follow lm-evaluation-harness, except that both compare values instead of strings. Also, the strict
    one takes the last match instead of the first, and refuses parts of longer numbers, which could otherwise earn
    rewards.
    """
    text = text.translate(_MINUS_SIGN)
    match extraction:
        case "whole":
            return parse_number(after_thinking(text))
        case "answer_tag" | "boxed":
            content = whole_text(text, extraction)
            return None if content is None else read_number_answer(content)
        case "last_number":
            return _last_number(_without_latex(after_thinking(text)))
        case "gsm8k_strict":
            marked = _last_match(_GSM8K_STRICT, text)
            return None if marked is None else _marked_number(marked["number"], marked["rest"])
        case "gsm8k_flexible":
            number = _last_match(_GSM8K_FLEXIBLE, text)
            return None if number is None else parse_number(number.group().replace(",", "").replace("$", ""))


def whole_text(text: str, extraction: NumberExtraction) -> str | None:
    """The text that must be a number as a whole; None for an extraction that matches a pattern instead."""
    match extraction:
        case "whole":
            return after_thinking(text)
        case "answer_tag":
            return block_answer(text)
        case "boxed":
            return extract_text(text, "boxed")
        case _:
            return None


def read_number_answer(content: str) -> Fraction | None:
    """The number in an answer block, read as a mathematical answer (`flatpeak.rewards.math.read_number`), or None.

    It may have units and a percent sign, which are dropped, and a magnitude, which counts: `5 million` is not 5.
    """
    return None if len(content) > MAX_CHARACTERS else read_number(content)


def _last_number(text: str) -> Fraction | None:
    run = _last_match(_RUN, text)
    number = None if run is None else parse_number(run.group().rstrip(".,/"))
    return None if run is None or number is None else in_prose(number, text[run.end() : run.end() + 32])


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def _marked_number(text: str, rest: str) -> Fraction | None:
    """The number after `####`, unless the rest of its line continues it."""
    number = parse_number(text)
    return None if number is None or _NUMBER_GOES_ON.match(rest) else in_prose(number, rest)


def _without_latex(text: str) -> str:
    text = spelled_fractions(text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


def leaves_work(text: str, extraction: NumberExtraction, *, gold: str, question: str) -> bool:
    """Whether the answer is an expression that is not worked out (see `flatpeak.rewards.math.unevaluated`)."""
    answer = whole_text(text, extraction)
    return answer is not None and not is_evaluated(answer, gold, question)


def parse_number(text: str) -> Fraction | None:
    """The exact number if the whole text is a number, else None.

    Read: `-42`, `+5`, `−5` (U+2212), `12.5`, `.5`, `18.`, `3/4`, `1,000`, `$18`, `-$5`, `18 €`, `50%`. A percent sign
    is a unit and is dropped: `50%` is 50. Refused: commas that do not group by three (`1,00`, `0,125`), exponents,
    words, a zero denominator, anything longer than `MAX_CHARACTERS`.
    """
    text = text.strip().translate(_MINUS_SIGN).removesuffix(".")
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    if match["decimal"] is not None:
        value = Fraction(match["decimal"].replace(",", ""))
    else:
        denominator = int(match["denominator"].replace(",", ""))
        if denominator == 0:
            return None
        value = Fraction(int(match["numerator"].replace(",", "")), denominator)
    return -value if "-" in (match["sign"], match["inner_sign"]) else value


def in_prose(number: Fraction, following: str) -> Fraction | None:
    """A number found in prose, with the magnitude that follows it (`18 million`); None if a word changes its value."""
    match = _WORD.match(following)
    word = match[1].lower() if match is not None else ""
    if word in _CHANGING:
        return None
    if (magnitude := MAGNITUDES.get(word.removesuffix("s"))) is not None:
        return number * magnitude
    # Quarters can be coins too.
    if word.endswith("s") and not word.startswith("quarter") and word.removesuffix("s") in DENOMINATORS:
        return number / DENOMINATORS[word.removesuffix("s")]
    return number
