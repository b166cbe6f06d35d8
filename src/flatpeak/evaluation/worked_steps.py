"""GSM8K's worked solutions, `<<48/2=24>>`, read exactly and computed again with other numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

_MARK = re.compile(r"<<([^<>=]{1,200})=([^<>=]{1,60})>>")
Place = Literal["term", "factor", "dividend", "divisor"]
"""How an operand enters its step; `term` is of a sum, a difference, or alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One mark: its expression as a tree over the operands, which stand in their order of reading."""

    tree: ast.expr
    operands: tuple[Fraction, ...]
    places: tuple[Place, ...]
    value: Fraction
    line: str
    """The line of the solution that the mark stands in, without marks."""


def read_steps(rationale: str) -> list[Step]:
    """Every mark, exactly; empty where one cannot be read or is not what it says."""
    steps = []
    for line in rationale.splitlines():
        plain = without_marks(line)
        for match in _MARK.finditer(line):
            try:
                tree = ast.parse(match[1].replace(",", "").replace("$", "").strip(), mode="eval").body
                found = tuple(_literals(tree, "term"))
                operands = tuple(operand for operand, _ in found)
                value = _evaluated(tree, iter(operands))
                if value != Fraction(match[2].replace(",", "").replace("$", "").strip()):
                    return []
            except (SyntaxError, ValueError, ZeroDivisionError):
                return []
            places = tuple(place for _, place in found)
            steps.append(Step(tree=tree, operands=operands, places=places, value=value, line=plain))
    return steps if rationale.count("<<") == len(steps) else []


def without_marks(rationale: str) -> str:
    """The solution as it reads, without its marks and without the last line's `#### 24`."""
    return re.sub(r"^####.*", "", _MARK.sub("", rationale), flags=re.MULTILINE)


def _literals(tree: ast.expr, place: Place) -> Iterator[tuple[Fraction, Place]]:
    """The numbers of an expression from left to right. Raises ValueError for anything but +, -, *, / of numbers."""
    match tree:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            yield from _literals(left, "term")
            yield from _literals(right, "term")
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            yield from _literals(left, "factor")
            yield from _literals(right, "factor")
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            yield from _literals(left, "dividend")
            yield from _literals(right, "divisor")
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            yield (Fraction(ast.unparse(tree)) if isinstance(value, float) else Fraction(value)), place
        case _:
            raise ValueError("not an expression of numbers")


def _evaluated(tree: ast.expr, operands: Iterator[Fraction]) -> Fraction:
    if not isinstance(tree, ast.BinOp):
        return next(operands)
    left, right = _evaluated(tree.left, operands), _evaluated(tree.right, operands)
    if isinstance(tree.op, ast.Add):
        return left + right
    if isinstance(tree.op, ast.Sub):
        return left - right
    return left * right if isinstance(tree.op, ast.Mult) else left / right


Origin = tuple[Literal["question", "percent", "step", "constant"], int]
"""Where an operand comes from: the question's number of that index, the same as a percentage, the step of that index,
or a constant that a word of the question stands for."""


def replayed(
    steps: Sequence[Step], origins: Sequence[Sequence[Origin]], values: Sequence[Fraction]
) -> list[Fraction] | None:
    """Every step's result with other numbers; None where one is negative, or not whole where it was."""
    results: list[Fraction] = []
    for step, row in zip(steps, origins, strict=True):
        try:
            result = _evaluated(step.tree, iter(operands_of(step, row, values, results)))
        except ZeroDivisionError:
            return None
        if result < 0 or (step.value.denominator == 1 and result.denominator != 1):
            return None
        results.append(result)
    return results if results[-1].denominator == 1 else None


def operands_of(
    step: Step, origins: Sequence[Origin], values: Sequence[Fraction], results: Sequence[Fraction]
) -> list[Fraction]:
    """The operands of a step, given the question's numbers and the earlier results."""
    found = []
    for (kind, at), old in zip(origins, step.operands, strict=True):
        of = {"question": values, "percent": values, "step": results}.get(kind)
        new = old if of is None else of[at]
        found.append(new / 100 if kind == "percent" else new)
    return found
