from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatpeak.errors import UserError
from flatpeak.rewards.config import ExactConfig, NumberConfig
from flatpeak.rewards.numeric_answer import MAX_CHARACTERS, NumberReward, extract_answer, parse_number
from flatpeak.rewards.numeric_answer import read_number_answer as read_answer
from flatpeak.rewards.reward_set import build_reward
from flatpeak.types import Group
from flatpeak.utils.answers import last_boxed
from support.cpu_time import cpu_time
from support.properties import repeatable
from support.tables import exact, read_tables

TABLES = read_tables(__file__)


@pytest.mark.parametrize(("text", "value"), TABLES["whole_numbers"])
def test_whole_texts_that_are_numbers_are_read_exactly(text, value):
    assert parse_number(text) == exact(value)


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


def test_digit_strings_are_read_up_to_the_cap_and_refused_beyond_it():
    assert parse_number("9" * MAX_CHARACTERS) == 10**MAX_CHARACTERS - 1
    assert parse_number("9" * (MAX_CHARACTERS + 1)) is None


@given(number=st.integers(-(10**15), 10**15), decimals=st.integers(0, 6), data=st.data())
@repeatable
def test_a_number_is_its_exact_value_however_it_is_written(completion, prompt, number, decimals, data):
    value = Fraction(number, 10**decimals)
    text = f"{Decimal(number).scaleb(-decimals):f}"
    sign, digits = ("-", text[1:]) if number < 0 else ("", text)
    grouped = f"{Decimal(digits):,f}"
    written = [text, sign + grouped, text + ("0" if decimals else ".0"), f"{sign}${grouped}", f" {text}%"]
    written += [f"{number}/{10**decimals}", text.replace("-", "\u2212")]
    one, other = data.draw(st.sampled_from(written)), data.draw(st.sampled_from(written))
    assert parse_number(sign + digits) == parse_number(one) == value
    assert parse_number(one) == parse_number(other)
    assert NumberReward().answer(completion(one), prompt()) == str(value)
    assert parse_number(one) != parse_number(f"{number + 1}/{10**decimals}")


@pytest.mark.parametrize(("first", "second"), [("5", "-5"), ("0.333", "1/3"), ("x", "x"), ("18", "18 eggs")])
def test_different_numbers_and_texts_that_are_none_are_not_equal(first, second):
    assert parse_number(first) is None or parse_number(first) != parse_number(second)


@pytest.mark.parametrize(("content", "value"), TABLES["answers"])
def test_answers_may_carry_an_equation_a_unit_a_magnitude_or_latex(content, value):
    assert read_answer(content) == exact(value)


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


@pytest.mark.parametrize(("text", "value"), TABLES["answer_tag"])
def test_the_answer_tag_is_the_last_complete_block_after_the_thinking(text, value):
    assert extract_answer(text, "answer_tag") == exact(value)


@pytest.mark.parametrize(("text", "value"), TABLES["gsm8k_strict"])
def test_gsm8k_strict_reads_the_number_after_the_last_mark(text, value):
    assert extract_answer(text, "gsm8k_strict") == exact(value)


@pytest.mark.parametrize(("text", "value"), TABLES["gsm8k_flexible"])
def test_gsm8k_flexible_reads_the_last_thing_like_a_number(text, value):
    """`16-4` and `...` are what the published pattern makes of them."""
    assert extract_answer(text, "gsm8k_flexible") == exact(value)


@pytest.mark.parametrize(("text", "value"), TABLES["last_number"])
def test_the_last_number_is_a_whole_run_of_digits_or_nothing(text, value):
    assert extract_answer(text, "last_number") == exact(value)


@pytest.mark.parametrize(("text", "content"), TABLES["boxes"])
def test_the_last_balanced_box_is_found(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(("text", "value"), TABLES["boxed"])
def test_the_boxed_number_is_read_after_the_thinking(text, value):
    assert extract_answer(text, "boxed") == exact(value)


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
    with cpu_time() as spent:
        extract_answer(text, extraction)
        extract_answer(f"<answer>{text}</answer>" + r"\boxed{" + text + "}", extraction)
    assert spent.seconds < 2.0


def test_the_number_reward_is_one_or_zero(completion, prompt):
    reward = NumberReward()
    assert [reward(completion(text), prompt("18")) for text in ("18", "$18.00", "17", "")] == [1.0, 1.0, 0.0, 0.0]


def test_a_gold_answer_that_is_no_number_names_its_row(completion, prompt):
    with pytest.raises(UserError, match=r"gold answer 'blue' of row 'sky-7' is not a number"):
        NumberReward()(completion("18"), prompt("blue", id="sky-7"))


def test_rows_without_a_gold_number_are_refused_before_a_run_or_have_no_score_where_the_reward_is_watched(
    completion, prompt
):
    rows = [prompt("18"), prompt("blue", id="sky-7")]
    with pytest.raises(UserError, match=r"gold answer 'blue' of row 'sky-7' is not a number"):
        build_reward({"number": NumberConfig()}).check_rows(rows)
    scored = build_reward({"right": ExactConfig(), "number": NumberConfig(weight=0.0)})
    scored.check_rows(rows)
    groups = [Group(prompt=row, completions=(completion("18"),)) for row in rows]
    assert scored(groups).parts["number"] == [[1.0], [None]]


def test_no_answer_is_none(completion, prompt):
    assert NumberReward().answer(completion("dunno"), prompt()) is None
