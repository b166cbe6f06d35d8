r"""Values of expressions, exact if all steps are rational, else to 120 digits, and their comparison.

Two expressions are compared as functions of their letters, at fixed points. They are unequal if they differ at one
point. They are equal if they agree to 120 digits at all points, including negative and complex ones, or differ only
where one of them is not real: `\sqrt{ab}` and `\sqrt{a}\sqrt{b}`. In all other cases the rules have no verdict:
`\sqrt{x^2}` and `x` are equal only for positive x.
"""

from __future__ import annotations

import cmath
import zlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import inf
from typing import Any, Final

from flatpeak.rewards.math.syntax_tree import (
    EXACT,
    ROUGH,
    InexactError,
    Node,
    Operations,
    OverLimitError,
    UndefinedError,
    mpmath,
    precise,
    signed,
    symbols_in,
    walk,
)

Symbols = Callable[[str], Any]

PRECISE: Final = ContextVar("precise", default=True)
"""Whether values may be computed to many digits. The cost has no bound, so only processes that can be killed do it."""
POINTS: Final = 4
_DIGITS: Final = (60, 120)
_CONSTANTS: Final = frozenset({"e", "i", "pi"})
_LARGE: Final = 10**6
_MAX_SIGNED: Final = 4
_MAGNITUDE: Final = 30
"""Powers of ten by which a summand may be smaller than its neighbour before a comparison loses its digits."""
_SATURATED: Final = 30
"""Argument above which the hyperbolic tangent differs from 1 by less than a comparison can resolve."""
_KEEPS_DIGITS: Final = frozenset({"number", "symbol", "mul", "div", "neg", "root", "abs", "degree"})
"""Operations that keep a small argument's digits."""
_SATURATES: Final = frozenset({"tanh", "coth"})


@dataclass(frozen=True, kw_only=True)
class Expression:
    """A tree and its values; properties raise OverLimitError if computing them would cost too much."""

    node: Node

    @cached_property
    def letters(self) -> frozenset[str]:
        """The symbols other than constants."""
        return frozenset(symbols_in(self.node) - _CONSTANTS)

    @cached_property
    def infinity(self) -> int:
        """1 or -1 for infinity alone and its negative, else 0; UndefinedError for arithmetic with it."""
        if not any(letter.startswith("infty") for letter in self.letters):
            return 0
        sign, node = signed(self.node)
        if node.kind != "symbol" or node.name != "infty":
            raise UndefinedError("arithmetic with infinity")
        return sign

    @cached_property
    def exact(self) -> Fraction | None:
        """The value, if all steps are rational; UndefinedError without a value."""
        try:
            value: Fraction = _evaluate(self.node, EXACT, lambda number: number, _no_symbol)
        except InexactError:
            return None
        except ZeroDivisionError as error:
            raise UndefinedError("division by 0") from error
        return value

    @cached_property
    def rough(self) -> tuple[complex | None, ...]:
        """The value at each point in double precision; None if that is not precise enough."""
        return tuple(self._at(point) for point in range(POINTS if self.letters else 1))

    def _at(self, point: int) -> complex | None:
        if self.exact is None and _has_large_numbers(self.node):
            return None
        try:
            if self.exact is not None:
                return complex(self.exact)
            value = complex(_evaluate(self.node, ROUGH, complex, lambda name: _rough_symbol(name, point)))
        except (OverflowError, ValueError, ZeroDivisionError, InexactError):
            return None
        return value if cmath.isfinite(value) else None

    def precise(self, point: int, digits: int, *, negated: frozenset[str] | None = None) -> Any:
        """The value at a point as an mpmath number with this many digits; UndefinedError without a value.

        With `negated`, those letters have the opposite sign, and a complex step is an UndefinedError.
        """
        library, operations = mpmath(), precise(real=negated is not None)
        with library.workdps(digits):
            try:
                value = _evaluate(self.node, operations, _mp_number, _mp_symbol(point, negated or frozenset()))
            except (ArithmeticError, ValueError, library.libmp.NoConvergence) as error:
                raise UndefinedError(str(error)) from error
            if not library.isfinite(value):
                raise UndefinedError("not finite")
            return value


