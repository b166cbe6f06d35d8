"""Expression trees, the limits and errors of reading them, and the operations that evaluate them."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Final

MAX_RAW_CHARACTERS: Final = 2048
"""Limit for an extracted answer as written, with redundant brackets and spacing."""
MAX_CHARACTERS: Final = 256
"""Limit for an extracted answer after normalization."""
MAX_DEPTH: Final = 20
"""Limit for the nesting of brackets, functions and powers."""
MAX_BOXES: Final = 64
"""Limit for the boxes in one text; an answer needs one."""
MAX_EXPONENT: Final = 9999
MAX_FACTORIAL: Final = 999
MAX_BITS: Final = 40_000
"""Bits of an exact intermediate result: 9999 to the 2000th has fewer, a tower of powers has more."""
MAX_MAGNITUDE: Final = 4000
"""Limit for the binary exponent of a function's argument."""
_EXPONENTIAL: Final = frozenset({"exp", "sinh", "cosh", "tanh"})
"""Functions whose argument is an exponent of e."""
Operations = Mapping[str, Callable[..., Any]]


class OverLimitError(Exception):
    """A text exceeds a limit of this module."""


class UnreadableError(Exception):
    """The rules cannot read a text."""


class UndefinedError(Exception):
    """An expression has no value, such as 1/0 or (1/2)!."""


class InexactError(Exception):
    """A value is not rational, or an operation is missing."""


@dataclass(frozen=True, slots=True)
class Node:
    """A number, a symbol, or an operation on other nodes."""

    kind: str
    args: tuple[Node, ...] = ()
    number: Fraction = Fraction(0)
    name: str = ""


def operation(kind: str, *args: Node) -> Node:
    """A node that applies an operation."""
    return Node(kind, args)


def integer(value: int) -> Node:
    """A node that is an integer."""
    return Node("number", number=Fraction(value))


def mixed_number(whole: Node, fraction: Node) -> Node | None:
    """An integer and an adjacent fraction as a mixed number: 3 1/2; None for 3 5/2 and 3 x/2."""
    if whole.kind == "neg":
        mixed = mixed_number(whole.args[0], fraction)
        return None if mixed is None else operation("neg", mixed)
    if whole.kind != "number" or whole.number.denominator != 1 or fraction.kind != "div":
        return None
    numerator, denominator = fraction.args
    proper = numerator.kind == denominator.kind == "number" and 0 < numerator.number < denominator.number
    return Node("add", (whole, fraction), name="mixed") if proper else None


def is_mixed_number(node: Node) -> bool:
    """Whether a sum is written as a mixed number."""
    return node.kind == "add" and node.name == "mixed"


def signed(node: Node) -> tuple[int, Node]:
    """The sign, 1 or -1, and the node without its signs."""
    sign = 1
    while node.kind == "neg":
        node, sign = node.args[0], -sign
    return sign, node


def integer_value(node: Node) -> int | None:
    """The integer that a node is written as, with its signs; None for anything else."""
    sign, node = signed(node)
    return sign * int(node.number) if node.kind == "number" and node.number.denominator == 1 else None


def symbols_in(node: Node) -> set[str]:
    """The names of all symbols, constants included."""
    return {each.name for each in walk(node) if each.kind == "symbol"}


