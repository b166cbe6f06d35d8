"""The rewards math, r1_zero and question_only, as recipes and as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter

from flatpeak.rewards.build import build_reward
from flatpeak.rewards.config import RewardConfig
from flatpeak.rewards.math.grader import MathGrader
from flatpeak.rewards.math.r1_zero import question_only_reward, r1_zero_reward
from flatpeak.rewards.math.scorer import MathReward, build_math_reward
from flatpeak.types import Completion, Group, Prompt

SLOW = r"\sum_{n=1}^{10^9} \frac{1}{n^2}"


def config(**fields: Any) -> Any:
    return TypeAdapter(RewardConfig).validate_python(fields)


def test_the_math_reward_scores_the_last_box_or_block(group: Callable[..., Group]) -> None:
    reward = build_reward({"math": config(type="math")})
    texts = (r"\boxed{\frac12}", "<answer>0.5</answer>", "0.5", r"\boxed{2}", r"<think>\boxed{0.5}")
    scores = reward([group(*texts, gold="1/2"), group(r"\boxed{x=5}", gold=r"\boxed{5}")])
    assert scores.total == [[1.0, 1.0, 0.0, 0.0, 0.0], [1.0]]
    assert reward.failures == {}
    reward.close()


def test_a_think_tag_that_the_prompt_ends_with_belongs_to_the_text(group: Callable[..., Group]) -> None:
    reward = build_reward({"math": config(type="math")})
    texts = (r"a</think> \boxed{18}", r"it is \boxed{18}")
    assert reward([group(*texts, text="How many?\n<think>")]).total == [[1.0, 0.0]]


def test_extraction_any_takes_bare_answers(group: Callable[..., Group]) -> None:
    reward = build_reward({"math": config(type="math", extraction="any")})
    assert reward([group("18", "#### 18", "It is 18.")]).total == [[1.0, 1.0, 0.0]]


def test_a_failed_verdict_is_missing_and_counted_even_if_all_fail(group: Callable[..., Group]) -> None:
    reward = build_reward({"math": config(type="math", timeout=0.3, workers=1)})
    only = group(rf"\boxed{{{SLOW}}}", gold="2")
    assert reward([only]).total == [[None]]
    assert reward([only, group(r"\boxed{18}")]).total == [[None], [1.0]]
    failures = reward.failures["math"]
    assert failures.count == 2
    assert "no answer from a worker process within 0.3 s" in failures.first_error
    reward.close()


def test_an_answer_is_one_spelling_of_what_was_extracted(
    completion: Callable[..., Completion], prompt: Callable[..., Prompt]
) -> None:
    reward = build_math_reward(config(type="math"))
    assert reward.answer(completion(r"\boxed{0.50}"), prompt()) == "1/2"
    assert reward.answer(completion(r"<answer>\dfrac{1}{2}</answer>"), prompt()) == "1/2"
    assert reward.answer(completion(r"\boxed{ \sqrt {2} }"), prompt()) == r"\sqrt{2}"
    assert reward.answer(completion("0.5"), prompt()) is None
    assert reward.answer(completion(r"\boxed{}"), prompt()) is None


def test_a_time_limit_has_to_be_one() -> None:
    for timeout in (float("inf"), float("nan"), 0.0):
        with pytest.raises(ValueError, match="timeout"):
            config(type="math", timeout=timeout)


def test_closing_ends_the_workers_and_a_later_call_starts_them_again(group: Callable[..., Group]) -> None:
    reward = MathReward(lambda text: text, timeout=30.0, workers=1)
    for limit in (3, 4):
        sums = group(rf"\sum_{{k=1}}^{{{limit}}} k", gold=str(limit * (limit + 1) // 2))
        assert reward.score([sums]).scores == [[1.0]]
        assert reward._grader._pool is not None
        reward.close()
        assert reward._grader._pool is None


@pytest.mark.parametrize(
    ("response", "form", "right"),
    [
        ("so it is</think> <answer>18</answer>", 1.0, 1.0),
        (r"so it is</think> <answer>\boxed{18}</answer>", 1.0, 1.0),
        ("so it is</think> <answer>19</answer>", 1.0, 0.0),
        ("so it is</think> <answer>17</answer> <answer>18</answer>", 1.0, 1.0),
        ("so it is</think>\n<answer>18</answer>", 0.0, 0.0),
        ("so it is</think> <answer>18", 0.0, 0.0),
        ("<answer>18</answer>", 0.0, 0.0),
        ("so it is</think> <answer></answer>", 0.0, 0.0),
        ("so it is</think> <answer> \n</answer>", 0.0, 0.0),
        (r"so it is</think> <answer>\boxed{}</answer>", 0.0, 0.0),
        (r"so it is</think> \boxed{18}", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_r1_zero_pays_for_a_right_answer_in_the_form(response: str, form: float, right: float) -> None:
    assert r1_zero_reward(response, "18") == {"format_reward": form, "answer_reward": right, "reward": right}


@pytest.mark.parametrize(
    ("response", "form", "right"),
    [
        (r"so it is \boxed{18}", 1.0, 1.0),
        (r"so it is \boxed{18.0}.", 1.0, 1.0),
        (r"so it is \boxed{19}", 1.0, 0.0),
        (r"so it is \boxed{18", 0.0, 0.0),
        (r"so it is \boxed{ }", 0.0, 0.0),
        ("so it is 18", 0.0, 0.0),
        ("<answer>18</answer>", 0.0, 0.0),
        (r"\boxed{18}" * 100, 0.0, 0.0),
    ],
)
def test_question_only_pays_for_a_right_answer_in_a_box(response: str, form: float, right: float) -> None:
    assert question_only_reward(response, "18") == {"format_reward": form, "answer_reward": right, "reward": right}


def test_a_failed_verdict_leaves_the_form_and_no_reward() -> None:
    with MathGrader(timeout=0.3, workers=1) as grader:
        rewards = question_only_reward(rf"\boxed{{{SLOW}}}", "2", grader=grader)
    assert rewards == {"format_reward": 1.0, "answer_reward": None, "reward": None}


@pytest.mark.parametrize(
    ("type", "right", "wrong"),
    [
        ("r1_zero", "a</think> <answer>18</answer>", r"a</think> \boxed{18}"),
        ("question_only", r"a</think> \boxed{18}", "a</think> <answer>18</answer>"),
    ],
)
def test_both_are_rewards_of_a_recipe(group: Callable[..., Group], type: str, right: str, wrong: str) -> None:
    reward = build_reward({"right": config(type=type, weight=2.0)})
    assert reward([group(right, wrong, text="How many? <think>")]).total == [[2.0, 0.0]]
