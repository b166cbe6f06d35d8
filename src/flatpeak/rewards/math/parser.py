"""A reader for mathematical expressions in LaTeX and in plain text: text in, tree out, without evaluation.

It reads numbers, letters, + - * / ^, fractions, roots, functions, factorials and binomials, and rejects everything
else, so that a tree stands for a whole text and never for a fragment of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Final

from flatpeak.rewards.math.normalize import FUNCTIONS
from flatpeak.rewards.math.syntax_tree import (
    MAX_DEPTH,
    MAX_EXPONENT,
    Node,
    OverLimitError,
    UnreadableError,
    integer,
    mixed_number,
    operation,
)

_NUMBER: Final = re.compile(r"(?P<digits>\d+\.?\d*|\.\d+)(?:[eE](?P<exponent>[+-]?\d+)(?![\d.A-Za-z\\^(!]))?")
_REPEATING: Final = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\{?(\d+)\}?")
_COMMAND: Final = re.compile(r"\\([A-Za-z]+)")
_FUNCTION: Final = re.compile(rf"\\({FUNCTIONS})(?![A-Za-z])")
_TIMES: Final = re.compile(r"\\(?:cdot|times)(?![A-Za-z])|\*|/")
_FACTOR_BEGINS: Final = re.compile(
    r"[A-Za-z(\[{|]|\\(?!cdot|times|pm|mp|cup|cap|in\b|le\b|ge\b|ne\b|\}|rfloor|rceil)[A-Za-z]|\d|\.\d"
)
_INTEGER: Final = re.compile(r"\d+")
# Braces print nothing, so the text after them counts.
_PRINTS_DIGIT: Final = re.compile(r"[\s{]*[.\d]")
_PRINTS_BRACKET: Final = re.compile(r"[\s{]*[(\[]")
_SUBSCRIPT: Final = re.compile(r"_(?:\{([A-Za-z0-9, +\-]{1,16})\}|([A-Za-z0-9]))")
_DEGREE: Final = re.compile(r"\^(?:\\circ(?![A-Za-z])|\{\\circ\})")
_TEXT_LETTER: Final = re.compile(r"\\text\{([A-Za-z])\}")
_NAMED: Final = re.compile(r"\\(?:overline|bar|tilde|mathbb)\{([A-Za-z]{1,3})\}")
_DERIVATIVE: Final = re.compile(r"\\frac\s*\{?d(?:\^[^{}]*)?\}?\s*\{\s*d")
_LETTERS: Final = re.compile(
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|"
    "upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|infty|pi|ell|triangle|angle|"
    "imath"
)
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}
_FUNCTION_LETTERS: Final = frozenset("fghFGH")
_MINUS_ONE: Final = operation("neg", integer(1))
_INVERSES: Final = frozenset({"sin", "cos", "tan", "sinh", "cosh", "tanh"})


def parse_expression(text: str) -> Node:
    """The tree of a text from `clean`; UnreadableError unless all of it is read, OverLimitError if it is too deep."""
    if _DERIVATIVE.search(text):
        raise UnreadableError("a derivative, not a fraction")
    reader = _Reader(text)
    node = reader.sum()
    if not reader.at_end():
        raise UnreadableError(f"nothing is known to begin with {reader.rest()[:20]!r}")
    return node


_Read = Callable[[], Node]


class _Reader:
    """A recursive-descent parser; `self._at` is its position in the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._bars = 0

    def at_end(self) -> bool:
        return not self.rest()

    def rest(self) -> str:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at :]

    def sum(self) -> Node:
        node = self._signed(self._product)
        while self.rest()[:1] in ("+", "-"):
            node = operation("add", node, self._signed(self._product))
        return node

    def _signed(self, read: _Read) -> Node:
        negative = False
        while (sign := self.rest()[:1]) in ("+", "-"):
            negative ^= sign == "-"
            self._at += 1
        node = read()
        return operation("neg", node) if negative else node

    def _product(self) -> Node:
        left, kind = None, ""
        bracketed = self._is_next(_PRINTS_BRACKET)
        node = factor = self._power()
        while True:
            if sign := self._take(_TIMES):
                left, kind = node, "div" if sign[0] == "/" else "mul"
                bracketed = self._is_next(_PRINTS_BRACKET)
                factor = self._signed(self._power)
            elif self._continues(bars=True):
                previous, apart = factor, bracketed
                bracketed = self._is_next(_PRINTS_BRACKET)
                factor = self._implicit(node if apart else previous)
                mixed = None if apart or bracketed else mixed_number(previous, factor)
                if mixed is None:
                    left, kind = node, "mul"
                factor = mixed or factor
            else:
                return node
            node = factor if left is None else operation(kind, left, factor)

    def _implicit(self, previous: Node) -> Node:
        if self._is_next(_PRINTS_DIGIT) and previous.kind in ("number", "symbol") and previous.name != "pi":
            raise UnreadableError("a number after a number or a letter, with no sign between them")
        return self._power()

    def _is_next(self, pattern: re.Pattern[str]) -> bool:
        return pattern.match(self.rest()) is not None

    def _continues(self, *, bars: bool) -> bool:
        if self.rest().startswith("|"):
            return bars and not self._bars
        return self._is_next(_FACTOR_BEGINS)

    def _power(self) -> Node:
        node = self._postfix(self._atom())
        if not self.rest().startswith("^"):
            return node
        self._at += 1
        exponent = self._nested(self._exponent)
        if node.name in _FUNCTION_LETTERS and exponent == _MINUS_ONE and self.rest().startswith("("):
            return Node("symbol", name=f"{node.name}^-1")  # the inverse function instead of 1/f(x)
        return self._postfix(operation("pow", node, exponent))

    def _exponent(self) -> Node:
        if self.rest()[:1] in ("+", "-", "("):
            return self._signed(self._power)
        exponent = self._argument(whole_number=True)
        if self.rest().startswith("^"):  # a tower, read from its top
            self._at += 1
            return operation("pow", exponent, self._nested(self._exponent))
        return exponent

    def _postfix(self, node: Node) -> Node:
        while True:
            if self._take(_DEGREE):
                node = operation("degree", node)
            elif self.rest().startswith("!"):
                self._at += 1
                node = operation("factorial", node)
                self._deeper()  # never undone, for factorials of factorials
            else:
                return node

    def _argument(self, *, whole_number: bool) -> Node:
        """The argument of a command: a group, or the next atom; only its first digit, unless `whole_number`."""
        rest = self.rest()
        if rest[:1] in ("{", "("):
            return self._nested(self._group)
        if rest[:1].isdigit():
            digits = _INTEGER.match(rest)
            text = digits[0] if whole_number and digits else rest[0]
            self._at += len(text)
            return integer(int(text))
        return self._nested(self._atom)

    def _group(self) -> Node:
        opening = self.rest()[0]
        self._at += 1
        bars, self._bars = self._bars, 0
        node = self.sum()
        self._bars = bars
        self._expect(_CLOSING[opening])
        return node

    def _atom(self) -> Node:
        rest = self.rest()
        if rest[:1] in _CLOSING:
            return self._nested(self._group)
        if rest[:1].isdigit() or rest[:1] == ".":
            return self._number()
        if rest[:1] == "|":
            return self._nested(self._absolute)
        if self._is_next(_FUNCTION):
            return self._nested(self._function)
        if rest[:1] == "\\":
            return self._nested(self._command)
        if not (rest[:1].isascii() and rest[:1].isalpha()):
            raise UnreadableError(f"unknown {rest[:1]!r}")
        self._at += 1
        return self._symbol(rest[0])

    def _number(self) -> Node:
        if repeating := self._take(_REPEATING):
            whole, fixed, period = repeating.groups()
            base = 10 ** len(fixed)
            value = Fraction(int(whole + fixed or "0"), base) + Fraction(int(period), base * (10 ** len(period) - 1))
            return Node("number", number=value)
        match = self._take(_NUMBER)
        if match is None:
            raise UnreadableError("no number")
        exponent = int(match["exponent"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            raise OverLimitError(f"exponent {exponent}")
        return Node("number", number=Fraction(match["digits"]) * Fraction(10) ** exponent)

    def _absolute(self) -> Node:
        self._at += 1
        self._bars += 1
        node = self.sum()
        self._bars -= 1
        self._expect("|")
        return operation("abs", node)

    def _function(self) -> Node:
        match = self._take(_FUNCTION)
        name = match[1] if match else ""
        base = exponent = None
        for _ in range(2):
            if self.rest().startswith("_") and name == "log":
                self._at += 1
                base = self._argument(whole_number=True)
            elif self.rest().startswith("^"):
                self._at += 1
                exponent = self._nested(self._exponent)
        argument = self._function_argument()
        if exponent is not None and exponent == _MINUS_ONE and name in _INVERSES:
            name, exponent = f"arc{name}", None
        node = operation("log", argument, base or integer(10)) if name in ("log", "lg") else operation(name, argument)
        return node if exponent is None else operation("pow", node, exponent)

    def _function_argument(self) -> Node:
        if self.rest()[:1] in ("(", "[", "{"):
            return self._postfix(self._group())
        sign = self.rest().startswith("-")
        node = self._signed(self._power)
        while not sign and self._continues(bars=False) and not self._is_next(_FUNCTION) and self.rest()[0] not in "([":
            node = operation("mul", node, self._implicit(node))
        return node

    def _command(self) -> Node:
        if named := self._take(_TEXT_LETTER) or self._take(_NAMED):
            return self._symbol(named[1] if named[0].startswith(r"\text") else named[0])
        match = self._take(_COMMAND)
        name = match[1] if match else ""
        if name in ("frac", "binom"):
            first, second = self._argument(whole_number=False), self._argument(whole_number=False)
            return operation("div" if name == "frac" else name, first, second)
        if name == "sqrt":
            return self._root()
        if name in ("lfloor", "lceil"):
            node = self.sum()
            closing = self._take(_COMMAND)
            if closing is None or closing[1] != f"r{name[1:]}":
                raise UnreadableError(f"{name} without its end")
            return operation(name[1:], node)
        if _LETTERS.fullmatch(name):
            return self._symbol(name)
        raise UnreadableError(f"unknown command {name!r}")

    def _root(self) -> Node:
        degree = integer(2)
        if self.rest().startswith("["):
            degree = self._nested(self._group)
        return operation("root", self._argument(whole_number=True), degree)

    def _symbol(self, name: str) -> Node:
        index = self._take(_SUBSCRIPT)
        if index is not None:
            name = f"{name}_{index[1] or index[2]}"
        return Node("symbol", name="i" if name == "imath" else name)

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.rest())
        if match is not None:
            self._at += match.end()
        return match

    def _expect(self, closing: str) -> None:
        if not self.rest().startswith(closing):
            raise UnreadableError(f"no {closing}")
        self._at += 1

    def _nested(self, read: _Read) -> Node:
        self._deeper()
        try:
            return read()
        finally:
            self._depth -= 1

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > 2 * MAX_DEPTH:
            raise OverLimitError("nested too deep")
