r"""A check that an answer rewrites a formula of the question as far as its gold answer does.

If a formula of the question has the value of the gold answer, the question asks for another form of it: solved for a
letter, factored, expanded, or with reduced radicals. An answer halfway to that form is unfinished. Other questions do
not reveal the value, so any form of it is a result: a line through two points is right in any form.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flatpeak.rewards.math.intervals import Reading, unnamed
from flatpeak.rewards.math.rule_grader import read_answer, rule_verdict
from flatpeak.rewards.math.syntax_tree import (
    Node,
    OverLimitError,
    canonical_form,
    factors_of,
    integer_value,
    signed,
    signed_terms,
    symbols_in,
    walk,
)

_CONSTANTS: Final = frozenset({"e", "i", "pi", "infty"})
_MAX_POWER: Final = 9
"""The highest exponent for which a power counts as that many factors."""


def is_rewritten_halfway(answer: str, gold: str, formulas: Iterable[str]) -> bool:
    """Whether the answer lacks the form of its gold, and a formula of the question is the gold in another form."""
    answered, reference = read_answer(answer)[1], read_answer(gold)[1]
    return _lacks_form(answered, reference) and any(_is_another_form(formula, gold) for formula in formulas)


def sides(difference: Node) -> tuple[Node, Node]:
    """The sides of an equation, given as left minus right side."""
    left, right = difference.args
    return left, right.args[0]


def _is_another_form(formula: str, gold: str) -> bool:
    try:
        first, second = (unnamed(read_answer(text)[1]) for text in (formula, gold))
        if first.expression is None or second.expression is None or first.kind not in ("scalar", "equation"):
            return False
        same_form = canonical_form(first.expression.node) == canonical_form(second.expression.node)
        # For irrational values, which the rules leave open, double precision decides.
        return not same_form and rule_verdict(formula, gold, precise=False) is not False
    except OverLimitError:
        return False


def _lacks_form(answered: Reading, reference: Reading) -> bool:
    written, wanted = unnamed(answered), unnamed(reference)
    if wanted.expression is None or wanted.kind != "scalar" or written.expression is None:
        return False
    if reference.kind == "named" and has_letters(wanted.expression.node):
        if written.kind == "equation":
            left, right = sides(written.expression.node)
            return not any(
                one.name == reference.label and reference.label not in symbols_in(other)
                for one, other in ((left, right), (right, left))
            )
        if answered.label in symbols_in(wanted.expression.node):
            return True
    if written.kind != "scalar":
        return False
    return _is_less_worked(written.expression.node, wanted.expression.node)


def has_letters(node: Node) -> bool:
    """Whether an expression has variables; constants do not count."""
    return not symbols_in(node) <= _CONSTANTS


def _is_less_worked(written: Node, wanted: Node) -> bool:
    """Whether an expression has fewer factors than a product of sums, more brackets than a sum, or other radicals."""
    factors = _factors(wanted)
    if _is_product_of_sum(factors):
        fewer = len(_factors(written)) < len(factors)
    else:
        fewer = _has_product_of_sum(written) and not _has_product_of_sum(wanted)
    return fewer or not _radicals(written) <= _radicals(wanted)


def _factors(node: Node) -> list[Node]:
    """The factors with letters in the numerator; a power's base is repeated as often as its exponent says."""
    factors = []
    for factor, side in factors_of(node):
        times = 1
        while factor.kind == "pow" and 0 < (exponent := integer_value(factor.args[1]) or 0) <= _MAX_POWER:
            factor, times = factor.args[0], times * exponent
        if side > 0 and has_letters(factor):
            factors += [factor] * min(times, _MAX_POWER)
    return factors


def _has_product_of_sum(node: Node) -> bool:
    """Whether a term of a sum is the product of a sum with letters and something else."""
    factors = _factors(node)
    terms = [term for _, term in signed_terms(factors[0] if len(factors) == 1 else node)]
    return len(terms) > 1 and any(_is_product_of_sum(_factors(term)) for term in terms)


def _is_product_of_sum(factors: list[Node]) -> bool:
    return len(factors) > 1 and any(factor.kind == "add" for factor in factors)


def _radicals(node: Node) -> set[tuple[str, int]]:
    """The (radicand, degree) of each root without letters, also if it is written as a power."""
    radicals = set()
    for each in walk(node):
        if each.kind == "root" and not has_letters(each.args[0]):
            radicals.add((canonical_form(each.args[0]), integer_value(each.args[1]) or 0))
        elif each.kind == "pow" and not has_letters(each.args[0]) and (degree := _degree(each.args[1])) > 1:
            radicals.add((canonical_form(each.args[0]), degree))
    return radicals


def _degree(exponent: Node) -> int:
    """The denominator of an exponent that is a number; 1 for other exponents."""
    _, exponent = signed(exponent)
    if exponent.kind == "div":
        return integer_value(exponent.args[1]) or 1
    return exponent.number.denominator
