from __future__ import annotations

import time
from fractions import Fraction

import pytest

from flatpeak.errors import UserError
from flatpeak.rewards.numeric_answer import MAX_CHARACTERS, NumberReward, extract_answer, parse_number
from flatpeak.rewards.numeric_answer import read_number_answer as read_answer
from flatpeak.utils.answers import last_boxed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("  18\n", 18),
        ("-42", -42),
        ("+5", 5),
        ("\u22125", -5),
        ("007", 7),
        ("12.5", Fraction(25, 2)),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("18.", 18),
        ("1,000", 1000),
        ("1,234,567.89", Fraction(123456789, 100)),
        ("$18", 18),
        ("$ 18", 18),
        ("-$5", -5),
        ("$-5", -5),
        ("18 €", 18),
        ("50%", 50),
        ("50%.", 50),
        ("3/4", Fraction(3, 4)),
        ("-6 / 8", Fraction(-3, 4)),
        ("1,000/8", 125),
    ],
)
def test_whole_texts_that_are_numbers_are_read_exactly(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ".", "-", "$", "%", "/", "18..", "1.2.3", "1,00", "1,0000", "1,000,00", "0,125", ",5", "12,34"),
        *("1 000", "- 5", "--5", "-$-5", "1/0", "3/-4", "1/2/3", "1.5/2", "5 apples", "five", "1e3", "0x10", "1_000"),
        *("inf", "nan", "½", "5²", "５", "٥", "18 19", "1+1"),
    ],
)
def test_whole_texts_that_are_no_numbers_are_refused(text):
    assert parse_number(text) is None


def test_no_float_rounds_a_number():
    assert parse_number("0.1") + parse_number("0.2") == parse_number("0.3")
    assert parse_number("9007199254740993") == 2**53 + 1
    assert parse_number("0.3333333333333333") != Fraction(1, 3)


def test_digit_strings_are_read_up_to_the_cap_and_refused_beyond_it():
    assert parse_number("9" * MAX_CHARACTERS) == 10**MAX_CHARACTERS - 1
    assert parse_number("9" * (MAX_CHARACTERS + 1)) is None


@pytest.mark.parametrize(("first", "second"), [("0.75", "3/4"), ("1,000", "1000.0"), ("$18", "18."), ("\u22125", "-5")])
def test_equal_numbers_in_different_clothes_are_equal(first, second):
    assert parse_number(first) == parse_number(second) is not None


@pytest.mark.parametrize(("first", "second"), [("5", "-5"), ("0.333", "1/3"), ("x", "x"), ("18", "18 eggs")])
def test_different_numbers_and_texts_that_are_none_are_not_equal(first, second):
    assert parse_number(first) is None or parse_number(first) != parse_number(second)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("18 dollars", 18),
        ("5km", 5),
        ("$1,250.", 1250),
        ("x = -3", -3),
        ("2 * 9 = 18 eggs", 18),
        ("\n18\n", 18),
        ("$18$", 18),
        (r"\$18", 18),
        (r"50\%", 50),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{ 6 }{ 8 }", Fraction(-3, 4)),
        (r"1{,}000", 1000),
        (r"12\,000", 12000),
        (r"18 \text{ dollars}", 18),
        ("3 eggs + 15 eggs = 18", 18),
        ("Total cost = 9 * $2 = $18", 18),
        ("1.8e1", 18),
        (r"1.8\times10^{1}", 18),
        ("2 1/2", Fraction(5, 2)),
        (r"\text{The answer is } 18", 18),
        ("5 million", 5_000_000),
        ("2 dozen", 24),
    ],
)
def test_answers_may_carry_an_equation_a_unit_a_magnitude_or_latex(content, value):
    assert read_answer(content) == value


@pytest.mark.parametrize(
    "answer",
    [
        *(r"\boxed{18}", r"so it is \boxed{18}.", "**18**", "18 dollars per day", "18 miles/hour", "18 (dollars)"),
        *("18 red apples", "$18 per hour", "18 eggs in total", r"$18$ dollars", "eighteen", "18 pcs", "18 USD"),
        *("18。", "18 元", "18 cm²", r"x = 18\text{ cm}^2", "18 hrs", "18 each"),
    ],
)
def test_what_the_mathematical_reward_takes_for_18_is_18(answer):
    assert extract_answer(f"<answer>{answer}</answer>", "answer_tag") == 18


