"""The rewards math, r1_zero and question_only, as recipes and as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter

from flatpeak.rewards.config import RewardConfig
from flatpeak.rewards.math import grader as math_grader
from flatpeak.rewards.math.grader import MathGrader, Symbolic
from flatpeak.rewards.math_reward import MathReward, question_only_reward, r1_zero_reward
from flatpeak.rewards.reward_set import build_reward
from flatpeak.types import Completion, Group, Prompt
from support import worker_functions
from support.tables import read_tables

TABLES = read_tables(__file__)

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


def test_an_answer_that_runs_out_of_time_is_wrong_and_counted_even_if_all_do(group: Callable[..., Group]) -> None:
    notices: list[str] = []
    reward = build_reward({"math": config(type="math", timeout=0.3, workers=1)}, notice=notices.append)
    only = group(rf"\boxed{{{SLOW}}}", gold="2")
    for groups, total, late in (
        ([only], [[0.0]], [[True]]),
        ([only, group(r"\boxed{18}")], [[0.0], [1.0]], [[True], [False]]),
        ([group(r"\boxed{18}")], [[1.0]], None),
    ):
        scores = reward(groups)
        assert scores.total == total
        assert scores.timed_out == ({} if late is None else {"math": late})
    assert reward.failures == {}
    assert notices == ["reward 'math': 1 answer so far ran out of time or memory; the score stands for wrong"]
    reward.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "gold", "blamed"),
    [
        (SLOW, "2", True),
        (SLOW, r"\max(3, 5)", True),  # only math-verify can read it, and it does
        ("2", SLOW, False),
        (SLOW, r"\prod_{k=1}^{100000}(1+\frac{2}{k})", False),
    ],
)
def test_an_answer_is_to_blame_where_another_one_has_a_verdict(
    group: Callable[..., Group], answer: str, gold: str, blamed: bool
) -> None:
    reward = build_reward({"math": config(type="math", timeout=1.0, workers=1)})
    scores = reward([group(rf"\boxed{{{answer}}}", gold=gold)])
    assert scores.total == [[0.0 if blamed else None]]
    assert scores.timed_out == ({"math": [[True]]} if blamed else {})
    assert ("math" in reward.failures) != blamed
    reward.close()


def test_a_worker_that_dies_of_itself_leaves_a_missing_score(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_grader, "Symbolic", worker_functions.Dying)
    reward = build_reward({"math": config(type="math", timeout=20.0, workers=1)})
    sums = group(r"\boxed{\sum_{k=1}^{5} k}", r"\boxed{14}", gold="15")
    scores = reward([sums])
    assert (scores.total, scores.timed_out) == ([[None, 0.0]], {})
    assert reward.failures["math"].first_error == "a worker process died: killed by SIGKILL"
    reward.close()


def test_an_answer_that_wants_too_much_memory_is_wrong(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_grader, "Symbolic", worker_functions.Greedy)
    reward = build_reward({"math": config(type="math", timeout=20.0, workers=1)})
    scores = reward([group(r"\boxed{\sum_{k=1}^{5} k}", gold="15")])
    assert (scores.total, scores.timed_out) == ([[0.0]], {"math": [[True]]})
    reward.close()


def test_an_answer_that_wants_too_much_of_the_stack_wants_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(answer: str, gold: str) -> bool:
        return deep(answer, gold)

    monkeypatch.setattr(math_grader, "verify", deep)
    with pytest.raises(MemoryError):
        Symbolic()(r"\sum_{k=1}^{5} k", "15")


def test_an_answer_is_one_spelling_of_what_was_extracted(
    completion: Callable[..., Completion], prompt: Callable[..., Prompt]
) -> None:
    reward = config(type="math").build("correctness")
    assert reward.answer(completion(r"\boxed{0.50}"), prompt()) == "1/2"
    assert reward.answer(completion(r"<answer>\dfrac{1}{2}</answer>"), prompt()) == "1/2"
    assert reward.answer(completion(r"\boxed{ \sqrt {2} }"), prompt()) == r"\sqrt{2}"
    assert reward.answer(completion("0.5"), prompt()) is None
    assert reward.answer(completion(r"\boxed{}"), prompt()) is None


def test_closing_ends_the_workers_and_a_later_call_starts_them_again(group: Callable[..., Group]) -> None:
    reward = MathReward("any", timeout=30.0, workers=1)
    for limit in (3, 4):
        sums = group(rf"\sum_{{k=1}}^{{{limit}}} k", gold=str(limit * (limit + 1) // 2))
        assert reward.score([sums]).scores == [[1.0]]
        assert reward._grader._pool is not None
        reward.close()
        assert reward._grader._pool is None


@pytest.mark.parametrize(("response", "form", "right"), TABLES["r1_zero"])
def test_r1_zero_pays_for_a_right_answer_in_the_form(response: str, form: float, right: float) -> None:
    assert r1_zero_reward(response, "18") == {"format_reward": form, "answer_reward": right, "reward": right}


@pytest.mark.parametrize(("response", "form", "right"), [*TABLES["question_only"], (r"\boxed{18}" * 100, 0.0, 0.0)])
def test_question_only_pays_for_a_right_answer_in_a_box(response: str, form: float, right: float) -> None:
    assert question_only_reward(response, "18") == {"format_reward": form, "answer_reward": right, "reward": right}


def test_without_a_verdict_the_form_is_left_and_the_answer_wrong_unless_the_gold_is_to_blame() -> None:
    with MathGrader(timeout=0.3, workers=1) as grader:
        rewards = question_only_reward(rf"\boxed{{{SLOW}}}", "2", grader=grader)
        assert rewards == {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}
        rewards = question_only_reward(r"\boxed{2}", SLOW, grader=grader)
        assert rewards == {"format_reward": 1.0, "answer_reward": None, "reward": None}


@pytest.mark.parametrize(
    ("extraction", "right", "wrong"),
    [
        ("r1_zero", "a</think> <answer>18</answer>", r"a</think> \boxed{18}"),
        ("boxed", r"a</think> \boxed{18}", "a</think> <answer>18</answer>"),
    ],
)
def test_both_are_rewards_of_a_recipe(group: Callable[..., Group], extraction: str, right: str, wrong: str) -> None:
    reward = build_reward({"right": config(type="math", extraction=extraction, weight=2.0)})
    assert reward([group(right, wrong, text="How many? <think>")]).total == [[2.0, 0.0]]
