from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from flatpeak.training.curriculum import Phase, Progression, Stream


def phase(task: str = "main", **settings: Any) -> Phase:
    return Phase(
        task=task, prompts=Stream(items=[], seed=0), reward=lambda groups: None, accuracy="correctness", **settings
    )


def walk(phases: list[Phase], pass_rates: list[float]) -> list[tuple[int, int]]:
    """(phase, steps taken in it) after each step."""
    place = Progression.start(phases)
    seen = []
    for pass_rate in pass_rates:
        place.step_done(phases, pass_rate=pass_rate)
        seen.append((place.phase, place.phase_steps))
    return seen


def test_the_first_phase_ends_after_its_steps() -> None:
    phases = [phase("first", max_steps=3), phase("main")]
    assert walk(phases, [0.0] * 6) == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_the_first_phase_ends_as_soon_as_the_pass_rate_is_reached() -> None:
    phases = [phase("first", max_steps=10, until_pass_rate=0.5), phase("main")]
    assert walk(phases, [0.1, 0.49, 0.5, 0.0]) == [(0, 1), (0, 2), (1, 0), (1, 1)]


def test_a_high_pass_rate_without_a_goal_changes_nothing() -> None:
    assert walk([phase("first", max_steps=3), phase("main")], [1.0, 1.0]) == [(0, 1), (0, 2)]


def test_an_unknown_pass_rate_does_not_end_the_phase() -> None:
    phases = [phase("first", max_steps=2, until_pass_rate=0.5), phase("main")]
    assert walk(phases, [float("nan"), float("nan")]) == [(0, 1), (1, 0)]


def test_the_main_phase_never_ends() -> None:
    assert walk([phase("main")], [1.0] * 4) == [(0, 1), (0, 2), (0, 3), (0, 4)]


@pytest.mark.parametrize(("steps", "pass_rate", "over"), [(4, 0.2, False), (5, 0.2, True), (1, 0.9, True)])
def test_steps_and_pass_rate_each_end_a_phase(steps: int, pass_rate: float, over: bool) -> None:
    assert phase(max_steps=5, until_pass_rate=0.8).is_over(steps=steps, pass_rate=pass_rate) is over


def test_each_phase_keeps_a_place_of_its_own_in_its_data() -> None:
    place = Progression.start([phase("first", max_steps=1), phase("main")])
    assert place.cursors == [0, 0]
    place.cursors[place.phase] = 12
    place.step_done([phase("first", max_steps=1), phase("main")], pass_rate=0.0)
    assert (place.phase, place.cursors) == (1, [12, 0])


def test_a_place_survives_being_saved() -> None:
    place = Progression(phase=1, phase_steps=4, cursors=[12, 8])
    assert Progression(**asdict(place)) == place


def test_the_main_task_knows_nothing_of_the_pass_rates_of_the_first() -> None:
    phases = [phase("first", max_steps=2), phase("main")]
    place = Progression(cursors=[0, 0], rates={"train.0/3": 1.0})
    place.step_done(phases, pass_rate=1.0)
    assert place.rates == {"train.0/3": 1.0}
    place.step_done(phases, pass_rate=1.0)
    assert place.rates == {}
