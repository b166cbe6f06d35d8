"""The trees that expressions are read into."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Final


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


def is_mixed(whole: Node, part: Node) -> bool:
    """Whether an integer and a fraction side by side are a mixed number: 3 1/2, but not 3 5/2 and not 3 x/2."""
    if whole.kind != "number" or whole.number.denominator != 1 or part.kind != "div":
        return False
    numerator, denominator = part.args
    return numerator.kind == denominator.kind == "number" and 0 < numerator.number < denominator.number


def is_mixed_number(node: Node) -> bool:
    """Whether a sum is written as a mixed number."""
    return node.kind == "add" and node.name == "mixed"


def integer_value(node: Node) -> int | None:
    """The integer that is written there, with its signs; None for anything else."""
    sign = 1
    while node.kind == "neg":
        node, sign = node.args[0], -sign
    return sign * int(node.number) if node.kind == "number" and node.number.denominator == 1 else None


def symbols_in(node: Node) -> set[str]:
    """The names of all symbols, constants too."""
    return {each.name for each in walk(node) if each.kind == "symbol"}


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it; without recursion, for a sum may be as long as its text."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.args)


def terms_of(node: Node) -> list[tuple[int, Node]]:
    """(sign, term) of a sum."""
    waiting, terms = [(1, node)], []
    while waiting:
        sign, each = waiting.pop()
        if each.kind == "neg":
            waiting.append((-sign, each.args[0]))
        elif each.kind == "add" and not is_mixed_number(each):
            waiting.extend((sign, term) for term in each.args)
        else:
            terms.append((sign, each))
    return terms


def factors_of(node: Node) -> list[tuple[Node, int]]:
    """(factor, 1 above the line or -1 below) of a product or quotient, signs aside."""
    waiting, factors = [(node, 1)], []
    while waiting:
        each, place = waiting.pop()
        if each.kind == "neg":
            waiting.append((each.args[0], place))
        elif each.kind in ("mul", "div"):
            waiting.append((each.args[0], place))
            waiting.append((each.args[1], -place if each.kind == "div" else place))
        else:
            factors.append((each, place))
    return factors


def multiplied_in(node: Node) -> list[Node]:
    """The factors of a product, a fraction being one."""
    waiting, factors = [node], []
    while waiting:
        each = waiting.pop()
        if each.kind in ("mul", "neg"):
            waiting.extend(each.args)
        else:
            factors.append(each)
    return factors


def form_of(node: Node) -> str:
    """A text that is the same for expressions which differ in the order of terms and factors only."""
    if node.kind == "number":
        return f"{node.number.numerator:x}:{node.number.denominator:x}"  # in hexadecimal no number is too long
    if node.kind == "symbol":
        return node.name
    if node.kind == "add" and not is_mixed_number(node):
        return f"+({','.join(sorted(f'{sign:+}{form_of(term)}' for sign, term in terms_of(node)))})"
    if node.kind in ("mul", "div", "neg"):
        factors = [(factor, place) for factor, place in factors_of(node) if integer_value(factor) != 1]
        if [place for _, place in factors] == [1] and not _is_negative(node):
            return form_of(factors[0][0])
        places: dict[int, list[str]] = {1: [], -1: []}
        for factor, place in factors:
            places[place].append(form_of(factor))
        above, below = (",".join(sorted(places[place])) for place in (1, -1))
        return f"{'-' if _is_negative(node) else ''}*({above}/{below})"
    return f"{node.kind}({','.join(map(form_of, node.args))})"


def _is_negative(node: Node) -> bool:
    """Whether a product has an odd number of signs."""
    waiting, negative = [node], False
    while waiting:
        each = waiting.pop()
        negative ^= each.kind == "neg"
        if each.kind in ("mul", "div", "neg"):
            waiting.extend(each.args)
    return negative


MAX_RAW_CHARACTERS: Final = 2048
"""Of an extracted answer as it was written, before redundant brackets and spacing go."""
MAX_CHARACTERS: Final = 256
"""Of the same after that."""
MAX_DEPTH: Final = 20
"""Brackets in brackets, functions of functions, powers of powers."""
MAX_BOXES: Final = 64
"""Boxes in one text. More are a flood, not an answer."""
MAX_EXPONENT: Final = 9999
MAX_FACTORIAL: Final = 999
MAX_BITS: Final = 40_000
"""Of an exact intermediate result: 9999 to the 2000th has less, a tower of powers more."""
MAX_MAGNITUDE: Final = 4000
"""Of the binary exponent of what a function is applied to."""


class OverLimitError(Exception):
    """A text is beyond a limit of this module."""


class UnreadableError(Exception):
    """The rules cannot read a text."""


def nesting(text: str) -> int:
    """How deep round, square and curly brackets are nested; linear in the text."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}" and depth:
            depth -= 1
    return deepest


