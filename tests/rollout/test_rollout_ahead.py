"""Rollouts ahead: drawn by the weights of then, used for the request they were drawn for, and no later than allowed."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flatpeak.errors import RunError
from flatpeak.rollout.ahead import Background, RolloutsAhead, answer_request
from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import Completion, Prompt, SamplingParams
from support.training import prompt, tiny_policy

PROMPTS = [prompt("a", (3, 7, 12)), prompt("b", (20, 5)), prompt("c@1", (8,))]
OTHERS = [prompt("a", (3, 7, 13)), *PROMPTS[1:]]
SAMPLING = SamplingParams(temperature=0.8, max_new_tokens=6, top_k=12, stop=("qq",))
Drawn = list[tuple[Completion, ...]]


class Inline(Background):
    """A background that draws when it is asked to, by the weights of then."""

    def __init__(self, policy: Any) -> None:
        self.engine = NativeEngine(policy)
        self.closed = 0
        self.answer: Any = None

    def begin(self, request: dict[str, Any]) -> None:
        self.answer = json.dumps(answer_request(self.engine, json.loads(json.dumps(request))))

    def result(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return json.loads(self.answer)

    def close(self) -> None:
        self.closed += 1


def sampler(policy: Any, *, staleness: int = 1) -> RolloutsAhead:
    return RolloutsAhead(NativeEngine(policy), Inline(policy), staleness=staleness)


@torch.no_grad()
def move(policy: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)


def draw(source: Any, prompts: Sequence[Prompt] = PROMPTS, *, seed: int = 5) -> Drawn:
    groups = source.generate(prompts, group_size=3, sampling=SAMPLING, seed=seed)
    assert [group.prompt for group in groups] == list(prompts)
    return [group.completions for group in groups]


def versions(source: Any, *, seed: int = 5) -> set[int | None]:
    return {group.version for group in source.generate(PROMPTS, group_size=3, sampling=SAMPLING, seed=seed)}


def ahead(source: RolloutsAhead, *, seed: int = 5) -> Any:
    return source.ahead(PROMPTS, group_size=3, sampling=SAMPLING, seed=seed)


def test_what_is_drawn_ahead_is_what_the_weights_of_then_draw() -> None:
    policy = tiny_policy()
    source, before = sampler(policy), draw(NativeEngine(policy))
    with ahead(source):
        move(policy)
    after = draw(NativeEngine(policy))
    source.use_version(1)
    assert draw(source) == before != after
    assert draw(source) == after  # it is handed out once


def test_every_group_has_the_version_that_drew_it() -> None:
    source = sampler(tiny_policy())
    source.use_version(4)
    assert versions(source) == {4}
    with ahead(source):
        pass
    source.use_version(5)
    assert versions(source) == {4}
    assert versions(source) == {5}


@pytest.mark.parametrize("change", ["seed", "prompt"])
def test_another_request_is_drawn_by_the_policy_of_now(change: str) -> None:
    policy = tiny_policy()
    source = sampler(policy)
    with ahead(source):
        move(policy)
    other: dict[str, Any] = {"seed": 6} if change == "seed" else {"prompts": OTHERS}
    assert draw(source, **other) == draw(NativeEngine(policy), **other)


@pytest.mark.parametrize(("staleness", "age", "used"), [(1, 1, True), (1, 2, False), (0, 0, True), (0, 1, False)])
def test_groups_older_than_the_bound_are_not_used(staleness: int, age: int, used: bool) -> None:
    policy = tiny_policy()
    source, before = sampler(policy, staleness=staleness), draw(NativeEngine(policy))
    with ahead(source):
        move(policy)
    source.use_version(age)
    assert draw(source) == (before if used else draw(NativeEngine(policy)))


def test_what_is_drawn_survives_a_checkpoint() -> None:
    policy = tiny_policy()
    source, before = sampler(policy), draw(NativeEngine(policy))
    with ahead(source):
        move(policy)
    saved = json.loads(json.dumps(source.state()))
    resumed = sampler(policy)
    resumed.load(saved)
    resumed.use_version(1)
    assert draw(resumed) == before
    assert resumed.state()["drawn"] is None


def test_a_state_without_rollouts_ahead_is_loaded_with_them_and_the_other_way_round() -> None:
    policy = tiny_policy()
    source, engine = sampler(policy), NativeEngine(policy)
    draw(engine)
    source.load(engine.state())
    assert source.state() == {**engine.state(), "drawn": None}
    with ahead(source):
        pass
    engine.load(source.state())
    assert engine.state() == source.sampler.state()


def test_the_wrapped_samplers_state_goes_to_the_background_and_comes_back() -> None:
    policy = tiny_policy()
    source, inline = sampler(policy), NativeEngine(policy)
    source.load({"expected_lengths": {"a": 9.0}})
    inline.load({"expected_lengths": {"a": 9.0}})
    with ahead(source):
        pass
    draw(inline)
    assert source.sampler.state() == inline.state()
    assert set(source.state()["expected_lengths"]) == {"a", "b", "c@1"}


def test_an_error_in_the_update_ends_the_background() -> None:
    source = sampler(tiny_policy())
    with pytest.raises(KeyboardInterrupt), ahead(source):
        raise KeyboardInterrupt
    assert source.background.closed == 1  # type: ignore[attr-defined]
    assert source.state()["drawn"] is None


def test_an_error_while_drawing_lets_the_update_end_and_is_raised_by_the_next_request_alone() -> None:
    policy = tiny_policy()
    source, before = sampler(policy), draw(NativeEngine(policy))
    with ahead(source):
        source.background.answer = RunError("the server is gone")  # type: ignore[attr-defined]
        move(policy)
    assert source.background.closed == 1  # type: ignore[attr-defined]
    assert source.state()["drawn"] is None
    with pytest.raises(RunError, match="the server is gone"):
        draw(source)
    assert draw(source) == draw(NativeEngine(policy)) != before


def test_an_interrupt_while_the_answer_is_awaited_ends_the_background() -> None:
    source = sampler(tiny_policy())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    source.background.result = lambda: signal.raise_signal(signal.SIGINT)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), ahead(source):
        pass
    signal.signal(signal.SIGINT, before)
    assert source.background.closed == 1  # type: ignore[attr-defined]


def test_it_has_the_metrics_of_the_sampler_it_wraps() -> None:
    source = sampler(tiny_policy())
    assert source.measured() == {}
    source.sampler.measured = lambda: {"time/weight_update": 2.0}  # type: ignore[attr-defined]
    assert source.measured() == {"time/weight_update": 2.0}