def walk(node: Node) -> Iterator[Node]:
    """The node and all its descendants; without recursion, because a sum may be as long as its text."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.args)


def signed_terms(node: Node) -> list[tuple[int, Node]]:
    """The terms of a sum as (sign, term)."""
    stack, terms = [(1, node)], []
    while stack:
        sign, each = stack.pop()
        if each.kind == "neg":
            stack.append((-sign, each.args[0]))
        elif each.kind == "add" and not is_mixed_number(each):
            stack.extend((sign, term) for term in each.args)
        else:
            terms.append((sign, each))
    return terms


def factors_of(node: Node, *, split_fractions: bool = True) -> list[tuple[Node, int]]:
    """The factors of a product as (factor, 1 in the numerator or -1 in the denominator), without signs.

    Without `split_fractions`, a fraction counts as one factor.
    """
    stack, factors = [(node, 1)], []
    while stack:
        each, side = stack.pop()
        if each.kind in ("neg", "mul"):
            stack.extend((factor, side) for factor in each.args)
        elif each.kind == "div" and split_fractions:
            stack.extend(((each.args[0], side), (each.args[1], -side)))
        else:
            factors.append((each, side))
    return factors


def canonical_form(node: Node) -> str:
    """A text that is equal for expressions that differ only in the order of terms and factors."""
    if node.kind == "number":
        return f"{node.number.numerator:x}:{node.number.denominator:x}"  # hexadecimal has no limit of digits
    if node.kind == "symbol":
        return node.name
    if node.kind == "add" and not is_mixed_number(node):
        return f"+({','.join(sorted(f'{sign:+}{canonical_form(term)}' for sign, term in signed_terms(node)))})"
    if node.kind in ("mul", "div", "neg"):
        factors = [(factor, side) for factor, side in factors_of(node) if integer_value(factor) != 1]
        if [side for _, side in factors] == [1] and not _is_negative(node):
            return canonical_form(factors[0][0])
        above, below = (
            ",".join(sorted(canonical_form(factor) for factor, side in factors if side == wanted)) for wanted in (1, -1)
        )
        return f"{'-' if _is_negative(node) else ''}*({above}/{below})"
    return f"{node.kind}({','.join(map(canonical_form, node.args))})"


def _is_negative(node: Node) -> bool:
    """Whether a product has an odd number of signs."""
    stack, negative = [node], False
    while stack:
        each = stack.pop()
        negative ^= each.kind == "neg"
        if each.kind in ("mul", "div", "neg"):
            stack.extend(each.args)
    return negative


def nesting(text: str) -> int:
    """The nesting depth of round, square and curly brackets; linear in the text."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}" and depth:
            depth -= 1
    return deepest


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > 2 * MAX_BITS:
        raise OverLimitError("a number of too many digits")
    return value


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if abs(exponent) > MAX_EXPONENT:
        raise OverLimitError("an exponent of too many digits")
    if base == 0 and exponent <= 0:
        raise UndefinedError("0 to a power that is not positive")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and bits * abs(exponent) > 4 * MAX_BITS:
        raise OverLimitError("a number of too many digits")
    root = base if exponent.denominator == 1 else _exact_root(base, exponent.denominator)
    return root**exponent.numerator


def _exact_root(value: Fraction, degree: Fraction | int) -> Fraction:
    too_large = max(value.numerator, value.denominator).bit_length() > 1000
    if value < 0 or too_large or degree.denominator != 1 or not 1 <= degree <= 64:
        raise InexactError("root")
    degree = int(degree)
    roots = [round(x ** (1 / degree)) if degree > 2 else math.isqrt(x) for x in value.as_integer_ratio()]
    root = Fraction(*roots) if roots[1] else Fraction(0)
    if root**degree != value:
        raise InexactError("root")
    return root


def _exact_factorial(value: Fraction) -> Fraction:
    if value > MAX_FACTORIAL:
        raise OverLimitError("a factorial of too many digits")
    if value.denominator != 1 or value < 0:
        raise UndefinedError("a factorial of no natural number")
    return Fraction(math.factorial(int(value)))


def _exact_binomial(upper: Fraction, lower: Fraction) -> Fraction:
    if max(abs(upper), abs(lower)) > MAX_FACTORIAL:
        raise OverLimitError("a binomial of too many digits")
    if upper.denominator != 1 or lower.denominator != 1 or upper < 0 or lower < 0:
        raise UndefinedError("a binomial of no natural numbers")
    return Fraction(math.comb(int(upper), int(lower)))


