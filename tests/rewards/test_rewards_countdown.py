from __future__ import annotations

import warnings

import numpy as np
import pytest

from flatpeak.errors import UserError
from flatpeak.rewards.config import CountdownConfig
from flatpeak.rewards.countdown import MAX_CHARACTERS, CountdownReward, evaluate
from flatpeak.rewards.reward_set import build_reward
from support.cpu_time import cpu_time
from support.tables import exact, read_tables

TABLES = read_tables(__file__)


@pytest.mark.parametrize(("expression", "value", "numbers"), TABLES["values"])
def test_plain_arithmetic_has_an_exact_value(expression, value, numbers):
    assert evaluate(expression) == (exact(value), numbers)


@pytest.mark.parametrize(
    "expression",
    [
        *("", " ", "()", "1 +", "1 2", "(1", "1)", "* 2", "2(3)", "(1)(2)", "007", "1, 2", "1 = 1", "6 = 2 * 3"),
        *("7//2", "2**3", "99**99**99", "9**9**9**9**9", "7 % 2", "1.5 + 2", "1e3", "0x1f", "1 << 99", "~5", "5!"),
        *("1/0", "1/(2-2)", "x", "abs(1)", "__import__('os')", "1 if 1 else 2", "'a'*9", "5 × 2", "５", "1_0"),
    ],
)
def test_everything_else_is_refused_without_a_warning(expression):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate(expression) is None


@pytest.mark.parametrize(
    "expression",
    [
        "9" * 1_000_000,
        "9" * MAX_CHARACTERS + "9",
        "(" * 100_000 + "1" + ")" * 100_000,
        "(" * 127 + "1",
        "-" * 1_000_000 + "1",
        "9*" * 500_000 + "9",
        "9**" * 80 + "9",
        "1" + "/(1" * 60 + ")" * 59,
    ],
)
def test_long_and_deep_input_is_refused_at_once(expression):
    with cpu_time() as spent:
        assert evaluate(expression) is None
    assert spent.seconds < 0.2


@pytest.mark.parametrize(("expression", "value"), [("(" * 127 + "1" + ")" * 127, 1), ("-" * 254 + "1", 1)])
def test_nesting_within_the_cap_is_read(expression, value):
    assert evaluate(expression) == (value, [1])


@pytest.mark.parametrize(("answer", "score"), TABLES["scores"])
def test_each_number_is_used_exactly_once_and_the_target_is_met(completion, prompt, answer, score):
    row = prompt(nums=[3, 3, 4], target=24)
    assert CountdownReward()(completion(f"<think>a</think>\n<answer>{answer}</answer>"), row) == score


def test_the_target_is_met_within_one_hundred_thousandth(completion, prompt):
    answer = completion("<answer>1/3</answer>")
    assert CountdownReward()(answer, prompt(nums=[1, 3], target=0.333333)) == 1.0
    assert CountdownReward()(answer, prompt(nums=[1, 3], target=0.3333)) == 0.0


def test_only_the_answer_block_after_the_thinking_counts(completion, prompt):
    row = prompt(nums=[1, 2], target=3)
    prefilled = prompt(nums=[1, 2], target=3, text="Go. <think>")
    assert CountdownReward()(completion("1 + 2"), row) == 0.0
    assert CountdownReward()(completion("<answer>1 + 2</answer>"), row) == 1.0
    assert CountdownReward()(completion("<answer>1 + 2</answer>"), prefilled) == 0.0
    assert CountdownReward()(completion("so</think><answer>1 + 2</answer>"), prefilled) == 1.0


def test_numpy_columns_and_a_target_from_the_gold_answer_work(completion, prompt):
    answer = completion("<answer>1 + 2</answer>")
    assert CountdownReward()(answer, prompt("3", nums=np.array([2, 1]))) == 1.0
    assert CountdownReward()(answer, prompt("9", nums=[2, 1], target=np.int64(3))) == 1.0


@pytest.mark.parametrize("nums", [None, "[1, 2]", [1.5, 2], ["1", "2"], 12])
def test_a_row_without_a_list_of_integers_is_named(completion, prompt, nums):
    with pytest.raises(UserError, match=r"row 'cd-3': the countdown reward needs a list of integers as column `nums`"):
        CountdownReward()(completion("1"), prompt(id="cd-3", nums=nums, target=3))


def test_a_row_without_a_target_is_named(completion, prompt):
    with pytest.raises(UserError, match=r"row 'cd-3': .* column `target`, got 'many'"):
        CountdownReward()(completion("1"), prompt("many", id="cd-3", nums=[1]))


def test_the_answer_is_the_expression_without_whitespace(completion, prompt):
    assert CountdownReward().answer(completion("<answer> 1 +\n2 </answer>"), prompt()) == "1+2"
    assert CountdownReward().answer(completion("<answer>2**3</answer>"), prompt()) is None
    assert CountdownReward().answer(completion("1 + 2"), prompt()) is None


@pytest.mark.parametrize(("text", "score"), TABLES["format_scores"])
def test_an_answer_block_that_is_wrong_has_the_format_score(completion, prompt, text, score):
    row = prompt(nums=[1, 2], target=3)
    assert CountdownReward(format_score=0.1)(completion(text), row) == score
    assert CountdownReward()(completion(text), row) == (score if score == 1.0 else 0.0)


def test_a_tower_of_powers_in_the_answer_costs_nothing(completion, prompt):
    with cpu_time() as spent:
        assert CountdownReward()(completion("<answer>99**99**99</answer>"), prompt(nums=[99, 99, 99], target=1)) == 0.0
    assert spent.seconds < 0.2


def test_floor_division_that_would_meet_the_target_is_refused(completion, prompt):
    assert CountdownReward()(completion("<answer>7//2</answer>"), prompt(nums=[2, 7], target=3)) == 0.0


def test_the_format_score_of_a_recipe_reaches_the_reward(group):
    rewards = build_reward({"answer": CountdownConfig(format_score=0.1)})
    row = group("<answer>2 + 1</answer>", "<answer>0</answer>", "3", nums=[1, 2], target=3)
    assert rewards([row]).total == [[1.0, 0.1, 0.0]]
