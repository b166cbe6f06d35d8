"""Answers that other graders are known to have judged wrongly, one test each."""

from __future__ import annotations

import pytest

from flatpeak.rewards.countdown import CountdownReward, evaluate
from flatpeak.rewards.format import FormatReward
from flatpeak.rewards.numeric_answer import NumberReward, extract_answer
from flatpeak.rewards.reward_set import as_reward
from support.cpu_time import cpu_time

P = "<think>x</think>\n<answer>"
TAG = NumberReward(extraction="answer_tag")


def test_a_negative_answer_is_not_its_absolute_value(completion, prompt):
    assert TAG(completion(P + "-42</answer>"), prompt("42")) == 0.0
    assert TAG(completion(P + "-42</answer>"), prompt("-42")) == 1.0


@pytest.mark.parametrize(("answer", "gold"), [("12.5", "12.5"), ("1,000", "1000"), ("0.5", "0.5")])
def test_decimals_and_grouped_thousands_are_parsed(completion, prompt, answer, gold):
    assert TAG(completion(f"{P}{answer}</answer>"), prompt(gold)) == 1.0


def test_an_answer_block_ends_at_its_first_closing_tag(completion, prompt):
    assert TAG(completion(P + "no</answer> 5 </answer>"), prompt("5")) == 0.0


def test_a_leading_newline_changes_nothing(completion, prompt):
    text = completion("\n" + P + "18</answer>")
    assert TAG(text, prompt("18")) == 1.0
    assert FormatReward()(text, prompt("18")) == 1.0


def test_a_think_tag_in_the_prompt_belongs_to_what_is_judged(completion, prompt):
    prefilled = prompt("18", text="Use <think> and <answer>. How many?\nAssistant: <think>\n")
    text = completion("x</think>\n<answer>18</answer>")
    assert TAG(text, prefilled) == 1.0
    assert FormatReward()(text, prefilled) == 1.0
    assert FormatReward()(text, prompt("18", text="How many?")) < 1.0


def test_of_two_answer_blocks_the_last_counts_and_the_format_fails(completion, prompt):
    text = completion(P + "41</answer> <answer>42</answer>")
    assert TAG(text, prompt("42")) == 1.0
    assert TAG(text, prompt("41")) == 0.0
    assert FormatReward()(text, prompt("42")) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("content", "gold"), [("20 - 2 = 18", "18"), ("3/4", "0.75"), (".5", "0.5"), ("\u22125", "-5"), ("\u22125", "−5")]
)
def test_equations_fractions_bare_points_and_the_minus_sign_are_read(completion, prompt, content, gold):
    assert TAG(completion(f"{P}{content}</answer>"), prompt(gold)) == 1.0


@pytest.mark.parametrize("wrong", ["20", "2"])
def test_an_equation_is_not_read_from_its_left_side(completion, prompt, wrong):
    assert TAG(completion(P + "20 - 2 = 18</answer>"), prompt(wrong)) == 0.0


@pytest.mark.parametrize("extraction", ["gsm8k_strict", "whole"])
def test_prose_after_the_number_is_no_strict_answer(extraction):
    assert extract_answer("18. That took 3 steps", extraction) is None


@pytest.mark.parametrize("text", ["#### 7\n#### 18", "#### $18", "#### 18."])
def test_the_last_marked_answer_counts_with_dollar_sign_or_full_stop(text):
    assert extract_answer(text, "gsm8k_strict") == 18


def test_a_gold_text_with_headings_yields_only_its_marked_answer():
    assert extract_answer("### Step 1: count the 3 boxes\n#### 18", "gsm8k_strict") == 18


@pytest.mark.parametrize("extraction", ["whole", "last_number", "gsm8k_flexible"])
def test_a_number_that_contains_the_gold_digits_is_wrong(completion, prompt, extraction):
    assert NumberReward(extraction=extraction)(completion("12345"), prompt("1")) == 0.0


@pytest.mark.parametrize("extraction", ["whole", "last_number", "gsm8k_flexible"])
@pytest.mark.parametrize(("text", "right", "wrong"), [("1,000", "1000", "0"), ("\u22127", "-7", "7")])
def test_grouped_and_negative_numbers_are_not_cut(completion, prompt, extraction, text, right, wrong):
    reward = NumberReward(extraction=extraction)
    assert reward(completion(text), prompt(right)) == 1.0
    assert reward(completion(text), prompt(wrong)) == 0.0


def test_countdown_rejects_a_tower_of_powers_at_once():
    with cpu_time() as spent:
        assert evaluate("99**99**99") is None
    assert spent.seconds < 0.1


def test_countdown_rejects_floor_division(completion, prompt):
    row = prompt(nums=[7, 2], target=3)
    assert CountdownReward()(completion("<answer>7//2</answer>"), row) == 0.0


def test_countdown_accepts_line_breaks_in_the_answer(completion, prompt):
    row = prompt(nums=[7, 2, 3], target=27)
    assert CountdownReward()(completion("<answer>\n(7 + 2)\n* 3\n</answer>"), row) == 1.0


def test_a_wrong_answer_earns_nothing_for_its_box(completion, prompt):
    assert NumberReward(extraction="boxed")(completion(r"So \boxed{17}."), prompt("18")) == 0.0


def test_a_judge_that_raises_gives_missing_and_never_zero(group):
    def judge(completion: str) -> float:
        if completion == "b":
            raise ConnectionError("no answer")
        return 1.0

    scores = as_reward(judge)([group("a", "b", "c")])
    assert scores.total == [[1.0, None, 1.0]]
    assert scores.parts == {"judge": [[1.0, None, 1.0]]}
