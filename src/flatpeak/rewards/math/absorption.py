r"""Numbers lost among the digits of larger ones: `1 + e^{-300}` and `\cos(10^{-50})` only look like 1."""

from __future__ import annotations

from typing import Any, Final

from flatpeak.rewards.math.arithmetic import UndefinedError, mpmath, precise
from flatpeak.rewards.math.limits import OverLimitError
from flatpeak.rewards.math.nodes import Node

_DIGITS: Final = (60, 120)
_MAGNITUDE: Final = 30
"""In powers of ten: what is smaller than its neighbour by more is lost among the digits of a comparison."""
_SATURATED: Final = 30
"""Beyond it the hyperbolic tangent differs from 1 by less than a comparison may see."""
_CONSTANTS: Final = ("e", "i", "pi")
_KEEPS_DIGITS: Final = frozenset({"number", "symbol", "mul", "div", "neg", "root", "abs", "degree"})
"""Operations that keep a small argument's digits."""
_SATURATES: Final = frozenset({"tanh", "coth"})

_Values = tuple[Any, Any]


def absorbs(node: Node) -> bool:
    """Whether a number without letters is added to one far larger, or far from 1 where a function turns it into one.

    Only numbers that are really so small count, not what rounding leaves of 0: that shrinks with the precision.
    """
    return _Absorption(lettered=_has_letters(node)).found(node, inside=False)


class _Absorption:
    def __init__(self, *, lettered: bool) -> None:
        self._lettered = lettered

    def found(self, node: Node, *, inside: bool) -> bool:
        """`inside` an addition or a function, where a factor that is far from 1 matters."""
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
        return any(self.found(each, inside=below) for each in node.args)


def _has_letters(node: Node) -> bool:
    return node.name not in _CONSTANTS if node.kind == "symbol" else any(map(_has_letters, node.args))


def _values(node: Node) -> _Values | None:
    """The value at both precisions; None where there is a letter or no value."""
    if _has_letters(node):
        return None
    library, found = mpmath(), []
    for digits in _DIGITS:
        with library.workdps(digits):
            try:
                found.append(_evaluate(node))
            except (UndefinedError, OverLimitError, ArithmeticError, ValueError, KeyError):
                return None
    coarse, fine = found
    # What is not the same at both precisions is what rounding left of 0.
    return (coarse, fine) if fine and abs(coarse - fine) <= abs(fine) / 2 else None


def _evaluate(node: Node) -> Any:
    library = mpmath()
    if node.kind == "number":
        return library.mpf(node.number.numerator) / node.number.denominator
    if node.kind == "symbol":
        return {"i": library.mpc(0, 1), "e": +library.mp.e, "pi": +library.mp.pi}[node.name]
    return precise()[node.kind](*map(_evaluate, node.args))


def _tiny(values: _Values | None) -> bool:
    return values is not None and bool(abs(values[1]) < mpmath().mpf(10) ** -_MAGNITUDE)


def _beyond(values: _Values | None, bound: int) -> bool:
    return values is not None and bool(abs(values[1]) > bound)


def _far_from_one(values: _Values | None) -> bool:
    return _tiny(values) or _beyond(values, 10**_MAGNITUDE)


def _far_apart(first: _Values | None, second: _Values | None) -> bool:
    if first is None or second is None:
        return False
    small, large = sorted((abs(first[1]), abs(second[1])))
    return bool(small * mpmath().mpf(10) ** _MAGNITUDE < large)
