"""Values of products and mixed numbers, derived by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from flatpeak.rewards.math.rule_grader import read_answer, read_number, rule_verdict
from flatpeak.rewards.math.unevaluated import is_evaluated
from support.tables import exact, read_tables

TABLES = read_tables(__file__)

NO_VALUES = [
    *("3{1/2}", "{5}{6}", "5{6}", "{5}6", "5 6", "2{{5}}", "(5)6", r"\sqrt2\cdot5{6}", "3 5/2", "x{2}", "5.5{.5}"),
    *(
        r"2\cdot5 6",
        "3{1}/{2}",
        r"5\hspace{1cm}6",
        r"5\quad600",
        r"5\quad\qquad 600",
        r"5\phantom{0}6",
        r"5\hphantom{0}600",
    ),
]


@pytest.mark.parametrize(("text", "value"), [*TABLES["mixed"], *TABLES["products"]])
def test_brackets_make_a_product_and_an_integer_before_a_bare_proper_fraction_a_mixed_number(
    text: str, value: str
) -> None:
    expression = read_answer(text)[1].expression
    assert expression is not None
    assert expression.exact == Fraction(value)


@pytest.mark.parametrize("text", NO_VALUES)
def test_digits_side_by_side_in_print_are_neither_a_product_nor_one_number(text: str) -> None:
    assert read_answer(text)[1].kind == "unread"


@pytest.mark.parametrize(("answer", "gold", "right"), TABLES["results"])
def test_a_product_with_its_result_does_not_contradict_itself(answer: str, gold: str, right: bool) -> None:
    assert (rule_verdict(answer, gold) is True) is right


@pytest.mark.parametrize(("text", "number"), TABLES["numbers"])
def test_a_number_has_no_product_left_to_work_out(text: str, number: str | int | None) -> None:
    assert read_number(text) == exact(number)


def test_a_product_with_a_fraction_in_brackets_is_left_to_work_out_and_a_mixed_number_is_none() -> None:
    assert not is_evaluated("60(1/4)", "15")
    assert is_evaluated(r"3\frac12", r"\frac72")


@pytest.mark.parametrize(("answer", "gold", "right"), TABLES["inverses"])
def test_a_function_to_the_power_of_minus_one_before_its_argument_is_its_inverse(
    answer: str, gold: str, right: bool
) -> None:
    assert (rule_verdict(answer, gold) is True) is right
