"""A sampler of the caller's is checked, and its tokens are decoded where it brings no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flatpeak.config import RunConfig
from flatpeak.errors import UserError
from flatpeak.samplers import CheckedSampler, PlainSampler, build_sampler
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams


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


def test_an_architecture_that_is_not_served_falls_back_or_is_refused_by_request(make_tiny_model: Any) -> None:
    from flatpeak.policy.policy import Policy

    policy = Policy(*make_tiny_model())
    policy.native, policy.notice = False, "it is not proven"
    assert isinstance(build_sampler(policy, RunConfig()), PlainSampler)
    with pytest.raises(UserError, match="it is not proven; use"):
        build_sampler(policy, RunConfig.model_validate({"rollout": {"engine": "native"}}))
