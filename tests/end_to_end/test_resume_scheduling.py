"""A resumed run schedules its rollouts as the uninterrupted one: the lengths it expects are part of a checkpoint."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.training.trainer import Trainer
from support.resumes import RL_STEPS, MakeRun, Run, assert_same, outcome

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
CUT = 3
# Three slots for twelve completions, and for six answers at an evaluation: prompts wait for one another. Every training
# prompt comes again in the next step.
CROWDED: dict[str, Any] = {
    "rollout": {"max_rows": 3, "max_new_tokens": 8},
    "task": {"train_size": 4},
    "curriculum": {"steps": 1},
    "training": {"dynamic_sampling": {"max_resamples": 0}},
    "evaluation": {"size": 6},
    "sft": {"steps": 1},
}


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """The prompts of every prefill, in order; in a resumed run, from the loading of its checkpoint on."""
    seen: list[list[tuple[int, ...]]] = []
    prefill = Policy.prefill

    def spy(self: Policy, state: Any, prompts: Sequence[Sequence[int]], entries: Sequence[int]) -> Any:
        seen.append([tuple(prompt) for prompt in prompts])
        return prefill(self, state, prompts, entries)

    def clearing(load: Callable[..., None]) -> Callable[..., None]:
        def clear_and_load(*given: Any) -> None:
            seen.clear()  # the start-up probes of policy and reference read prompts too
            load(*given)

        return clear_and_load

    monkeypatch.setattr(Policy, "prefill", spy)
    monkeypatch.setattr(NativeEngine, "load", clearing(NativeEngine.load))
    monkeypatch.setattr(Trainer, "load", clearing(Trainer.load))
    return seen


def whole_and_cut(
    make_run: MakeRun,
    prefills: list[Any],
    send: Any,
    *,
    at: tuple[str, int] = ("train", CUT),
    config: dict[str, Any] = CROWDED,
    before_resume: Callable[[], None] = lambda: None,
) -> tuple[Run, Run, list[Any], list[Any]]:
    """Two runs of one recipe, the second stopped after a step and resumed; what each read from there on."""
    marks: list[int] = []
    whole = make_run("whole", **config)
    assert whole.start(stop={at: lambda: marks.append(len(prefills))}).exit_code == 0
    expected = prefills[marks[0] :]
    cut = make_run("cut", **config)
    assert cut.start(stop={at: send(signal.SIGTERM)}).exit_code == 143
    before_resume()
    assert cut.start(resume=True).exit_code == 0
    return whole, cut, expected, list(prefills)


def stage_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / "checkpoints" / "last" / "trainer" / "state.json").read_text())["stage"]
    return state


def test_a_run_stopped_between_steps_reads_prompts_in_the_order_of_the_uninterrupted_one(
    make_run: MakeRun, prefills: list[Any], send: Any
) -> None:
    whole, cut, expected, result = whole_and_cut(make_run, prefills, send)
    assert len(expected) > 2 * (RL_STEPS - CUT)  # prompts did wait
    assert result == expected
    assert_same(outcome(cut.path), outcome(whole.path))


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_stopped_in_sft_reads_prompts_in_the_order_of_the_uninterrupted_one(
    make_run: MakeRun, prefills: list[Any], send: Any, step: int
) -> None:
    """After a check, and after the last step of SFT, when RL's sampler is given what SFT's checks have seen."""
    checked = {"steps": 4, "stop_at": 1.0, "check_every": 1, "check_size": 6}
    config = CROWDED | {"task": {"train_size": 10}, "sft": checked}
    whole, cut, expected, result = whole_and_cut(make_run, prefills, send, at=("sft", step), config=config)
    assert result == expected
    assert_same(outcome(cut.path), outcome(whole.path))


def test_a_checkpoint_holds_the_expected_lengths_and_without_them_the_order_would_differ(
    make_run: MakeRun, prefills: list[Any], send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget() -> None:
        monkeypatch.setattr(NativeEngine, "load", lambda self, state: None)

    whole, _, expected, result = whole_and_cut(make_run, prefills, send, before_resume=forget)
    lengths = stage_state(whole.path)["sampler"]["expected_lengths"]
    assert set(lengths.values()) != {0.0}
    assert all(1 <= length <= 8 for length in lengths.values())
    assert result != expected
    assert sorted(p for piece in result for p in piece) == sorted(p for piece in expected for p in piece)


def test_a_training_prompt_that_comes_again_is_expected_to_be_as_long_as_before(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[int] = []
    plan = NativeEngine._plan

    def spy(self: NativeEngine, prompts: Sequence[Any], *, group_size: int) -> Any:
        before = set(self.expected_lengths)
        schedule = plan(self, prompts, group_size=group_size)
        if group_size > 1:
            known.append(len(before))
        return schedule

    monkeypatch.setattr(NativeEngine, "_plan", spy)
    run = make_run("whole", **CROWDED)
    assert run.start().exit_code == 0
    assert len(known) == RL_STEPS
    # The training set has been seen once by the end of its first pass, and nothing is added in those after it.
    assert known[-1] == known[-2]