_EXPONENTIAL: Final = frozenset({"exp", "sinh", "cosh", "tanh"})
"""What they are applied to is an exponent of e."""
Operations = Mapping[str, Callable[..., Any]]


class UndefinedError(Exception):
    """An expression has no value: 1/0, (1/2)!."""


class InexactError(Exception):
    """The value is not rational, or an operation is missing."""


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


def _exact_root(value: Fraction, degree: int) -> Fraction:
    if value < 0 or degree > 64 or max(value.numerator, value.denominator).bit_length() > 1000:
        raise InexactError("root")
    parts = [round(part ** (1 / degree)) if degree > 2 else math.isqrt(part) for part in value.as_integer_ratio()]
    root = Fraction(*parts) if parts[1] else Fraction(0)
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


def _exact_division(first: Fraction, second: Fraction) -> Fraction:
    if second == 0:
        raise UndefinedError("division by 0")
    return _bounded(first / second)


def _root_degree(degree: Fraction) -> int:
    if degree.denominator != 1 or not 1 <= degree <= MAX_EXPONENT:
        raise InexactError("root")
    return int(degree)


EXACT: Final[Operations] = {
    "add": lambda a, b: _bounded(a + b),
    "mul": lambda a, b: _bounded(a * b),
    "div": _exact_division,
    "neg": lambda a: -a,
    "pow": _exact_power,
    "root": lambda a, n: _exact_root(a, _root_degree(n)),
    "factorial": _exact_factorial,
    "binom": _exact_binomial,
    "abs": abs,
    "floor": lambda a: Fraction(math.floor(a)),
    "ceil": lambda a: Fraction(math.ceil(a)),
}
"""On fractions; InexactError where the result may be irrational."""


def numeric(library: Any) -> Operations:
    """On the numbers of `cmath` or of an mpmath context."""
    sin, cos, exp = (_guarded(library, name) for name in ("sin", "cos", "exp"))
    tan, log, sinh, cosh, tanh = (_guarded(library, name) for name in ("tan", "log", "sinh", "cosh", "tanh"))
    inverses = {f"arc{name}": _guarded(library, f"a{name}") for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")}
    return {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "neg": lambda a: 0 - a,  # and not -a: that has -0j, and another root
        "pow": _power,
        "root": _root,
        "abs": abs,
        "degree": lambda a: a * library.pi / 180,
        "ln": log,
        "log": lambda a, base: log(a) / log(base),
        "exp": exp,
        "sin": sin,
        "cos": cos,
        "tan": tan,
        "cot": lambda a: cos(a) / sin(a),
        "sec": lambda a: 1 / cos(a),
        "csc": lambda a: 1 / sin(a),
        "sinh": sinh,
        "cosh": cosh,
        "tanh": tanh,
        "coth": lambda a: 1 / tanh(a),
        "sech": lambda a: 1 / cosh(a),
        "csch": lambda a: 1 / sinh(a),
        **inverses,
    }


def mpmath() -> Any:
    """The library, loaded when it is first needed."""
    import mpmath as library  # type: ignore[import-untyped]

    return library


@cache
def precise() -> Operations:
    """On mpmath's numbers, at its present precision; OverLimitError for what is beyond 2 to plus or minus MAX_BITS."""
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
            # Where the parts of a complex number are a billion digits apart, mpmath writes all of them out.
            if any(part and abs(mp.mag(part)) > MAX_BITS for part in (result.real, result.imag)):
                raise OverLimitError("a number of too many digits")
            return result

        return bounded

    operations = {**numeric(mp), "factorial": factorial, "binom": binomial, "floor": mp.floor, "ceil": mp.ceil}
    return {kind: checked(apply) for kind, apply in operations.items()}


def _guarded(library: Any, name: str) -> Callable[[Any], Any]:
    function = getattr(library, name)

    def apply(value: Any) -> Any:
        # A sine of 10^10000 has to know as many digits of pi.
        if library is not cmath and value and library.mag(value) > MAX_MAGNITUDE:
            raise OverLimitError(f"{name} of a number of too many digits")
        if name in _EXPONENTIAL and library is not cmath and abs(value) > MAX_EXPONENT:
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
"""On complex floats. Factorials, binomials and rounding are missing."""