@pytest.mark.parametrize(
    "words",
    [
        *("hundredths", "thirds", "halves", "squared", "factorial", "lakh", "mil", "wrong", "hundred", "million"),
        *("or 19", "and a half", "cubed", "sixteenths", "dozen", "doubled", "k", "minus 1", "times 2", "R 2", "!"),
        *("maybe not", "^2", "x", "万", "+ 1", "_9", "is wrong", "to 19", "percent off 20", ", 19", "/ 0"),
    ],
)
@pytest.mark.parametrize("frame", ["<answer>18 {}</answer>", r"\boxed{{18 {}}}", r"\boxed{{18 \text{{ {}}}}}"])
def test_words_and_signs_that_change_a_number_are_no_unit_of_it(words, frame):
    extraction = "answer_tag" if "answer" in frame else "boxed"
    assert extract_answer(frame.format(words), extraction) != 18


@pytest.mark.parametrize("answer", ["9 * 2 = 19", "2 + 2 = 5 = 18", "17 = 18", r"18 \approx 25", "18 eggs = 17 eggs"])
def test_an_equation_that_is_false_states_no_number(answer):
    assert read_answer(answer) is None


@pytest.mark.parametrize(
    "content",
    [
        *("no", "", "18 =", "20 - 2", "5 or 6", "5k", "x >= 5", "x != 5", "1,00", "0,125", "9 * 2", "2^3", "3!", "x"),
        *("(1,2)", "3:5", "204_5", "4:30 pm", r"\sqrt{16}", "1/0", r"\infty", r"\binom{5}{2}", "1, 2", r"\pm 3", "18x"),
    ],
)
def test_answers_that_state_no_single_number_are_refused(content):
    assert read_answer(content) is None


def test_an_answer_as_long_as_a_book_is_refused():
    assert read_answer("=" * MAX_CHARACTERS + "5") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("18", 18), (" -3/4\n", Fraction(-3, 4)), ("<think>17</think>\n18", 18), ("<think>18", None), ("so 18", None)],
)
def test_the_whole_text_after_the_thinking_is_the_number(text, value):
    assert extract_answer(text, "whole") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>18</answer>", 18),
        ("<answer>18</answer> trailing", 18),
        ("<answer>17</answer><answer>18", 17),
        ("<answer><answer>18</answer></answer>", 18),
        ("<think>a</think><think>b</think><answer>18</answer>", 18),
        ("cut off thoughts</think><answer>18</answer>", 18),
        ("<answer>17</answer><answer>dunno</answer>", None),
        ("<think><answer>18</answer>", None),
        ("<think><answer>18</answer></think>", None),
        ("<think>a</think><answer>18", None),
        ("<think>a</think>18", None),
        ("</answer>18<answer>", None),
    ],
)
def test_the_answer_tag_is_the_last_complete_block_after_the_thinking(text, value):
    assert extract_answer(text, "answer_tag") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is #### 18", 18),
        ("#### 18 eggs", 18),
        ("#### -1,234", -1234),
        ("#### \u22127", -7),
        ("#### -$5", -5),
        ("#### $-5", -5),
        ("#### 12.50", Fraction(25, 2)),
        ("#### 18\nand 3 more", 18),
        ("#### 18.", 18),
        ("#### 18, as she said", 18),
        ("#### 18 - done", 18),
        ("#### 18 (3 of them red)", 18),
        ("#### $1,800.50", Fraction(3601, 2)),
        ("#### 18 million", 18_000_000),
        ("#### 18 mln dollars", 18_000_000),
        ("#### 18 k", None),
        ("#### 18/2", None),
        ("#### 18 / 2", None),
        ("#### 18e3", None),
        ("#### 18^2", None),
        ("#### 18!", None),
        ("#### 18 squared", None),
        ("#### 1,8", None),
        ("#### 18*2", None),
        (r"#### 18 \cdot 2", None),
        ("#### 20-2", None),
        ("#### 18 or 19", None),
        ("#### 18, 19", None),
        ("#### 17 to 19", None),
        ("#### 1 8", None),
        ("####18", None),
        ("#### eighteen", None),
        ("#### ...", None),
        ("18", None),
    ],
)
def test_gsm8k_strict_reads_the_number_after_the_last_mark(text, value):
    assert extract_answer(text, "gsm8k_strict") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("She has 3 boxes, so $1,250.50 in all.", Fraction(2501, 2)),
        ("It is 5", 5),
        ("It is -5.", -5),
        ("16-4", -4),
        ("He pays 18 in 3 parts", 3),
        ("18 eggs. Then ...", None),
        ("none", None),
    ],
)
def test_gsm8k_flexible_reads_the_last_thing_like_a_number(text, value):
    """`16-4` and `...` are what the published pattern makes of them."""
    assert extract_answer(text, "gsm8k_flexible") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("first 3, then 4, and 5.", 5),
        ("16-4=12", 12),
        ("it is 16-4", 4),
        ("(16)-4", 4),
        ("so -4", -4),
        ("costs -$5", -5),
        ("$1,250.50 a year", Fraction(2501, 2)),
        ("18km", 18),
        ("about 3/4 of it", Fraction(3, 4)),
        (r"that is \frac{3}{4}", Fraction(3, 4)),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        (r"so -3\,\dfrac12", Fraction(-7, 2)),
        ("so 3 1/2 hours.", Fraction(7, 2)),
        ("so 3\u00bd", Fraction(7, 2)),
        ("so -\u00bd", Fraction(-1, 2)),
        ("so 3 1\u20442", Fraction(7, 2)),
        ("$1,000 1/2", Fraction(2001, 2)),
        ("3 1/2 million", 3_500_000),
        (r"2\left(\frac13\right)", Fraction(1, 3)),
        ("3\n1/2", Fraction(1, 2)),
        ("3 1/0", None),
        ("18 by variable x2", 18),
        ("so 18 million people", 18_000_000),
        ("18-million", 18_000_000),
        ("2 dozen eggs", 24),
        ("18 thirds", 6),
        ("18 quarters", 18),
        ("18 kilograms", 18),
        ("18 squared", None),
        ("18 factorial", None),
        ("$18k", None),
        ("答案是18", 18),
        ("<think>17</think> so 18", 18),
        ("<think>17", None),
        ("12/05/2024", None),
        ("1,00", None),
        ("1,2,3", None),
        ("1e5", None),
        ("version v1.5", None),
        ("none", None),
    ],
)
def test_the_last_number_is_a_whole_run_of_digits_or_nothing(text, value):
    assert extract_answer(text, "last_number") == value


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{18}", "18"),
        (r"\boxed{17} no, \boxed {18}", "18"),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"{ \boxed{18} and \boxed{19", "18"),
        (r"} \boxed{18}", "18"),
        (r"\boxed{}", ""),
        (r"\boxed{18", None),
        (r"\boxed 18", None),
        (r"\fbox{18}", None),
    ],
)
def test_the_last_balanced_box_is_found(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\boxed{x = \$1{,}000}", 1000),
        (r"<think>\boxed{17}</think>\boxed{18}", 18),
        (r"<think>\boxed{18}", None),
        (r"\boxed{a} then 18", None),
    ],
)
def test_the_boxed_number_is_read_after_the_thinking(text, value):
    assert extract_answer(text, "boxed") == value


