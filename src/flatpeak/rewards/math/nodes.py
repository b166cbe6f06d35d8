"""The trees that expressions are read into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction


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