def same_value(first: Expression, second: Expression) -> bool | None:
    """Whether two expressions are equal; None without a verdict. An undefined expression equals nothing."""
    try:
        if first.infinity or second.infinity:
            return first.infinity == second.infinity
        if first.exact is not None and second.exact is not None:
            return first.exact == second.exact
        points = range(POINTS if first.letters or second.letters else 1)
        if any(_clearly_differ(first, second, point) for point in points[:2]):
            return False
        return _same_by_digits(first, second, points) if PRECISE.get() else None
    except UndefinedError:
        return False


def _same_by_digits(first: Expression, second: Expression, points: range) -> bool | None:
    agreed = [_agree(first, second, point) for point in points]
    if any(agreed) and (absorbs(first.node) or absorbs(second.node)):
        return False
    if len(set(agreed)) == 1:
        return agreed[0]
    # They agree at the positive points and at the complex point.
    positive = agreed[0] and agreed[1] and agreed[-1]
    return True if positive and _agree_where_real(first, second) else None


def _clearly_differ(first: Expression, second: Expression, point: int) -> bool:
    one, other = (each.rough[point % len(each.rough)] for each in (first, second))
    return one is not None and other is not None and abs(one - other) > 1e-6 * max(abs(one), abs(other), 1)


def _agree(first: Expression, second: Expression, point: int) -> bool | None:
    library = mpmath()
    coarse, fine = _DIGITS
    values = [(each.precise(point, coarse), each.precise(point, fine)) for each in (first, second)]
    with library.workdps(fine):
        small, shrunk = library.mpf(10) ** -90, library.mpf(10) ** -30
        # A value that shrinks with higher precision is a rounding error of 0.
        zeros = [abs(exact) < small and (not rough or abs(exact) <= abs(rough) * shrunk) for rough, exact in values]
        if any(zeros):
            return all(zeros)
        far, near = (abs(one - other) / max(abs(one), abs(other)) for one, other in zip(*values, strict=True))
    if near < small:
        return True
    return None if near < far * shrunk else False


def _agree_where_real(first: Expression, second: Expression) -> bool:
    """Whether two expressions that are real for positive letters agree for all signs at which both are real."""
    letters, digits = sorted(first.letters | second.letters), _DIGITS[0]
    if len(letters) > _MAX_SIGNED:
        return False
    library = mpmath()
    small = library.mpf(10) ** -40
    for point, signs in product((0, 1), product((False, True), repeat=len(letters))):
        negated = frozenset(letter for letter, sign in zip(letters, signs, strict=True) if sign)
        try:
            one, other = (each.precise(point, digits, negated=negated) for each in (first, second))
        except UndefinedError:
            if not negated:
                return False
            continue
        with library.workdps(digits):
            if abs(one - other) > small * max(abs(one), abs(other)):
                return False
    return True


def _evaluate(node: Node, operations: Operations, number: Any, symbol: Symbols) -> Any:
    if node.kind == "number":
        return number(node.number)
    if node.kind == "symbol":
        return symbol(node.name)
    if node.kind not in operations:
        raise InexactError(node.kind)
    return operations[node.kind](*(_evaluate(each, operations, number, symbol) for each in node.args))


def _has_large_numbers(node: Node) -> bool:
    for each in walk(node):
        large = abs(each.number) > _LARGE or 0 < abs(each.number) < Fraction(1, _LARGE)
        if large or each.kind in ("factorial", "binom"):
            return True
    return False


def _no_symbol(name: str) -> Any:
    raise InexactError(name)


