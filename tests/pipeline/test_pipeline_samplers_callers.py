"""A sampler of the caller's is checked, and its tokens are decoded where it brings no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.pipeline.rollout_engines import PlainSampler, build_sampler
from flatpeak.pipeline.samplers import CheckedSampler
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams
from support.runs import Recipe, Train, Watch


class Letters:
    """Token 0 is a, 1 is b, ..."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


class Scripted:
    """Returns what a function of the request says."""

    def __init__(self, answer: Callable[[Sequence[Prompt], int], list[Group]]) -> None:
        self.answer = answer

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Any, seed: int) -> list[Group]:
        return self.answer(prompts, group_size)


def prompt(name: str) -> Prompt:
    return Prompt(id=name, token_ids=(1,), text=name, example=Example(id=name, question=name, gold=""))


def completion(*token_ids: int, logprobs: tuple[float, ...] | None = None, text: str = "") -> Completion:
    given = (-1.0,) * len(token_ids) if logprobs is None else logprobs
    return Completion(token_ids=token_ids, logprobs=given, finish_reason="stop", text=text)


def run(answer: Callable[[Sequence[Prompt], int], list[Group]]) -> list[Group]:
    sampler = CheckedSampler(Scripted(answer), Letters())  # type: ignore[arg-type]
    return sampler.generate([prompt("x"), prompt("y")], group_size=2, sampling=SamplingParams(), seed=0)


def test_missing_text_is_decoded_and_given_text_is_kept() -> None:
    groups = run(
        lambda prompts, size: [
            Group(prompt=p, completions=(completion(2, 0, 1), completion(1, text="mine"))) for p in prompts
        ]
    )
    assert [[c.text for c in group.completions] for group in groups] == [["cab", "mine"]] * 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda prompts, size: [], "one group per prompt"),
        (
            lambda prompts, size: [Group(prompt=p, completions=(completion(1),) * size) for p in reversed(prompts)],
            "in the order of the prompts",
        ),
        (lambda prompts, size: [Group(prompt=p, completions=(completion(1),)) for p in prompts], "1 completions for"),
        (
            lambda prompts, size: [
                Group(prompt=p, completions=(completion(1, 2, logprobs=(-1.0,)),) * size) for p in prompts
            ],
            "1 log-probs for 2 tokens",
        ),
    ],
)
def test_groups_that_do_not_fit_the_request_are_one_clear_error(answer: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        run(answer)


def with_logprobs(*logprobs: float, **others: Any) -> Callable[[Sequence[Prompt], int], list[Group]]:
    def answer(prompts: Sequence[Prompt], size: int) -> list[Group]:
        one = replace(completion(*range(len(logprobs)), logprobs=logprobs), **others)
        return [Group(prompt=p, completions=(completion(1),) * (size - 1) + (one,)) for p in prompts]

    return answer


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), float("inf"), 0.69, 1e-3])
def test_log_probabilities_that_none_can_have_are_refused(logprob: float) -> None:
    with pytest.raises(UserError, match=rf"log-prob {logprob} for a token of prompt x: give the natural logarithm"):
        run(with_logprobs(-1.0, logprob))


def test_a_certain_token_may_round_above_zero() -> None:
    groups = run(with_logprobs(1e-6, -0.0, -80.0))
    assert groups[1].completions[1].logprobs == (1e-6, 0.0, -80.0)


def test_one_filtered_log_probability_is_wanted_per_token_too() -> None:
    with pytest.raises(UserError, match=r"2 log-probs for 1 tokens of prompt x \(filtered_logprobs\)"):
        run(with_logprobs(-1.0, filtered_logprobs=(-1.0, -1.0)))


def test_what_greedy_decoding_says_of_its_tokens_is_not_looked_at() -> None:
    sampler = CheckedSampler(Scripted(with_logprobs(float("nan"))), Letters())  # type: ignore[arg-type]
    (group,) = sampler.generate([prompt("x")], group_size=1, sampling=SamplingParams(temperature=0.0), seed=0)
    assert group.completions[0].token_ids == (0,)


def test_a_run_tells_of_a_sampler_whose_log_probabilities_are_not_the_policys(
    recipe: Recipe, train: Train, watch: Watch
) -> None:
    def answer(prompts: Sequence[Prompt], size: int) -> list[Group]:
        tokens = [completion(3 + index, 5, logprobs=(0.0, 0.0), text="1") for index in range(size)]
        return [Group(prompt=p, completions=tuple(tokens)) for p in prompts]

    seen = watch()
    config = recipe(training={"steps": 2}, evaluation={"every": 0})
    reward = lambda completion_ids: [float(tokens[0] % 2) for tokens in completion_ids]  # noqa: E731
    train(config, sampler=Scripted(answer), reward=reward, progress=seen)
    gap = seen.values("rollout/logprob_gap_mean")[0]
    assert 2.0 < gap < 4.0  # a new model's tokens have about the same probability, one of 18
    messages = [notice for notice in seen.notices if "nats per token from the trainer's" in notice]
    assert len(messages) == 1
    assert f"now {gap:.3g} on average" in messages[0]


def test_an_architecture_that_is_not_served_falls_back_or_is_refused_by_request(make_tiny_model: Any) -> None:
    from flatpeak.policy.model import Policy

    policy = Policy(*make_tiny_model())
    policy.native, policy.notice = False, "it is not proven"
    assert isinstance(build_sampler(policy, RunConfig()), PlainSampler)
    with pytest.raises(UserError, match="it is not proven; use"):
        build_sampler(policy, RunConfig.model_validate({"rollout": {"engine": "native"}}))
    refusal = "^rollout.kernels=native: it is not proven; set rollout.kernels=auto or torch$"
    with pytest.raises(UserError, match=refusal):
        build_sampler(policy, RunConfig.model_validate({"rollout": {"kernels": "native"}}))


class Counting(Scripted):
    """Counts its requests, and goes on counting after a resume."""

    requests = 0

    def state(self) -> dict[str, Any]:
        return {"requests": self.requests}

    def load(self, state: Mapping[str, Any]) -> None:
        self.requests = state["requests"]


def test_checkpoints_keep_the_state_of_a_sampler_that_has_one() -> None:
    counting = Counting(lambda prompts, size: [])
    sampler = CheckedSampler(counting, Letters())  # type: ignore[arg-type]
    sampler.load({"requests": 3})
    assert counting.requests == 3
    assert sampler.state() == {"requests": 3}
    stateless = CheckedSampler(Scripted(lambda prompts, size: []), Letters())  # type: ignore[arg-type]
    stateless.load({})
    assert stateless.state() == {}
