"""Values of products and mixed numbers, derived by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from flatpeak.rewards.math.rule_grader import read_answer, read_number, rule_verdict
from flatpeak.rewards.math.unevaluated import is_evaluated

MIXED = [
    (r"3\frac12", "7/2"),
    (r"3\frac{1}{2}", "7/2"),
    (r"3\dfrac{1}{2}", "7/2"),
    (r"3\tfrac12", "7/2"),
    (r"3 \frac 1 2", "7/2"),
    (r"3\,\frac{1}{2}", "7/2"),
    (r"3~\frac{1}{2}", "7/2"),
    ("3 1/2", "7/2"),
    ("3 1 / 2", "7/2"),
    ("3 1/2.", "7/2"),
    ("3½", "7/2"),
    ("3 ½", "7/2"),
    (r"-3\frac12", "-7/2"),
    ("-3 1/2", "-7/2"),
    (r"--3\frac12", "7/2"),
    (r"0\frac34", "3/4"),
    (r"12\frac{3}{16}", "195/16"),
    (r"99\frac{99}{100}", "9999/100"),
    (r"\left(3\frac12\right)", "7/2"),
    # Braces print nothing.
    (r"2{\frac13}", "7/3"),
    (r"{2}\frac13", "7/3"),
    (r"{2}{\frac{1}{3}}", "7/3"),
    (r"2{{\frac13}}", "7/3"),
    (r"{-3}\frac12", "-7/2"),
    # As an operand.
    (r"2\cdot3\frac12", "7"),
    (r"3\frac12\cdot2", "7"),
    (r"3\frac12(2)", "7"),
    (r"6\div1\frac12", "4"),
    ("6 / 1 1/2", "4"),
    (r"1\frac12\div\frac12", "3"),
    (r"2\times-3\frac12", "-7"),
    (r"5-1\frac12", "7/2"),
    (r"1\frac12+2\frac13", "23/6"),
    (r"1\frac12\cdot1\frac13", "2"),
    (r"\frac{1\frac12}{3}", "1/2"),
    (r"(1\frac12)^2", "9/4"),
]
PRODUCTS = [
    (r"2\left(\frac13\right)", "2/3"),
    (r"2(\frac13)", "2/3"),
    ("2(1/3)", "2/3"),
    ("60(1/4)", "15"),
    ("60 (1/4)", "15"),
    (r"3[\frac12]", "3/2"),
    (r"3\left[\frac{1}{2}\right]", "3/2"),
    (r"3\Big(\frac12\Big)", "3/2"),
    (r"3\left(\left(\frac12\right)\right)", "3/2"),
    (r"3{(\frac12)}", "3/2"),
    (r"3{(1)/2}", "3/2"),
    (r"(3)\frac12", "3/2"),
    (r"{(3)}\frac12", "3/2"),
    (r"\left(3\right)\left(\frac12\right)", "3/2"),
    (r"(12)(\frac13)", "4"),
    (r"[3]\frac12", "3/2"),
    (r"(-3)\frac12", "-3/2"),
    (r"-3(\frac12)", "-3/2"),
    (r"3(-\frac12)", "-3/2"),
    (r"3\cdot\frac12", "3/2"),
    (r"3\times\frac12", "3/2"),
    ("3*1/2", "3/2"),
    (r"5-3\left(\frac13\right)", "4"),
    (r"2\cdot3(\frac12)", "3"),
    (r"2(3)\frac12", "3"),
    (r"2(3)4", "24"),
    (r"2(3\frac12)", "7"),
    (r"100\left(\frac15\right)\left(\frac12\right)", "10"),
    (r"\frac12(6)", "3"),
    (r"\frac12\left(\frac13\right)", "1/6"),
    (r"3\frac52", "15/2"),
    (r"3\frac22", "3"),
    (r"2^3\frac12", "4"),
    (r"\sqrt{9}\frac12", "3/2"),
    (r"1.5\frac12", "3/4"),
    (r"5(6)", "30"),
]
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


@pytest.mark.parametrize(("text", "value"), [*MIXED, *PRODUCTS])
def test_brackets_make_a_product_and_an_integer_before_a_bare_proper_fraction_a_mixed_number(
    text: str, value: str
) -> None:
    expression = read_answer(text)[1].expression
    assert expression is not None
    assert expression.exact == Fraction(value)


@pytest.mark.parametrize("text", NO_VALUES)
def test_digits_side_by_side_in_print_are_neither_a_product_nor_one_number(text: str) -> None:
    assert read_answer(text)[1].kind == "unread"


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"100\left(\frac15\right) = 20", "20", True),
        (r"16\left(\frac34\right)=12", "12", True),
        (r"V = 3\left(\frac12\right)=\frac32", r"\frac32", True),
        (r"\$40\left(\frac14\right)=\$10", "10", True),
        (r"5-3\left(\frac13\right)", "4", True),
        (r"(12)(\frac13)=4", "4", True),
        (r"2\cdot3\frac12 = 7", "7", True),
        ("60(1/4) = 15", "15", True),
        ("60(1/4) = 60.25", "60.25", False),
        ("3(1/2)", "3.5", False),
        ("2(1/3)", r"\frac73", False),
        (r"2{\frac13}", r"\frac73", True),
        ("3{1/2}", "3.5", False),
        ("3{1/2}", "1.5", False),
        ("{5}{6}", "30", False),
    ],
)
def test_a_product_with_its_result_does_not_contradict_itself(answer: str, gold: str, right: bool) -> None:
    assert (rule_verdict(answer, gold) is True) is right


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("60(1/4) = 15", 15),
        ("60(1/4)", None),
        ("3 + 1/2", None),
        ("6 * 10", None),
        ("1.5 * 1000", None),
        ("2 * 12", None),
        ("3 1/2", Fraction(7, 2)),
        ("3 1/2 million", 3_500_000),
        ("5万", 50_000),
        ("2 * 3 million", None),
    ],
)
def test_a_number_has_no_product_left_to_work_out(text: str, number: Fraction | None) -> None:
    assert read_number(text) == number


def test_a_product_with_a_fraction_in_brackets_is_left_to_work_out_and_a_mixed_number_is_none() -> None:
    assert not is_evaluated("60(1/4)", "15")
    assert is_evaluated(r"3\frac12", r"\frac72")


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("f^{-1}(x)", r"\frac{1}{f(x)}", False),
        ("f^{-1}(x)", r"f^{-1}\left(x\right)", True),
        ("2f^{-1}(3)", "f^{-1}(3)+f^{-1}(3)", True),
        (r"f^{-1}(x)=\frac{x-3}{2}", r"\frac{x-3}{2}", True),
        (r"f^{-1}(x)=\frac{x-3}{2}", r"\frac{x-3}{3}", False),
        ("f^{-1}(5)=2", "2", True),
        ("x^{-1}(5)=2", "2", False),
        ("x^{-1}(x+1)", r"\frac{x+1}{x}", True),
    ],
)
def test_a_function_to_the_power_of_minus_one_before_its_argument_is_its_inverse(
    answer: str, gold: str, right: bool
) -> None:
    assert (rule_verdict(answer, gold) is True) is right
