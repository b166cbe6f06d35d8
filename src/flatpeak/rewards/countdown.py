"""The reward for Countdown puzzles: make a target from given numbers. Arithmetic is parsed, never executed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from flatpeak.errors import UserError
from flatpeak.rewards.base import Rule
from flatpeak.rewards.numeric_answer import parse_number
from flatpeak.utils.answers import judged_text, last_answer

if TYPE_CHECKING:
    from flatpeak.types import Completion, Example, Prompt, Score

MAX_CHARACTERS: Final = 256
TOLERANCE: Final = Fraction(1, 100_000)
_SIGNS: Final[dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ALLOWED: Final = re.compile(r"[0-9+\-*/() ]+")


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and the integers in it, in order; None unless it is plain arithmetic.

    Allowed are non-negative integers, `+ - * /`, signs, parentheses and whitespace, line breaks included. Powers, floor
    division, points, calls, division by zero and more than `MAX_CHARACTERS` characters are refused.
    """
    text = " ".join(expression.split())
    if len(text) > MAX_CHARACTERS or not _ALLOWED.fullmatch(text):
        return None
    numbers: list[int] = []
    try:
        return _value(ast.parse(text, mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, numbers)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(left, numbers), _value(right, numbers))
    raise ValueError(f"not arithmetic: {type(node).__name__}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CountdownReward(Rule):
    """1 if the last answer block uses each of the row's `nums` exactly once and |value - target| < 1e-5.

    Otherwise `format_score` if there is a complete answer block with any content, else 0. The row's columns are those
    of `Jiayi-Pan/Countdown-Tasks-3to4`; without a column `target`, the target is the gold answer.
    """

    format_score: float = 0.0
    """0.1 in TinyZero's reward (Jiayi-Pan/TinyZero)."""

    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """1.0, `format_score` or 0.0; UserError with the row's name if its columns are unusable."""
        nums, target = _puzzle(prompt.example)
        content = last_answer(judged_text(completion, prompt))
        if content is None:
            return 0.0
        evaluated = evaluate(content)
        if evaluated is None:
            return self.format_score
        value, numbers = evaluated
        return 1.0 if sorted(numbers) == sorted(nums) and abs(value - target) < TOLERANCE else self.format_score

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The expression without whitespace, or None, for majority votes."""
        content = last_answer(judged_text(completion, prompt))
        return None if content is None or evaluate(content) is None else "".join(content.split())


def _puzzle(example: Example) -> tuple[list[int], Fraction]:
    listed = example.columns.get("nums")
    try:
        nums = [operator.index(number) for number in listed]  # type: ignore[union-attr]
    except TypeError:
        raise UserError(
            f"row {example.id!r}: the countdown reward needs a list of integers as column `nums`, got {listed!r}"
        ) from None
    given = example.columns.get("target", example.gold)
    target = parse_number(str(given))
    if target is None:
        raise UserError(f"row {example.id!r}: the countdown reward needs a number as column `target`, got {given!r}")
    return nums, target
