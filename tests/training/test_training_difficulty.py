"""Groups by their pass rate or spread, and questions by what they were worth the last time."""

from __future__ import annotations

from typing import Any

import pytest

from flatpeak.training.config import DifficultyConfig, DynamicSamplingConfig, TrainingConfig
from flatpeak.training.curriculum import Progression, Stream, next_prompts
from flatpeak.types import Group, Scores
from support.resumes import MakeRun, Whole, assert_same
from support.training import completion, make_trainer, prompt, tiny_policy

NAMES = [f"q{number}" for number in range(8)]
PROMPTS = tuple(prompt(name, (4, 5)) for name in NAMES)


def signals(rewards: list[list[float | None]], **settings: Any) -> list[bool]:
    names = NAMES[: len(rewards)]
    groups = [
        Group(prompt=prompt(name, (4, 5)), completions=tuple(completion((6, 1), limit=9) for _ in range(4)))
        for name in names
    ]
    training = TrainingConfig(steps=1, dynamic_sampling=DynamicSamplingConfig(max_resamples=1, **settings))
    scores = dict(zip(names, rewards, strict=True))
    trainer = make_trainer(tiny_policy(), groups, scores, max_new_tokens=9, training=training)  # type: ignore[arg-type]
    return trainer.has_signal(groups, Scores(total=rewards, parts={"correctness": rewards}))


def test_groups_outside_of_a_band_of_pass_rates_have_no_signal() -> None:
    rewards: list[list[float | None]] = [[0, 0, 0, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, None, 0, None]]
    assert signals(rewards) == [True, True, True, False, True]
    assert signals(rewards, pass_rate=(0.3, 0.7)) == [False, True, False, False, True]
    assert signals(rewards, pass_rate=(0.25, 0.75)) == [True, True, True, False, True]


def test_groups_of_nearly_equal_rewards_have_no_signal_below_a_deviation() -> None:
    rewards: list[list[float | None]] = [[0.5, 0.51, 0.5, 0.5], [-3.0, 4.0, 0.0, 0.0], [7.0, 7.0, 7.0, 7.0]]
    assert signals(rewards) == [True, True, False]
    assert signals(rewards, min_std=0.1) == [False, True, False]


def place(**rates: float) -> Progression:
    return Progression(cursors=[0], rates=rates)


def test_questions_outside_of_the_band_are_passed_over() -> None:
    stream = Stream(items=PROMPTS, seed=0)
    skips = place(q0=0.0, q1=1.0, q2=0.5, q3=0.05).skips(DifficultyConfig(keep=0.0), seed=0)
    drawn, cursor = next_prompts(stream, 0, 5, skips=skips)
    assert {one.id for one in drawn} == {"q2", "q4", "q5", "q6", "q7"}
    assert cursor <= 8
    again, further = next_prompts(stream, 8, 5, skips=skips)
    assert {one.id for one in again} == {f"{name}@1" for name in ("q2", "q4", "q5", "q6", "q7")}
    assert further <= 16


def test_some_of_the_others_are_asked_again_by_the_seed_and_the_pass() -> None:
    stream = Stream(items=tuple(prompt(f"q{number}", (4,)) for number in range(400)), seed=0)
    rule, rates = DifficultyConfig(keep=0.2), {f"q{number}": 1.0 for number in range(400)}

    def kept(seed: int, start: int) -> set[str]:
        skips = place(**rates).skips(rule, seed=seed)
        assert skips is not None
        return {one.id.partition("@")[0] for _, one in stream.take(start, 400) if not skips(one)}

    assert 50 < len(kept(0, 0)) < 110
    assert kept(0, 0) == kept(0, 0) != kept(1, 0)


def test_where_all_are_too_easy_a_step_still_has_its_prompts() -> None:
    rates = dict.fromkeys(NAMES, 1.0)
    skips = place(**rates).skips(DifficultyConfig(keep=0.0), seed=0)
    drawn, cursor = next_prompts(Stream(items=PROMPTS, seed=0), 0, 3, skips=skips)
    assert len(drawn) == 3
    assert cursor == 8 + 3


def test_without_a_rule_the_data_keep_their_order() -> None:
    stream = Stream(items=PROMPTS, seed=0)
    assert place().skips(None, seed=0) is None
    drawn, cursor = next_prompts(stream, 2, 3, skips=None)
    assert [one.id for one in drawn] == [one.id for _, one in stream.take(2, 3)]
    assert cursor == 5


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_resumed_run_asks_the_same_questions(make_run: MakeRun, whole: Whole) -> None:
    sections = {
        "training": {"difficulty": {"pass_rate": [0.2, 0.6], "keep": 0.3}},
        "task": {"type": "arithmetic", "max_value": 3, "train_size": 9, "test_size": 2},
    }
    expected, run = whole(**sections), make_run(**sections)
    run.stop_at("train", 3)
    assert_same(run.go_on(), expected)
    assert expected["state"]["stage"]["rates"]
