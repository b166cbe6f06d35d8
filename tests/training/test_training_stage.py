"""The loop of a stage, and the condition of `training.stop_when`: window, threshold, checkpoints, and bad settings."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatpeak.training.config import StopWhenConfig
from flatpeak.training.stage import STOP_WHEN, StageTrainer, StopCondition

NAN = math.nan


class Calls:
    """A recorder that notes what the loop asks of it; evaluations are due after every second step."""

    def __init__(self, *, reached_at: int | None = None, stop_after: int | None = None, evaluated: bool = True) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.reached_at = reached_at
        self.stop_after = stop_after
        self.evaluated = evaluated
        self.stopped = False
        self.ended_by: str | None = "unset"
        self.progress = SimpleNamespace(notice=lambda text: None)
        self.halvings = SimpleNamespace(apply=lambda bound: None)

    def check_stop(self) -> None:
        """No signal asks to stop."""

    def begin(self, stage: StageTrainer, *, goal: float | None) -> bool:
        self.made.append(("begin", goal))
        return self.reached_at == 0

    def begin_step(self, stage: StageTrainer, step: int) -> None:
        self.made.append(("step", step))

    def evaluation_due(self, step: int, *, total: int) -> bool:
        return step == total or step % 2 == 0

    def complete(self, stage: StageTrainer, step: int, total: int, metrics: Any, *, evaluation_due: bool) -> None:
        self.made.append(("complete", step, evaluation_due))
        self.stopped = step == self.stop_after

    def check_skipped(self, title: str, step: int, skipped: Any, *, limit: int, at_end: bool) -> None:
        self.made.append(("check", title, step, limit, at_end))

    def evaluate_if_due(self, name: str, step: int, *, total: int, goal: float | None) -> bool:
        return step == self.reached_at

    def checkpoint_if_due(self, stage: StageTrainer, step: int, *, last: bool) -> None:
        self.made.append(("save", step, last))

    def steps(self) -> list[int]:
        return [call[1] for call in self.made if call[0] == "step"]


class Scripted(StageTrainer):
    """Steps that draw a number."""

    def __init__(self, recorder: Calls, *, steps: int = 4, stop_when: StopWhenConfig | None = None) -> None:
        super().__init__(
            steps=steps,
            seed=3,
            recorder=recorder,  # type: ignore[arg-type]
            max_skipped_updates=7,
            goal=0.5,
            stop_when=stop_when,
        )
        self.learner = SimpleNamespace(zero_grad=lambda: None, bound=None)  # type: ignore[assignment]
        self.drawn: dict[int, float] = {}

    def train_step(self, step: int) -> dict[str, float]:
        self.drawn[step] = float(torch.rand(()))
        return {"reward/mean": float(step)}


def test_a_stage_begins_steps_checks_and_saves_in_this_order() -> None:
    calls = Calls()
    Scripted(calls, steps=2).train()
    assert calls.made == [
        ("begin", 0.5),
        ("step", 1),
        ("complete", 1, False),
        ("check", "train", 1, 7, False),
        ("save", 1, False),
        ("step", 2),
        ("complete", 2, True),
        ("check", "train", 2, 7, True),
        ("save", 2, True),
    ]
    assert calls.ended_by is None


@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        (Calls(), [1, 2, 3, 4]),
        (Calls(reached_at=0), []),
        (Calls(reached_at=2), [1, 2]),
        (Calls(stop_after=3), [1, 2, 3]),
    ],
    ids=["all", "reached before", "reached", "signal"],
)
def test_a_stage_ends_by_its_steps_its_goal_or_a_signal(calls: Calls, steps: list[int]) -> None:
    Scripted(calls).train()
    assert calls.steps() == steps


def test_a_condition_that_is_met_makes_its_step_the_last_one() -> None:
    calls = Calls()
    Scripted(calls, stop_when=StopWhenConfig(metric="reward/mean", above=2.5)).train()
    assert calls.made[-4:] == [("step", 3), ("complete", 3, True), ("check", "train", 3, 7, True), ("save", 3, True)]


@pytest.mark.parametrize(("evaluated", "first"), [(True, ("step", 3)), (False, ("check", "train", 2, 7, False))])
def test_a_resumed_stage_makes_up_for_the_evaluation_that_was_due(evaluated: bool, first: tuple[Any, ...]) -> None:
    calls = Calls(evaluated=evaluated)
    Scripted(calls).train(first_step=3)
    assert calls.made[0] == first
    assert calls.steps() == [3, 4]


def test_random_numbers_of_a_step_follow_from_its_number_and_the_callers_stay() -> None:
    whole, resumed = Scripted(Calls()), Scripted(Calls())
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    whole.train()
    assert torch.equal(torch.rand(2), expected)
    resumed.train(first_step=3)
    assert {step: whole.drawn[step] for step in (3, 4)} == resumed.drawn
    assert len(set(whole.drawn.values())) == 4


def condition(**settings: Any) -> StopCondition:
    return StopCondition(StopWhenConfig(**{"metric": "reward/exploit", **settings}))


def observe(stopping: StopCondition, values: list[float | None], *, first: int = 1) -> tuple[int | None, list[str]]:
    """The step after which the condition is met, and the notices; a value of None is a step without the metric."""
    notices: list[str] = []
    for step, value in enumerate(values, start=first):
        metrics = {"reward/mean": 0.0} | ({} if value is None else {"reward/exploit": value})
        stopping.observe(step, metrics, notice=notices.append)
        if stopping.met:
            return step, notices
    return None, notices


@pytest.mark.parametrize(
    ("settings", "values", "last"),
    [
        ({"above": 0.9}, [0.5, 0.9, 0.91, 0.0], 3),  # 0.9 is not above 0.9
        ({"below": 0.5}, [0.6, 0.5, 0.4], 3),
        ({"above": 0.5, "window": 3}, [9.0, 0.1, 0.3, 0.6, 0.9], 3),  # (9.0 + 0.1 + 0.3) / 3
        ({"above": 0.5, "window": 3}, [0.9, 0.1, 0.3, 0.6, 0.7], 5),  # (0.3 + 0.6 + 0.7) / 3 after means 0.43, 0.33
        ({"below": 0.0, "window": 2}, [-3.0, 4.0, -3.0, 2.9], 4),
        ({"above": 0.5, "window": 2}, [0.9, None, 0.9, 0.9], 4),
        ({"above": 0.5, "window": 2}, [0.9, NAN, 0.9, math.inf, 0.9, 0.9], 6),
        ({"above": 0.5, "window": 4}, [0.9, 0.9, 0.9], None),
        ({"above": -1.0}, [None, NAN, -math.inf], None),
    ],
    ids=str,
)
def test_the_condition_is_met_once_the_mean_of_a_whole_window_passes_the_threshold(
    settings: dict[str, Any], values: list[float | None], last: int | None
) -> None:
    assert observe(condition(**settings), values)[0] == last


def test_the_reason_names_metric_mean_steps_and_threshold() -> None:
    stopping = condition(above=0.5, window=3)
    _, notices = observe(stopping, [0.9, 0.1, 0.3, 0.6, 0.7])
    assert stopping.reason == "training.stop_when: reward/exploit was 0.5333 on average over steps 3 to 5, above 0.5"
    assert notices == [f"the run ends after step 5: {stopping.reason}"]
    single = condition(below=0.25)
    observe(single, [0.125])
    assert single.reason == "training.stop_when: reward/exploit was 0.125 at step 1, below 0.25"


def test_without_a_setting_nothing_is_met_or_kept() -> None:
    stopping = StopCondition(None)
    assert observe(stopping, [1.0, None]) == (None, [])
    assert (stopping.met, stopping.state()) == (False, {})


def test_a_metric_that_the_first_step_lacks_is_told_once_with_those_that_are_like_it() -> None:
    stopping = condition(metric="reward/exploitt", above=0.5)
    last, notices = observe(stopping, [0.9, 0.9, 0.9])
    assert last is None
    (notice,) = notices
    assert "training.stop_when.metric=reward/exploitt is not among the metrics of step 1" in notice
    assert "did you mean reward/exploit" in notice
    _, (notice,) = observe(condition(metric="throughput", above=0.5), [0.9])
    assert "metrics.jsonl lists those that it has" in notice
    assert observe(condition(above=5.0), [0.9, None]) == (None, [])  # absent from a later step, as some metrics are


@pytest.mark.parametrize("saved_after", range(6))
def test_a_restored_condition_is_met_after_the_same_step(saved_after: int) -> None:
    values: list[float | None] = [0.9, None, 0.1, 0.3, 0.6, 0.7, 0.8]
    first = condition(above=0.5, window=3)
    assert observe(first, values[:saved_after])[0] is None
    second = condition(above=0.5, window=3)
    second.load(json.loads(json.dumps(first.state()))[STOP_WHEN])
    last, notices = observe(second, values[saved_after:], first=saved_after + 1)
    assert last == 6
    assert len(notices) == 1


def test_a_condition_that_was_met_stays_met() -> None:
    first = condition(above=0.5)
    observe(first, [0.75])
    second = condition(above=0.5)
    second.load(first.state()[STOP_WHEN])
    assert second.reason == first.reason is not None


def test_a_condition_that_begins_anew_knows_nothing_of_earlier_steps() -> None:
    first = condition(above=0.5, window=2)
    observe(first, [0.6, 0.7])
    first.restart()
    assert (first.values, first.met) == ([], False)
    assert observe(first, [0.4, 0.7], first=3)[0] == 4
    first.restart()
    first.load(None)  # a checkpoint of a run without the setting
    assert first.values == []
