r"""A check that an answer is evaluated as far as its gold answer is.

Equal values are not enough: a question that asks for `\binom84`, which is 70, already contains an equal answer. Three
kinds of answers are refused: those with operations that the gold answer lacks (functions, sums, binomials, integrals;
sums, products, powers and whole quotients of numerals; products of sums if the gold answer is expanded); copies from
the question in another form than the gold answer's; and, if the question asks to rewrite a formula, answers that are
rewritten halfway. Fractions, radicals, signs, units, decimals, scientific notation and common factors are spellings of
a result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

from flatpeak.rewards.math.expression_values import Expression
from flatpeak.rewards.math.extract import gold_answer
from flatpeak.rewards.math.intervals import Reading, split, unnamed, unread_texts
from flatpeak.rewards.math.normalize import clean
from flatpeak.rewards.math.rewriting import has_letters, is_rewritten_halfway, sides
from flatpeak.rewards.math.rule_grader import gold_letter, read_answer
from flatpeak.rewards.math.syntax_tree import (
    Node,
    OverLimitError,
    UndefinedError,
    canonical_form,
    factors_of,
    integer,
    integer_value,
    is_mixed_number,
    signed,
    signed_terms,
    symbols_in,
    walk,
)
from flatpeak.rewards.math.units import DENOMINATORS, MAGNITUDES, NUMBER_WORDS

_KINDS: Final = {
    **dict.fromkeys(("sin", "cos", "tan", "cot", "sec", "csc"), "trigonometric"),
    **dict.fromkeys(("arcsin", "arccos", "arctan"), "inverse trigonometric"),
    **dict.fromkeys(("ln", "log", "lg", "exp", "sinh", "cosh", "tanh", "coth", "sech", "csch"), "exponential"),
    **dict.fromkeys(("arcsinh", "arccosh", "arctanh"), "exponential"),
    **dict.fromkeys(("factorial", "binom"), "combinatorial"),
    **dict.fromkeys(("floor", "ceil", "lfloor", "lceil"), "rounding"),
    **dict.fromkeys(("bmod", "pmod", "mod"), "modulo"),
    **dict.fromkeys(("sum", "prod"), "series"),  # as commands; sums and products of numerals are other kinds
}
"""Kinds of operations that may replace each other; an operation not listed is its own kind."""
_TRANSCENDENTAL: Final = frozenset({"trigonometric", "inverse trigonometric", "exponential"})
_UNREAD: Final = re.compile(
    r"(?<![A-Za-z])\\?(sum|prod|i*int|oint|lim|max|min|gcd|lcm|[bp]?mod|det|sup|inf|cap|binom|[lr]?floor|[lr]?ceil"
    r"|(?:arc)?(?:sinh|cosh|tanh|sin|cos|tan)|cot|sec|csc|log|ln|lg|exp)(?![A-Za-z])|(!)(?!=)|([vV]matrix)"
)
"""Operations in a text that the rules cannot read as a whole."""
_E: Final = Node("symbol", name="e")
_I: Final = Node("symbol", name="i")
_ONE: Final = integer(1)
_TEN: Final = integer(10)
_EXPANSIONS: Final = frozenset({"expansion", "expansion of a quotient"})
"""Products of sums. Over denominators with letters they are customary, and refused only if the gold answer has none."""
_EXPONENT: Final = re.compile(r"\d[eE][+-]?\d")
_NOT_COPIED: Final = frozenset({"text", "unread", "inequality", "union"})
"""Kinds of answers that conditions and choices in a question also have."""
_EQUALS: Final = re.compile(r"\s*=\s*")
_SEGMENT_ENDS: Final = re.compile(r"\$+|\\[()\[\]]|(?<=[.?!:;])\s|\n")
_TOKEN: Final = re.compile(r"\\[A-Za-z]+|[A-Za-z]+|\S")
_GOES_ON: Final = re.compile(r"[\^_!]|\.?\d")
_COUNT: Final = r"\d[\d,]*(?:\.\d+)?|\.\d+"
_WORDS: Final = "|".join(sorted({*NUMBER_WORDS, *MAGNITUDES, *DENOMINATORS}, key=len, reverse=True))
_NUMERAL: Final = re.compile(
    rf"(?<![\w.,^_{{])(?:(?:\d+\s*)?\\[dt]?frac\s*(?:\{{\d+\}}|\d)\s*(?:\{{\d+\}}|\d)|(?:\d+\s+)?\d+\s*/\s*\d+"
    rf"|(?:{_COUNT})(?:[eE][+-]?\d+)?(?:\s*(?:\\?%|percent\b)|\s+(?:{'|'.join(MAGNITUDES)})s?\b)?)(?![\w^!])"
    rf"|\b(?:{_WORDS})s?(?:[\s-]+(?:and\s+)?(?:{_WORDS})s?)*\b",
    re.IGNORECASE,
)
"""A number in prose, as digits or in words."""
_NO_TOKENS: Final = frozenset({"{", "}", "(", ")", "[", "]", "$", "*", r"\cdot", r"\times", r"\text"})
"""Tokens that do not change an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Structure:
    """The form of an answer and its unevaluated operations."""

    form: str
    """A text that is equal for answers that differ only in spelling and in the order of terms and factors."""
    operations: frozenset[str]
    """The kinds of unevaluated operations."""
    allowed: frozenset[str]
    """For a gold answer, the kinds that an answer may leave unevaluated: its own kinds and those of its spellings."""
    spelling: str
    """The form with the percent sign that a gold answer may lack."""
    copyable: bool
    """Whether repeating it from the question answers nothing; false for a single letter."""
    tokens: tuple[str, ...]