@pytest.mark.parametrize(
    "extraction", ["whole", "answer_tag", "gsm8k_strict", "gsm8k_flexible", "last_number", "boxed"]
)
@pytest.mark.parametrize(
    "piece",
    [
        r"\boxed{",
        "9",
        "1,",
        "<answer>",
        "<answer>(</answer>",
        "</think>",
        "#### ",
        "-",
        " ",
        ".",
        r"\text{",
        r"\frac{1}{",
    ],
)
def test_no_text_makes_extraction_slow(extraction, piece):
    text = piece * (200_000 // len(piece))
    start = time.process_time()
    extract_answer(text, extraction)
    extract_answer(f"<answer>{text}</answer>" + r"\boxed{" + text + "}", extraction)
    assert time.process_time() - start < 2.0


def test_the_number_reward_is_one_or_zero(completion, prompt):
    reward = NumberReward()
    assert [reward(completion(text), prompt("18")) for text in ("18", "$18.00", "17", "")] == [1.0, 1.0, 0.0, 0.0]


def test_a_gold_answer_that_is_no_number_names_its_row(completion, prompt):
    with pytest.raises(UserError, match=r"gold answer 'blue' of row 'sky-7' is not a number"):
        NumberReward()(completion("18"), prompt("blue", id="sky-7"))


@pytest.mark.parametrize(
    ("text", "canonical"), [("0.75", "3/4"), ("6/8", "3/4"), ("\u22125", "-5"), ("$1,000", "1000")]
)
def test_equal_answers_have_one_canonical_text(completion, prompt, text, canonical):
    assert NumberReward().answer(completion(text), prompt()) == canonical


def test_no_answer_is_none(completion, prompt):
    assert NumberReward().answer(completion("dunno"), prompt()) is None
