"""Majority votes count answers as the grader reads them, not as they are spelled."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.evaluation.evaluate import PolicyEvaluator
from flatpeak.rewards.config import MathConfig
from flatpeak.rewards.reward_set import build_reward
from flatpeak.tasks.prompts import PromptConfig
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams

SAID = (
    r"So it is \boxed{\dfrac{1}{2}}.",
    r"First \boxed{3}, no: \boxed{ \frac12 }",
    r"\boxed{3}",
    r"\boxed{5}",
    r"\boxed{3.0}",
    r"\boxed{\tfrac{1}{2}}",
    "I do not know.",
)


class Says:
    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        texts = SAID if group_size > 1 else SAID[-1:]
        said = [Completion(token_ids=(1,), logprobs=(0.0,), finish_reason="stop", text=text) for text in texts]
        return [Group(prompt=prompt, completions=tuple(said)) for prompt in prompts]


def test_spellings_of_one_answer_vote_together() -> None:
    example = Example(id="q", question="?", gold=r"\frac{1}{2}")
    prompt = Prompt(id="q", token_ids=(1,), text="?", example=example)
    reward = build_reward({"correctness": MathConfig()})
    config = EvaluationConfig(samples=7, k=(1, 7))
    result = PolicyEvaluator(
        config=config,
        task="halves",
        prompts=[prompt],
        sampler=Says(),
        reward=reward,
        max_new_tokens=5,
        tokenizer=SimpleNamespace(),  # type: ignore[arg-type]
        prompt=PromptConfig(),
        longest_prompt=100,
    ).evaluate()
    answers = result.rows[0]["samples_answers"]
    assert answers[0] == answers[1] == answers[5]
    assert answers[2] == answers[4] != answers[3]
    assert answers[6] is None
    # Three votes for a half, two for 3, one for 5; who says nothing has none.
    assert result.values["maj@7"] == [1.0]
    assert result.values["pass@1"] == pytest.approx([3 / 7])
    assert result.values["maj@1"] == pytest.approx([3 / 7])
    assert result.values["extraction_failed"] == [1.0]
    assert result.values["sampled/extraction_failed"] == [1 / 7]
