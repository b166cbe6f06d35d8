from __future__ import annotations

import pytest

from flatpeak.rewards.format import FormatReward, LengthReward, format_checks
from support.tables import read_tables

TABLES = read_tables(__file__)


@pytest.mark.parametrize(("text", "held"), TABLES["layout"])
def test_each_part_of_the_layout_is_judged_on_its_own(text, held):
    assert [name for name, holds in format_checks(text).items() if holds] == held.split()


def test_the_format_reward_is_the_mean_of_the_parts(completion, prompt):
    texts = ["<think>a</think> <answer>5</answer>", "<think>a</think> so <answer>5</answer>", "<think>a</think>", "5"]
    assert [FormatReward()(completion(text), prompt()) for text in texts] == [1.0, 2 / 3, 1 / 3, 0.0]


def test_tags_with_nothing_in_between_earn_less_than_any_part_that_says_something(completion, prompt):
    empty, started = "<think></think><answer></answer>", "<think>a</think> it is 5"
    assert [FormatReward()(completion(text), prompt()) for text in (empty, started)] == [0.0, 1 / 3]


def test_an_empty_thought_closed_in_the_prompt_is_not_prefilled(completion, prompt):
    closed = prompt(text="How many?\n<think>\n\n</think>\n\n")
    assert FormatReward()(completion("<answer>5</answer>"), closed) == 1 / 3


@pytest.mark.parametrize(("tokens", "score"), [(0, 1.0), (10, 1.0), (11, 0.9), (15, 0.5), (20, 0.0), (99, 0.0)])
def test_length_is_rewarded_up_to_the_target_and_falls_to_the_limit(completion, prompt, tokens, score):
    reward = LengthReward(target=10, limit=20)
    assert reward(completion(tokens=tokens), prompt()) == pytest.approx(score, abs=1e-12)