def is_evaluated(answer: str, gold: str, question: str = "") -> bool:
    """Whether an extracted answer leaves no operation that the gold lacks, and is neither a copy nor half rewritten.

    Texts beyond the limits of the grader, which never equal a gold answer, count as evaluated.
    """
    if "".join(answer.split()) == "".join(gold.split()):
        return True
    try:
        answered, reference = _structure(answer), _structure(gold)
    except OverLimitError:
        return True
    if answered.form == reference.form:
        return True
    if not answered.operations <= reference.allowed:
        return False
    is_letter = gold_letter(read_answer(gold)[0]) is not None  # before its option, which the question contains too
    copied = (answered.copyable or answered.operations) and (
        answered.spelling in _question_spellings(question) or _is_in(answered.tokens, question)
    )
    return is_letter or not (copied or is_rewritten_halfway(answer, gold, _SEGMENT_ENDS.split(question)))


def only_evaluated(pairs: Iterable[tuple[str | None, str]], questions: Iterable[str]) -> list[tuple[str | None, str]]:
    """The (extracted answer, gold) pairs, without the answers that `is_evaluated` refuses."""
    return [
        (answer if answer is None or is_evaluated(answer, gold_answer(gold), question) else None, gold)
        for (answer, gold), question in zip(pairs, questions, strict=True)
    ]


@lru_cache(maxsize=8192)
def _structure(text: str) -> _Structure:
    reading = unnamed(read_answer(text)[1])
    nodes = list(_nodes(reading))
    operations: frozenset[str] = frozenset().union(
        *map(_operations, nodes), *map(_text_operations, unread_texts(reading))
    )
    if any(map(_is_whole_quotient, nodes)):
        operations |= {"quotient"}
    allowed = set(operations)
    if any(each == _E for node in nodes for each in walk(node)):
        allowed.add("exponential")
    if not _EXPANSIONS.isdisjoint(operations) or any(map(_has_letters_below, nodes)):
        allowed |= _EXPANSIONS if "expansion" in operations else {"expansion of a quotient"}
    form = _answer_form(reading)
    return _Structure(
        form=form,
        operations=operations,
        allowed=frozenset(allowed),
        spelling=f"{form}%" if reading.percent else form,
        copyable=reading.kind not in _NOT_COPIED and [node.kind for node in nodes] != ["symbol"],
        tokens=_tokens(reading.text),
    )


def _nodes(reading: Reading) -> Iterator[Node]:
    """The expressions of an answer that have a value, without factors that reading has added.

    An equation has none: (x-1)^2 + y^2 = 5^2 is as good as any other form.
    """
    if reading.expression is not None and reading.kind not in ("named", "equation"):
        node = reading.expression.node
        magnitude = reading.unit is not None and reading.unit.factor != 1  # 5 million is not a product
        yield node.args[0] if magnitude and node.kind == "mul" else node
    for item in reading.items:
        if reading.kind == "matrix" and not reading.text.startswith("\\begin") and item.expression is not None:
            yield from item.expression.node.args  # the expression before a matrix is a common factor
        else:
            yield from _nodes(item)


