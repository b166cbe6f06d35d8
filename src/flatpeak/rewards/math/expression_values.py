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
    symbols_in,
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

_ValuePair = tuple[Any, Any]


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
        node, sign = self.node, 1
        while node.kind == "neg":
            node, sign = node.args[0], -sign
        if node.kind != "symbol" or node.name != "infty":
            raise UndefinedError("arithmetic with infinity")
        return sign

    @cached_property
    def exact(self) -> Fraction | None:
        """The value, if all steps are rational; UndefinedError without a value."""
        try:
            value: Fraction = _evaluate(self.node, EXACT, lambda _: Fraction(0), _no_symbol)
        except InexactError:
            return None
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

    def precise(self, point: int, digits: int) -> Any:
        """The value at a point as an mpmath number with this many digits; UndefinedError without a value."""
        return self._precise(precise(), _mp_symbol(point), digits)

    def real(self, point: int, digits: int, negative: frozenset[str]) -> Any:
        """The same with some letters negated; UndefinedError if a step is complex."""
        return self._precise(_real(), _mp_symbol(point, negative), digits)

    def _precise(self, operations: Operations, symbol: Symbols, digits: int) -> Any:
        library = mpmath()
        with library.workdps(digits):
            try:
                value = _evaluate(self.node, operations, _mp_number, symbol)
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
        negative = frozenset(letter for letter, sign in zip(letters, signs, strict=True) if sign)
        try:
            one, other = (each.real(point, digits, negative) for each in (first, second))
        except UndefinedError:
            if not negative:
                return False
            continue
        with library.workdps(digits):
            if abs(one - other) > small * max(abs(one), abs(other)):
                return False
    return True


def _real() -> Operations:
    def checked(apply: Callable[..., Any]) -> Callable[..., Any]:
        def apply_real(*values: Any) -> Any:
            result = apply(*values)
            if result.imag:
                raise UndefinedError("not real")
            return result

        return apply_real

    return {kind: checked(apply) for kind, apply in precise().items()}


def _evaluate(node: Node, operations: Operations, number: Any, symbol: Symbols) -> Any:
    if node.kind == "number":
        return node.number if operations is EXACT else number(node.number)
    if node.kind == "symbol":
        return symbol(node.name)
    if node.kind not in operations:
        raise InexactError(node.kind)
    return operations[node.kind](*(_evaluate(each, operations, number, symbol) for each in node.args))


def _has_large_numbers(node: Node) -> bool:
    if node.kind == "number":
        return abs(node.number) > _LARGE or 0 < abs(node.number) < Fraction(1, _LARGE)
    if node.kind in ("factorial", "binom"):
        return True
    return any(_has_large_numbers(each) for each in node.args)


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


def _mp_symbol(point: int, negative: frozenset[str] = frozenset()) -> Symbols:
    library = mpmath()

    def symbol(name: str) -> Any:
        if name in _CONSTANTS:
            return {"i": library.mpc(0, 1), "e": +library.mp.e, "pi": +library.mp.pi}[name]
        real, imaginary = map(_mp_number, _coordinate(name, point))
        real = -real if name in negative else real
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
    return _Absorption(lettered=not symbols_in(node) <= _CONSTANTS).occurs(node, inside=False)


class _Absorption:
    """The search for an addition or function that absorbs the digits of a number."""

    def __init__(self, *, lettered: bool) -> None:
        self._lettered = lettered

    def occurs(self, node: Node, *, inside: bool) -> bool:
        """Whether it occurs in a node; `inside` an addition or a function, a factor far from 1 counts too."""
        if inside and self._lettered and _far_from_one(_values(node)):
            return True
        if node.kind == "add" and _far_apart(*map(_values, node.args)):
            return True
        if node.kind not in _KEEPS_DIGITS and node.kind != "add":
            arguments = node.args[1:] if node.kind == "pow" else node.args
            if any(_tiny(values) for values in map(_values, arguments)):
                return True
            if node.kind in _SATURATES and any(_beyond(values, _SATURATED) for values in map(_values, arguments)):
                return True
            if node.kind.startswith("arc") and any(_far_from_one(values) for values in map(_values, arguments)):
                return True
        below = inside or node.kind not in _KEEPS_DIGITS
        return any(self.occurs(each, inside=below) for each in node.args)


def _values(node: Node) -> _ValuePair | None:
    """The value at both precisions; None with letters or without a value."""
    if not symbols_in(node) <= _CONSTANTS:
        return None
    library, values = mpmath(), []
    for digits in _DIGITS:
        with library.workdps(digits):
            try:
                values.append(_evaluate(node, precise(), _mp_number, _mp_symbol(point=0)))
            except (UndefinedError, OverLimitError, InexactError, ArithmeticError, ValueError):
                return None
    coarse, fine = values
    # A value that differs between the precisions is a rounding error of 0.
    return (coarse, fine) if fine and abs(coarse - fine) <= abs(fine) / 2 else None


def _tiny(values: _ValuePair | None) -> bool:
    return values is not None and bool(abs(values[1]) < mpmath().mpf(10) ** -_MAGNITUDE)


def _beyond(values: _ValuePair | None, bound: int) -> bool:
    return values is not None and bool(abs(values[1]) > bound)


def _far_from_one(values: _ValuePair | None) -> bool:
    return _tiny(values) or _beyond(values, 10**_MAGNITUDE)


def _far_apart(first: _ValuePair | None, second: _ValuePair | None) -> bool:
    if first is None or second is None:
        return False
    small, large = sorted((abs(first[1]), abs(second[1])))
    return bool(small * mpmath().mpf(10) ** _MAGNITUDE < large)
