"""The grader as a whole: rules and workers, the cache, the order of the pairs, failures."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from math_verify import grader as math_verify_grader

from flatpeak.rewards.math import grader as math_grader
from flatpeak.rewards.math.expression_values import Expression, same_value
from flatpeak.rewards.math.grader import MathGrader, verify
from flatpeak.rewards.math.normalize import clean, without_redundant_brackets
from flatpeak.rewards.math.parser import parse_expression
from flatpeak.rewards.math.rule_grader import normalized, rule_verdict
from flatpeak.rewards.math.syntax_tree import OverLimitError, UndefinedError, UnreadableError
from flatpeak.rewards.workers.pool import WorkerError
from support.cpu_time import cpu_time
from support.properties import repeatable
from support.tables import read_tables

TABLES = read_tables(__file__)

SLOW = r"\sum_{n=1}^{10^9} \frac{1}{n^2}"
"""Only math-verify can read it, and it does not come to an end."""


def boxed(answer: str) -> str:
    return rf"so \boxed{{{answer}}}"


def expression(text: str) -> Expression:
    return Expression(node=parse_expression(clean(text)))


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    with MathGrader(timeout=1.0, workers=1) as made:
        yield made


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        *TABLES["rules"],
        ("1" * 257, "5", False),
        ("(" * 1000 + "5" + ")" * 1000, "5", True),
        ("-" * 200 + "5", "5", True),
    ],
)
def test_the_rules(answer: str, gold: str, verdict: bool | None) -> None:
    with cpu_time() as spent:
        assert rule_verdict(answer, gold) is verdict
    assert spent.seconds < 1


def test_this_process_finds_no_value_to_many_digits(grader: MathGrader) -> None:
    # A worker does: what mpmath may take for it has no bound.
    equal = [
        ("(x+1)^2", "x^2+2x+1"),
        (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt2}"),
        (r"\sqrt8\text{ cm}", r"2\sqrt2\text{ cm}"),
    ]
    assert [rule_verdict(answer, gold, precise=False) for answer, gold in equal] == [None] * 3
    assert grader.grade([(boxed(answer), gold) for answer, gold in equal]) == [True] * 3
    unequal = [("(x+1)^2", "x^2+1"), (r"\sqrt2", r"\sqrt3"), ("1/3", "0.3333333333333333333")]
    assert [rule_verdict(answer, gold, precise=False) for answer, gold in unequal] == [False] * 3


def test_math_verify_decides_what_the_rules_leave_open(grader: MathGrader) -> None:
    pairs = [
        (r"\sqrt{x^2}", "|x|", True),
        (r"\sqrt{x^2}", "x", False),
        (r"\sum_{k=1}^{5} k", "15", True),
        (r"\sum_{k=1}^{5} k", "16", False),
        (r"\mathbb{R} \setminus \{3\}", r"(-\infty,3)\cup(3,\infty)", True),
    ]
    assert grader.grade([(boxed(answer), gold) for answer, gold, _ in pairs]) == [right for *_, right in pairs]


def test_math_verify_is_not_asked_about_prose_or_fragments() -> None:
    # It would read the 5 of each; without a pool of workers there is nobody to ask.
    with MathGrader() as grader:
        texts = [
            r"5\ldots",
            r"5\text{ of } \int",
            "5 & 6",
            r"\neq 5",
            "5 times",
            r"\sum \text{five}",
            r"\frac{d}{dx} 5",
        ]
        assert grader.grade([(boxed(text), "5") for text in texts]) == [False] * len(texts)
        assert grader._pool is None


def test_a_verdict_that_takes_too_long_is_failed_once_and_changes_no_other(grader: MathGrader) -> None:
    pairs = [(boxed(r"\sum_{k=1}^{4} k"), "10"), (boxed(SLOW), "2"), (boxed("5"), "5"), (boxed(SLOW), "2")]
    started = time.monotonic()
    assert grader.grade(pairs) == [True, None, True, None]
    assert time.monotonic() - started < 1 + 6  # once the limit, once a new worker, on a busy machine
    started = time.monotonic()
    assert grader.grade(pairs) == [True, None, True, None]
    assert time.monotonic() - started < 1  # the limit, which grading them again would take
    (outcome,) = grader.compare([(SLOW, "2")])
    assert isinstance(outcome, WorkerError)
    assert outcome.reason == "timeout"


class Held:
    """Something large that a caller has at hand."""


def test_a_failed_verdict_is_kept_without_what_its_callers_had_at_hand(grader: MathGrader) -> None:
    held = []

    def caller() -> list[bool | None]:
        large = Held()
        held.append(weakref.ref(large))
        return grader.grade([(boxed(SLOW), "3")])

    assert caller() == [None]
    gc.collect()
    assert held[0]() is None


def test_texts_that_are_too_long_to_be_right_are_not_kept(grader: MathGrader) -> None:
    before = len(grader._cache)
    assert grader.grade([(boxed(f"{number} words" * 100), "5") for number in range(1, 6)]) == [False] * 5
    assert len(grader._cache) == before


@pytest.mark.parametrize(("error", "failure"), [(MemoryError, True), (RecursionError, True), (TypeError, False)])
def test_running_out_of_memory_or_depth_in_math_verify_is_no_verdict(
    error: type[Exception], failure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> bool:
        raise error("no")

    monkeypatch.setattr(math_verify_grader, "sympy_expr_eq", fails)
    if failure:
        with pytest.raises(error):
            verify("x", "y")
    else:
        assert verify("x", "y") is False


@pytest.mark.slow
def test_verdicts_depend_neither_on_the_order_nor_on_the_cache(grader: MathGrader) -> None:
    answers = ["5", "x=5", "1,2", "(2,1)", "50%", r"\sqrt{x^2}", "x", r"\sum_{k=1}^{2} k", "3", "five", "", "9^{9^9}"]
    pairs = [(boxed(answer), gold) for answer in answers for gold in ("5", "2, 1", "0.5", "|x|", "3")]
    first = grader.grade(pairs)
    assert first.count(True) == 8
    for seed in range(2):
        order = random.Random(seed).sample(range(len(pairs)), len(pairs))
        with MathGrader(timeout=30.0, workers=1) as fresh:
            for one in (fresh, grader):
                assert one.grade([pairs[index] for index in order]) == [first[index] for index in order]


def test_a_gold_beyond_the_limits_is_equal_to_its_own_spelling_and_else_unknown() -> None:
    gold = "1" * 5000
    with MathGrader() as grader:
        assert grader.grade([(boxed(gold), gold), (boxed("1"), gold)]) == [True, None]
        (outcome,) = grader.compare([("1", gold)])
    assert str(outcome).startswith("the gold answer '111")


def test_whatever_the_rules_raise_is_a_failed_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(answer: str, gold: str, *, precise: bool) -> bool:
        raise MemoryError(answer)

    monkeypatch.setattr(math_grader, "rule_verdict", fails)
    with MathGrader() as grader:
        (outcome,) = grader.compare([("5", "6")])
        assert grader.grade([(boxed("5"), "6")]) == [None]
    assert str(outcome).startswith("MemoryError: 5 (")


def spellings(value: Fraction) -> list[str]:
    """Ways to write a number, of which the grader reads each."""
    top, bottom = value.numerator, value.denominator
    sign, whole, rest = "-" if value < 0 else "", abs(top) // bottom, abs(top) % bottom
    written = [
        f"{top}/{bottom}",
        rf"\frac{{{top}}}{{{bottom}}}",
        rf"x = {sign}\dfrac{{ {2 * abs(top)} }}{{ {2 * bottom} }}",
    ]
    if bottom == 1:
        written += [f"{top:,}", f"{top}.0", rf"\left({top}\right)", rf"${top}$"]
    elif whole:
        written += [rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}", f"{sign}{whole} {rest}/{bottom}"]
    if 1000 % bottom == 0:
        written += [f"{float(value)}", f"{float(value):.6f}"]
    return written


NUMBERS = st.fractions(-3000, 3000, max_denominator=20)


@given(first=NUMBERS, second=NUMBERS, data=st.data())
@repeatable
def test_numbers_are_equal_by_their_value_and_never_by_their_spelling(
    first: Fraction, second: Fraction, data: st.DataObject
) -> None:
    one, same, other = (data.draw(st.sampled_from(spellings(value))) for value in (first, first, second))
    assert rule_verdict(one, same) is True
    assert normalized(one) == normalized(same)
    assert rule_verdict(one, other) is rule_verdict(other, one) is (first == second)
    assert (normalized(one) == normalized(other)) is (first == second)


@pytest.mark.parametrize("answer", ["9^{9000}", "1e9000", "x = 1e-9000"])
def test_a_number_of_more_digits_than_python_writes_has_the_vote_of_its_spelling(answer: str) -> None:
    assert normalized(answer) == "".join(answer.split())


def test_expressions_are_equal_as_functions() -> None:
    assert same_value(expression("(x+1)^2"), expression("x^2+2x+1")) is True
    assert same_value(expression("x^{100}"), expression("x^{100}+1")) is False
    assert same_value(expression(r"\sqrt{x^2}"), expression("x")) is None
    assert same_value(expression("1/0"), expression("1/0")) is False
    assert expression("3/4+1/4").exact == 1
    assert expression(r"\sqrt{2}").exact is None
    with pytest.raises(UndefinedError):
        _ = expression("1/0").exact


@pytest.mark.parametrize("text", ["5 5", "x5", "5+", "(5", "5)", r"\int x", "5|", "^5", r"\frac{d}{dx} x^2", "a'", "é"])
def test_what_is_not_understood_to_its_end_is_not_read(text: str) -> None:
    with pytest.raises(UnreadableError):
        parse_expression(text)


def test_an_expression_of_too_many_levels_is_over_the_limit() -> None:
    with pytest.raises(OverLimitError):
        parse_expression("-".join(["("] * 50))


def test_redundant_brackets_go_and_others_stay() -> None:
    assert without_redundant_brackets("(((x)))") == "(x)"
    assert without_redundant_brackets("((x)(y))") == "((x)(y))"
    assert without_redundant_brackets(r"\{{x}\}") == r"\{{x}\}"
    assert without_redundant_brackets("{{{x}") == "{{{x}"


@pytest.mark.slow
def test_the_grader_and_its_workers_load_neither_torch_nor_sympy_here() -> None:
    code = (
        "import sys\n"
        "from flatpeak.rewards.math.grader import MathGrader\n"
        "from flatpeak.rewards.math_reward import MathReward\n"
        "with MathGrader() as grader:\n"
        "    print(grader.compare([(r'\\sum_{k=1}^{3} k', '6')]))\n"
        "print([name for name in ('torch', 'sympy', 'math_verify') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[True]\n[]\n"


@pytest.mark.slow
def test_a_worker_loads_math_verify_without_torch() -> None:
    code = "import pickle, sys; from flatpeak.rewards.math.grader import Symbolic\n"
    code += "ask = pickle.loads(pickle.dumps(Symbolic())); print(ask('1/2', '0.5'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