def _text_operations(text: str) -> Iterator[str]:
    """The operations in a text that the rules cannot read; for `\\sum_{k=1}^{10} k = 55`, those after the last sign."""
    right_side = split(text, _EQUALS)[-1][1]
    if len(right_side) < len(text):
        yield from _structure(right_side).operations
        return
    for operator, factorial, determinant in _UNREAD.findall(right_side):
        name = "factorial" if factorial else "det" if determinant else operator
        yield _KINDS.get(name, name)


def _operations(node: Node) -> frozenset[str]:
    """The kinds of unevaluated operations of an expression."""
    if node.kind in ("number", "symbol") or is_mixed_number(node):
        return frozenset()
    if node.kind == "add":
        operands = [term for _, term in signed_terms(node)]
        own = {"sum"} if _has_like(operands) else set()
    elif node.kind in ("mul", "div", "neg", "pow"):
        factors = [factor for factor, _ in factors_of(node)]
        operands = []
        for factor in factors:
            operands += factor.args if factor.kind == "pow" else [factor]
        own = _of_product(node).union(*(_of_power(factor) for factor in factors if factor.kind == "pow"))
    else:
        operands = list(node.args)
        free = node.kind in ("root", "degree") or (node.kind == "abs" and has_letters(node))
        own = set() if free else {_KINDS.get(node.kind, node.kind)}
        if node.kind == "root" and _rational(node) is not None:
            own.add("power")
    return frozenset(own).union(*map(_operations, operands))


def _has_like(terms: list[Node]) -> bool:
    """Whether two terms of a sum differ only in their numerals, and so could be added."""
    likes = Counter(
        tuple(sorted(f"{side}{canonical_form(factor)}" for factor, side in factors_of(term) if not _is_numeral(factor)))
        for term in terms
    )
    return max(likes.values()) > 1


def _of_product(node: Node) -> set[str]:
    kinds: set[str] = set()
    factors = factors_of(node)
    together = [factor for factor, _ in factors_of(node, split_fractions=False) if _is_numeral(factor)]
    above, below = (
        [factor for factor, exponent in factors if exponent == side and _is_numeral(factor)] for side in (1, -1)
    )
    # A mixed number contains a fraction: divided by 2 it is a fraction of fractions.
    in_fractions = above + below if any(map(is_mixed_number, above + below)) else []
    if any(map(_are_several, (together, above, below, in_fractions))):
        kinds.add("product")
    roots = (factor for factor, _ in factors if factor == _I or (factor.kind == "root" and not symbols_in(factor)))
    radicals = Counter(map(canonical_form, roots))
    if radicals and max(radicals.values()) > 1:
        kinds.add("power")
    if _sums_above(node) > 1:
        kinds.add("expansion of a quotient" if _has_letters_below(node) else "expansion")
    return kinds


def _of_power(power: Node) -> set[str]:
    base, exponent = power.args
    if base == _E:
        return {"exponential"}
    if not symbols_in(base) <= {"i"} or _is_ten(power):
        return set()
    if symbols_in(exponent):
        return {"exponential"} if has_letters(exponent) else set()
    return {"power"} if integer_value(exponent) is not None or _rational(power) is not None else set()


def _are_several(numerals: list[Node]) -> bool:
    """Whether several numerals are still to be multiplied.

    A decimal with its power of ten is one numeral, and a number before a sum is a common factor.
    """
    tens = sum(map(_is_ten, numerals))
    others = sum(each != _ONE and (each.kind != "add" or is_mixed_number(each)) for each in numerals) - tens
    return tens > 1 or others > 1


def _is_ten(node: Node) -> bool:
    return node.kind == "pow" and node.args[0] == _TEN and integer_value(node.args[1]) is not None


