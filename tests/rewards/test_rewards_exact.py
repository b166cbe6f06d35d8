"""The reward `exact`, and rows with several gold answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatpeak.rewards.exact import ExactReward
from flatpeak.rewards.functions import row_columns
from flatpeak.rewards.math_reward import MathReward
from flatpeak.rewards.numeric_answer import NumberReward
from flatpeak.types import Completion, Example, Group, Prompt


def prompt(*golds: str) -> Prompt:
    example = Example(id="x", question="?", gold=golds[0], other_golds=golds[1:])
    return Prompt(id="x", token_ids=(1,), text="?", example=example)


def completion(text: str) -> Completion:
    return Completion(token_ids=(1,), logprobs=(0.0,), finish_reason="stop", text=text)


@pytest.mark.parametrize(
    ("text", "options", "score"),
    [
        ("Paris", {}, 1.0),
        (" Paris\n", {}, 1.0),
        ("<think>Rome?</think>Paris", {}, 1.0),
        ("paris", {}, 0.0),
        ("paris", {"ignore_case": True}, 1.0),
        ("It is Paris", {}, 0.0),
        ("", {}, 0.0),
        ("<answer> Paris </answer>", {"extraction": "answer_tag"}, 1.0),
        ("Paris", {"extraction": "answer_tag"}, 0.0),
        (r"so \boxed{Paris}", {"extraction": "boxed"}, 1.0),
        ("It is in France.\nParis\n\n", {"extraction": "last_line"}, 1.0),
        ("\n", {"extraction": "last_line"}, 0.0),
    ],
)
def test_an_exact_answer_is_the_gold_text_up_to_white_space(text: str, options: dict, score: float) -> None:
    assert ExactReward(**options)(completion(text), prompt("Paris")) == score


@pytest.mark.parametrize("text", ["1,000", "1000", "1000.0", "1000."])
def test_a_gold_number_may_be_spelled_as_in_its_row(text: str) -> None:
    assert ExactReward()(completion(text), prompt("1000")) == 1.0
    assert ExactReward()(completion("1001"), prompt("1000")) == 0.0


def test_a_blank_answer_is_not_right_where_a_row_has_no_gold() -> None:
    assert ExactReward()(completion(" "), prompt("")) == 0.0
    assert ExactReward()(completion("x"), prompt("")) == 0.0


@pytest.mark.parametrize(("text", "score"), [("3", 1.0), ("5", 1.0), ("4", 0.0)])
def test_any_of_several_golds_is_right(text: str, score: float) -> None:
    asked = prompt("3", "5")
    assert ExactReward()(completion(text), asked) == score
    assert NumberReward()(completion(text), asked) == score
    reward = MathReward("any")
    try:
        scores = reward.score([Group(prompt=asked, completions=(completion(rf"\boxed{{{text}}}"), completion("none")))])
    finally:
        reward.close()
    assert scores.scores == [[score, 0.0]]


@pytest.mark.parametrize("golds", [("7", "6/3"), ("6/3", "7")])
def test_an_answer_is_as_worked_out_as_the_gold_that_it_equals(golds: tuple[str, ...]) -> None:
    reward = NumberReward(extraction="boxed", evaluated=True)
    assert reward(completion(r"\boxed{6/3}"), prompt(*golds)) == 1.0
    assert reward(completion(r"\boxed{14/2}"), prompt(*golds)) == 0.0


def test_a_function_gets_all_golds_and_its_rows_own_rationale() -> None:
    asked = prompt("3", "5")
    example = replace(asked.example, columns={"rationale": "because"})
    columns = row_columns(replace(asked, example=example))
    assert (columns["gold"], columns["golds"], columns["rationale"]) == ("3", ["3", "5"], "because")