EXACT: Final[Operations] = {
    "add": lambda a, b: _bounded(a + b),
    "mul": lambda a, b: _bounded(a * b),
    "div": lambda a, b: _bounded(a / b),
    "neg": lambda a: -a,
    "pow": _exact_power,
    "root": _exact_root,
    "factorial": _exact_factorial,
    "binom": _exact_binomial,
    "abs": abs,
    "floor": lambda a: Fraction(math.floor(a)),
    "ceil": lambda a: Fraction(math.ceil(a)),
}
"""Operations on fractions; InexactError if the result may be irrational, ZeroDivisionError for a division by 0."""


def numeric(library: Any) -> Operations:
    """Operations on the numbers of `cmath` or of an mpmath context."""
    names = ("sin", "cos", "tan", "sinh", "cosh", "tanh")
    functions = {name: _guarded(library, name) for name in ("exp", *names)}
    inverses = {f"arc{name}": _guarded(library, f"a{name}") for name in names}
    sin, cos, log = functions["sin"], functions["cos"], _guarded(library, "log")
    return {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "neg": lambda a: 0 - a,  # -a would give -0j, which has another root
        "pow": _power,
        "root": _root,
        "abs": abs,
        "degree": lambda a: a * library.pi / 180,
        "ln": log,
        "log": lambda a, base: log(a) / log(base),
        "cot": lambda a: cos(a) / sin(a),
        "sec": lambda a: 1 / cos(a),
        "csc": lambda a: 1 / sin(a),
        "coth": lambda a: 1 / functions["tanh"](a),
        "sech": lambda a: 1 / functions["cosh"](a),
        "csch": lambda a: 1 / functions["sinh"](a),
        **functions,
        **inverses,
    }


def mpmath() -> Any:
    """The mpmath library, imported at the first call."""
    import mpmath as library  # type: ignore[import-untyped]

    return library


@cache
def precise(*, real: bool = False) -> Operations:
    """Operations on mpmath's numbers at its current precision; OverLimitError outside 2 to plus or minus MAX_BITS.

    With `real`, a complex result is an UndefinedError.
    """
    mp = mpmath().mp

    def factorial(value: Any) -> Any:
        if abs(value) > MAX_FACTORIAL:
            raise OverLimitError("a factorial of too many digits")
        return mp.gamma(value + 1)

    def binomial(upper: Any, lower: Any) -> Any:
        return factorial(upper) / factorial(lower) / factorial(upper - lower)

    def checked(apply: Callable[..., Any]) -> Callable[..., Any]:
        def bounded(*values: Any) -> Any:
            result = apply(*values)
            # If the parts of a complex number are a billion digits apart, mpmath writes all of the digits.
            if any(x and abs(mp.mag(x)) > MAX_BITS for x in (result.real, result.imag)):
                raise OverLimitError("a number of too many digits")
            if real and result.imag:
                raise UndefinedError("not real")
            return result

        return bounded

    operations = {**numeric(mp), "factorial": factorial, "binom": binomial, "floor": mp.floor, "ceil": mp.ceil}
    return {kind: checked(apply) for kind, apply in operations.items()}


def _guarded(library: Any, name: str) -> Callable[[Any], Any]:
    function = getattr(library, name)

    def apply(value: Any) -> Any:
        # The sine of 10^10000 needs as many digits of pi.
        large = value and library is not cmath and library.mag(value) > MAX_MAGNITUDE
        if large or (name in _EXPONENTIAL and library is not cmath and abs(value) > MAX_EXPONENT):
            raise OverLimitError(f"{name} of a number of too many digits")
        return function(value)

    return apply


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > MAX_EXPONENT:
        raise OverLimitError("an exponent of too many digits")
    return base**exponent


def _root(value: Any, degree: Any) -> Any:
    if abs(degree) > MAX_EXPONENT:
        raise OverLimitError("a root of too many digits")
    whole = degree.imag == 0 and degree.real == int(degree.real)
    if whole and int(degree.real) % 2 and value.imag == 0 and value.real < 0:
        return -_power(-value.real, 1 / degree.real)
    return _power(value, 1 / degree)


ROUGH: Final = numeric(cmath)
"""Operations on complex floats, without factorials, binomials and rounding."""
