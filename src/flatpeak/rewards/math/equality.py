"""Equality of two readings by rules, for each pair of kinds: True, False, or None without a verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Final

from flatpeak.rewards.math.expression_values import Expression, proportional, same_value
from flatpeak.rewards.math.intervals import Kind, Reading, merged, plain, scalar
from flatpeak.rewards.math.syntax_tree import Node, UndefinedError, integer, operation

Equality = bool | None
_MONEY: Final = frozenset({"usd", "eur", "gbp", "jpy", "inr", "cny", "cent"})
_POINTS: Final = re.compile(r"(?:\\(?:triangle|angle)\s*)?(?:\\(?:overline|bar)\s*)?\{?(?P<points>[A-Z]{2,8})\}?")
_SINGLE_UNIT: Final = re.compile(r"([^^·]+)(?:\^(?P<power>-?\d+))?")
_OPEN_UNIT: Final = re.compile(r"unit(?:\^(?P<power>-?\d+))?")
_COORDINATES: Final = ("abcd", "xyz")
_INFINITY: Final = Node("symbol", name="infty")
_PLUS_INFINITY: Final = scalar(r"\infty", _INFINITY)
_MINUS_INFINITY: Final = scalar(r"-\infty", operation("neg", _INFINITY))


def equal(gold: Reading, answer: Reading) -> Equality:
    """Whether two answers are equal by the rules; OverLimitError if a value would cost too much."""
    if gold.kind == answer.kind and gold.text == answer.text and gold.label == answer.label:
        return True
    gold, answer = _without_names(gold, answer)
    return _equal(gold, answer) if gold.kind == answer.kind == "set" else _equal(_single(gold), _single(answer))


def _equal(gold: Reading, answer: Reading) -> Equality:
    """The same for items of lists and sets, where a set with one item does not equal its item."""
    gold, answer = _without_names(gold, answer)
    if gold.kind == answer.kind and gold.text == answer.text and gold.label == answer.label:
        return True
    if "text" in (gold.kind, answer.kind):
        return plain(gold.text) == plain(answer.text)
    if "unread" in (gold.kind, answer.kind):
        return None
    rule = _RULES.get(frozenset({gold.kind, answer.kind}))
    return False if rule is None else rule(gold, answer)


def _without_names(gold: Reading, answer: Reading) -> tuple[Reading, Reading]:
    """Both readings without `x =` if the names are equal or one of them is missing."""
    if gold.kind == answer.kind == "named":
        return (gold.items[0], answer.items[0]) if gold.label == answer.label else (gold, answer)
    if gold.kind == "named" and not _is_relation(answer):
        return gold.items[0], answer
    if answer.kind == "named" and not _is_relation(gold):
        return gold, answer.items[0]
    return gold, answer


def _is_relation(reading: Reading) -> bool:
    r"""Whether an answer with a name beside it keeps the name: not for `x \ne 3`, which is a union."""
    return reading.kind == "equation" or (reading.kind == "inequality" and reading.label != r"\ne")


def _single(reading: Reading) -> Reading:
    """The item of a set or list with one item; other readings unchanged."""
    if reading.kind in ("list", "set") and len(reading.items) == 1 and reading.items[0].kind not in ("list", "set"):
        return reading.items[0]
    return reading


def _all(verdicts: Iterable[Equality]) -> Equality:
    unknown = False
    for verdict in verdicts:
        if verdict is False:
            return False
        unknown = unknown or verdict is None
    return None if unknown else True


def _in_order(gold: Reading, answer: Reading) -> Equality:
    if gold.label != answer.label or len(gold.items) != len(answer.items):
        return False
    return _all(_equal(one, other) for one, other in zip(gold.items, answer.items, strict=True))


def _tuple_and_names(gold: Reading, answer: Reading) -> Equality:
    """Equality of `(3,5)` and `x=3, y=5`. A list without names has no order, so it does not equal a tuple."""
    names = answer.items if answer.kind == "list" else gold.items
    if "()" not in (gold.label, answer.label) or len({item.label for item in names}) < len(names):
        return False
    if any(item.kind != "named" for item in names) or len(gold.items) != len(answer.items):
        return False
    sides = [_by_letter(side.items) if side.kind == "list" else side.items for side in (gold, answer)]
    return _all(_equal(one, other) for one, other in zip(*sides, strict=True))


def _by_letter(names: Sequence[Reading]) -> Sequence[Reading]:
    """The items in alphabetical order if that is customary for their letters: `y=5, x=3` is `(3,5)`."""
    letters = {item.label for item in names}
    customary = any(letters.issubset(order) for order in _COORDINATES)
    return sorted(names, key=lambda item: item.label) if customary else names


def _in_any_order(gold: Reading, answer: Reading) -> Equality:
    if len(gold.items) != len(answer.items):
        return False
    unmatched, unknown = list(answer.items), False
    for one in gold.items:
        verdicts = []
        for index, other in enumerate(unmatched):
            verdicts.append(_equal(one, other))
            if verdicts[-1]:
                del unmatched[index]
                break
        else:
            if None not in verdicts:
                return False
            unknown = True
    return None if unknown else True


def _sets(gold: Reading, answer: Reading) -> Equality:
    """Equality of sets; repeated items count once."""
    return _all([*(_is_in(item, answer) for item in gold.items), *(_is_in(item, gold) for item in answer.items)])


def _is_in(item: Reading, collection: Reading) -> Equality:
    verdicts = [_equal(item, other) for other in collection.items]
    if True in verdicts:
        return True
    return None if None in verdicts else False


def _scalars(gold: Reading, answer: Reading) -> Equality:
    one, other = _values(gold, answer)
    names = [reading.unit.name if reading.unit is not None else "" for reading in (gold, answer)]
    if gold.percent != answer.percent:
        return _with_percent(gold, answer) if gold.unit is None and answer.unit is None else False
    if all(names) and not _same_unit(*names):
        return False
    points = _named_points(gold, answer)
    if points is not None:
        return points
    if one.node.kind == other.node.kind == "symbol":
        return one.node.name == other.node.name or (gold.label == "choice" and one.node.name == other.node.name.upper())
    return same_value(one, other)


def _named_points(gold: Reading, answer: Reading) -> bool | None:
    """Equality of capitals in order, as points, digits or words (`AB` is not a product); None for anything else."""
    one, other = _POINTS.fullmatch(gold.text), _POINTS.fullmatch(answer.text)
    return None if one is None or other is None else one["points"] == other["points"]


def _same_unit(first: str, second: str) -> bool:
    for name, other in ((first, second), (second, first)):
        if unit := _OPEN_UNIT.fullmatch(name):
            return _fits_open_unit(unit["power"], other)
    return first == second or {first, second} in ({"deg", "deg c"}, {"deg", "deg f"})


def _fits_open_unit(power: str | None, other: str) -> bool:
    """Whether `units` to a power may stand for another unit: any except angles and money."""
    if other.startswith("deg") or other in _MONEY:
        return False
    second = _OPEN_UNIT.fullmatch(other)
    if power is None or (second is not None and second["power"] is None):
        return True  # `units` without a power are also written for areas and volumes
    return power == (other.rpartition("^")[2] if "^" in other else "1")


def _values(gold: Reading, answer: Reading) -> tuple[Expression, Expression]:
    """Both expressions; a unit becomes a factor if it is a letter of the other, which has no unit: `3 s`, `3s`."""
    values = [reading.expression or Expression(node=Node("symbol", name="?")) for reading in (gold, answer)]
    for index, reading in enumerate((gold, answer)):
        other = (answer, gold)[index]
        if reading.unit is None or other.unit is not None:
            continue
        single = _SINGLE_UNIT.fullmatch(reading.unit.name)
        letter = next(
            (each for each in sorted(values[1 - index].letters) if single and each.lower() == single[1]), None
        )
        if single is not None and letter is not None:
            factor = operation("pow", Node("symbol", name=letter), integer(int(single["power"] or 1)))
            values[index] = Expression(node=operation("mul", values[index].node, factor))
    return values[0], values[1]


def _with_percent(gold: Reading, answer: Reading) -> Equality:
    """Equality with a percent sign on one side only: a missing unit (50% and 50), or hundredths (50% and 0.5).

    Both equal a gold answer with the sign. If the gold answer has no sign, a whole number above 1 is equal only as a
    missing unit (50 is not 5000%), and a number up to 1 only as hundredths (0.5 is not 0.5%).
    """
    percentage, bare = (gold, answer) if gold.percent else (answer, gold)
    if percentage.expression is None or bare.expression is None:
        return False
    value = _exact(bare.expression)
    unit = gold.percent or value is None or value == 0 or abs(value) > 1
    hundredths = value is not None and (gold.percent or abs(value) <= 1 or value.denominator > 1)
    verdict = same_value(percentage.expression, bare.expression) if unit else False
    if verdict is False and hundredths:
        hundredth = Node("number", number=Fraction(1, 100))
        return same_value(Expression(node=operation("mul", percentage.expression.node, hundredth)), bare.expression)
    return verdict


def _exact(expression: Expression) -> Fraction | None:
    try:
        return expression.exact
    except UndefinedError:
        return None


def _ratios(gold: Reading, answer: Reading) -> Equality:
    """Equality of ratios. Times of day are compared by digits; `6:10` is a time only beside another possible time."""
    labels = {gold.label, answer.label}
    if labels in ({"clock"}, {"either"}):
        return _in_order(gold, answer)
    return False if "clock" in labels else same_value(_quotient(gold), _quotient(answer))


def _ratio_and_scalar(gold: Reading, answer: Reading) -> Equality:
    ratio, value = (gold, answer) if gold.kind == "ratio" else (answer, gold)
    if ratio.label or value.unit is not None or value.percent or value.expression is None:
        return False
    if (exact := _exact(value.expression)) is not None and exact.denominator == 1:
        return False  # 3:1 has two parts, and 3 has one
    return same_value(_quotient(ratio), value.expression)


def _quotient(ratio: Reading) -> Expression:
    first, second = (item.expression.node for item in ratio.items if item.expression is not None)
    return Expression(node=operation("div", first, second))


def _equations(gold: Reading, answer: Reading) -> Equality:
    """Equality up to a factor. An equation that is not solved does not equal a gold answer that is a number."""
    if gold.expression is None or answer.expression is None:
        return None
    for named in (gold, answer):
        value = named.items[0].expression if named.kind == "named" else None
        if value is not None and not value.letters:
            return False
    return proportional(gold.expression, answer.expression)


def _unions(gold: Reading, answer: Reading) -> Equality:
    """Equality member by member, or after merging; a single interval is a union with one member."""
    members = [reading.items if reading.kind == "union" else (reading,) for reading in (gold, answer)]
    verdict = _in_any_order(*(Reading(kind="union", text="", items=each) for each in members))
    if verdict:
        return True
    joined = [merged(each) for each in members]
    if joined[0] is None or joined[1] is None or len(joined[0]) != len(joined[1]):
        return verdict
    return _all(_equal(one, other) for one, other in zip(joined[0], joined[1], strict=True))


def _union_and_exception(gold: Reading, answer: Reading) -> Equality:
    r"""Equality of `x \ne 3` and `(-\infty,3)\cup(3,\infty)`."""
    inequality, union = (gold, answer) if gold.kind == "inequality" else (answer, gold)
    if inequality.label != r"\ne" or len(inequality.items) != 2:
        return False
    values = [item for item in inequality.items if item.is_number]
    nodes = [item.expression.node for item in inequality.items if item.expression is not None]
    if len(values) != 1 or all(node.kind != "symbol" for node in nodes):
        return False
    members = tuple(
        Reading(kind="ordered", text="", items=ends, label="()")
        for ends in ((_MINUS_INFINITY, values[0]), (values[0], _PLUS_INFINITY))
    )
    return _unions(union, Reading(kind="union", text="", items=members))


def _inequalities(gold: Reading, answer: Reading) -> Equality:
    if gold.label != answer.label or len(gold.items) != len(answer.items):
        return False
    straight = _in_order(gold, answer)
    if straight or gold.label != r"\ne":
        return straight
    return _all(_equal(one, other) for one, other in zip(gold.items, answer.items[::-1], strict=True))


_RULES: Final[dict[frozenset[Kind], Callable[[Reading, Reading], Equality]]] = {
    frozenset({"scalar"}): _scalars,
    frozenset({"ratio"}): _ratios,
    frozenset({"ratio", "scalar"}): _ratio_and_scalar,
    frozenset({"ordered"}): _in_order,
    frozenset({"ordered", "list"}): _tuple_and_names,
    frozenset({"list"}): _in_any_order,
    frozenset({"list", "set"}): _in_any_order,
    frozenset({"set"}): _sets,
    frozenset({"union"}): _unions,
    frozenset({"union", "ordered"}): _unions,
    frozenset({"union", "inequality"}): _union_and_exception,
    frozenset({"matrix"}): _in_order,
    frozenset({"equation"}): _equations,
    frozenset({"equation", "named"}): _equations,
    frozenset({"named"}): _equations,
    frozenset({"inequality"}): _inequalities,
}
"""The rule for each pair of kinds; pairs without one are unequal. Digits in a base equal only the same digits in it."""