def _coordinate(name: str, point: int) -> tuple[Fraction, Fraction]:
    """(real, imaginary) value of a letter at a point: two points are positive, one is negative, one complex."""
    real = Fraction(zlib.crc32(f"{name}/{point}".encode()) % 9973 + 5000, 7919)
    if point == 2:
        real = -real
    return real, Fraction(3, 7) * real if point == 3 else Fraction(0)


def _rough_symbol(name: str, point: int) -> complex:
    constant = {"i": 1j, "e": cmath.e, "pi": cmath.pi}.get(name)
    return complex(*map(float, _coordinate(name, point))) if constant is None else constant


def _mp_number(value: Fraction) -> Any:
    return mpmath().mpf(value.numerator) / value.denominator


def _mp_symbol(point: int, negated: frozenset[str]) -> Symbols:
    library = mpmath()

    def symbol(name: str) -> Any:
        if name in _CONSTANTS:
            return {"i": library.mpc(0, 1), "e": +library.mp.e, "pi": +library.mp.pi}[name]
        real, imaginary = map(_mp_number, _coordinate(name, point))
        real = -real if name in negated else real
        return library.mpc(real, imaginary) if imaginary else real

    return symbol


def proportional(first: Expression, second: Expression) -> bool | None:
    """Whether one is a nonzero constant times the other, so that both are 0 together; None if unknown."""
    if not first.letters or first.letters != second.letters:
        return False
    if not PRECISE.get():
        return None
    library, digits = mpmath(), _DIGITS[0]
    try:
        if first.infinity or second.infinity or absorbs(first.node) or absorbs(second.node):
            return False
        with library.workdps(digits):
            ratios = [first.precise(point, digits) / second.precise(point, digits) for point in range(POINTS)]
            spread = max(abs(ratio - ratios[0]) for ratio in ratios)
            return bool(ratios[0] and spread < abs(ratios[0]) * library.mpf(10) ** -40)
    except UndefinedError:
        return False if "infty" in first.letters | second.letters else None
    except ZeroDivisionError:
        return None


def absorbs(node: Node) -> bool:
    """Whether a number without letters is lost: added to a far larger number, or mapped to 1 by a function.

    Rounding errors of 0, which shrink with higher precision, do not count.
    """
    return _absorbs(node, lettered=bool(Expression(node=node).letters), inside=False)


def _absorbs(node: Node, *, lettered: bool, inside: bool) -> bool:
    """With letters, a factor far from 1 inside an addition or a function counts too."""
    if inside and lettered and _is_lost(node, largest=10**_MAGNITUDE):
        return True
    keeps_digits = node.kind in _KEEPS_DIGITS
    if node.kind == "add":
        sizes = [size for size in map(_size, node.args) if size is not None]
        if len(sizes) == 2 and min(sizes) * mpmath().mpf(10) ** _MAGNITUDE < max(sizes):
            return True
    elif not keeps_digits:
        arguments = node.args[1:] if node.kind == "pow" else node.args
        if any(_is_lost(each, largest=_largest_argument(node.kind)) for each in arguments):
            return True
    return any(_absorbs(each, lettered=lettered, inside=inside or not keeps_digits) for each in node.args)


def _largest_argument(kind: str) -> float:
    """The size above which a function loses its argument's digits."""
    if kind in _SATURATES:
        return _SATURATED
    return 10**_MAGNITUDE if kind.startswith("arc") else inf


def _is_lost(node: Node, *, largest: float) -> bool:
    size = _size(node)
    return size is not None and bool(size < mpmath().mpf(10) ** -_MAGNITUDE or size > largest)


def _size(node: Node) -> Any:
    """The absolute value; None with letters or without a value."""
    expression = Expression(node=node)
    if expression.letters:
        return None
    try:
        coarse, fine = (expression.precise(0, digits) for digits in _DIGITS)
    except (UndefinedError, OverLimitError, InexactError):
        return None
    # A value that differs between the precisions is a rounding error of 0.
    return abs(fine) if fine and abs(coarse - fine) <= abs(fine) / 2 else None