def _sums_above(node: Node) -> int:
    """The number of sums multiplied with each other in the numerator; a square has two."""
    total = 0
    for factor, side in factors_of(node):
        times = 1
        while factor.kind == "pow" and (exponent := integer_value(factor.args[1])) is not None and exponent > 0:
            factor, times = factor.args[0], times * exponent
        if side > 0 and factor.kind == "add" and not _is_numeral(factor):
            total += times
        elif side > 0 and times > 1 and factor.kind in ("mul", "div", "neg"):
            total += times * _sums_above(factor)
    return total


def _is_whole_quotient(node: Node) -> bool:
    """Whether an expression is a division of numerals whose result is an integer, as 144/12."""
    _, node = signed(node)
    if node.kind != "div" or node.args[1] == _ONE or not all(map(_is_numeral, node.args)):
        return False
    value = _rational(node)
    return value is not None and value.denominator == 1


def _is_numeral(node: Node) -> bool:
    """Whether an expression is made of digits, without letters, radicals and functions."""
    for each in walk(node):
        if each.kind in ("symbol", "root") or _KINDS.get(each.kind) in _TRANSCENDENTAL:
            return False
        if each.kind == "pow" and integer_value(each.args[1]) is None:
            return False
    return True


def _rational(node: Node) -> Fraction | None:
    """The value, or None if it is not rational, as it is for 8^(2/3)."""
    try:
        return Expression(node=node).exact
    except (OverLimitError, UndefinedError):
        return None


def _has_letters_below(node: Node) -> bool:
    return any(each.kind == "div" and has_letters(each.args[1]) for each in walk(node))


def _answer_form(reading: Reading) -> str:
    """The form of an answer, without names and units."""
    reading = unnamed(reading)
    if reading.kind == "scalar":
        return _scalar_form(reading)
    if reading.kind == "equation" and reading.expression is not None:
        return "=".join(sorted(map(canonical_form, sides(reading.expression.node))))
    items = [_answer_form(item) for item in reading.items]
    if not items:
        return "".join(reading.text.split())
    if reading.kind in ("list", "set", "union"):
        return f"{{{','.join(sorted(items))}}}"
    return f"{reading.kind} {reading.label} {','.join(items)}"


def _scalar_form(reading: Reading) -> str:
    nodes = list(_nodes(reading))
    form = ",".join(map(canonical_form, nodes))
    if any(each.kind == "div" and each.args[1].kind == "div" for node in nodes for each in walk(node)):
        form += " by a fraction"
    if reading.unit is not None and reading.unit.factor != 1:
        return f"{form} of {reading.unit.factor}"
    in_words = reading.expression is not None and reading.expression.node.kind == "number" and reading.text.isascii()
    if in_words and not any(map(str.isdigit, reading.text)):
        return f"{form} in words"
    return f"{form} as a power of ten" if _EXPONENT.search(reading.text) else form


def _tokens(text: str) -> tuple[str, ...]:
    return tuple(token for token in _TOKEN.findall(text) if token not in _NO_TOKENS)


@lru_cache(maxsize=1024)
def _segments(question: str) -> tuple[tuple[str, ...], ...]:
    """The sentences and formulas of a question, each as tokens, spelled as for reading answers."""
    segments = []
    for segment in _SEGMENT_ENDS.split(question):
        try:
            segments.append(_tokens(clean(segment)))
        except OverLimitError:
            continue
    return tuple(segments)


@lru_cache(maxsize=1024)
def _question_spellings(question: str) -> frozenset[str]:
    """The spellings of the formulas and numbers of a question."""
    spellings = set()
    for text in (*_SEGMENT_ENDS.split(question), *_NUMERAL.findall(question)):
        try:
            spellings.add(_structure(text).spelling if text.strip() else "")
        except OverLimitError:
            continue
    return frozenset(spellings)


def _is_in(tokens: tuple[str, ...], question: str) -> bool:
    """Whether the tokens are a contiguous part of the question; a part of a number or of a power does not count."""
    size = len(tokens)
    for segment in _segments(question):
        for start in range(len(segment) - size + 1):
            if segment[start : start + size] != tokens:
                continue
            before, after = "".join(segment[:start])[-1:], "".join(segment[start + size : start + size + 2])
            inside_number = (before or "x") in "0123456789." and tokens[0] in "0123456789."
            if not inside_number and not (_GOES_ON.match(after) and (after[0] in "^_!" or tokens[-1].isdigit())):
                return True
    return False
