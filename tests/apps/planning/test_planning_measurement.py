"""Two measured steps: the recipe that is run, the sums that are told, and nothing left behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatpeak.apps.planning import measurement
from flatpeak.apps.planning.measurement import measure_run, shortened, summarize
from flatpeak.config.load import parse_config
from flatpeak.errors import RunError, UserError

ROWS = [
    {"time/step": 10.0, "time/rollout": 4.0, "memory/peak_gib": 2.0, "groups/informative_fraction": 1.0},
    {"time/step": 3.0, "time/rollout": 1.0, "memory/peak_gib": 2.5, "groups/informative_fraction": 0.5},
]


def test_a_run_takes_the_first_step_once_and_the_second_for_all_others() -> None:
    measured = summarize(ROWS, steps=101, price=2.5)
    assert (measured.first_step_seconds, measured.step_seconds, measured.rollout_seconds) == (10, 3, 1)
    assert measured.run_seconds == 10 + 100 * 3
    assert measured.cost == pytest.approx(2.5 * 310 / 3600)
    assert (measured.peak_gib, measured.informative_fraction) == (2.5, 0.5)
    assert summarize([{"time/step": 1.0}], steps=5, price=None).cost is None


def test_two_steps_leave_nothing_behind(
    recipe: Callable[..., Any], train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def in_this_process(command: Sequence[str]) -> None:
        assert command[:4] == [sys.executable, "-m", "flatpeak", "train"]
        seen.append(Path(command[4]))
        assert train(seen[0], progress=False).exit_code == 0

    monkeypatch.setattr(measurement, "_run", in_this_process)
    config = parse_config(
        recipe(training={"steps": 40}, evaluation={"every": 5, "samples": 2}, curriculum=None, sft={"steps": 3})
    )
    measured = measure_run(config, price=1.0)
    assert measured.run_seconds == pytest.approx(measured.first_step_seconds + 39 * measured.step_seconds)
    assert measured.step_seconds > 0
    assert measured.peak_gib is not None
    assert not seen[0].parent.exists()
    assert not Path(config.run.directory).exists()


def test_the_measured_recipe_has_two_steps_and_one_question(recipe: Callable[..., Any], tmp_path: Path) -> None:
    sections = {
        "training": {"steps": 40, "stop_at": 0.9},
        "sft": {"steps": 9, "stop_at": 0.5},
        "curriculum": {"task": {"type": "arithmetic", "max_value": 3}, "steps": 4},
        "evaluation": {"every": 5, "size": 4, "final_size": 6, "robustness": ["framing"]},
    }
    config = parse_config(shortened(parse_config(recipe(**sections)), str(tmp_path)))
    assert (config.training.steps, config.sft.steps, config.curriculum) == (2, 0, None)
    assert (config.training.stop_at, config.sft.stop_at) == (None, None)
    evaluation = config.evaluation
    assert (evaluation.every, evaluation.size, evaluation.final_size, evaluation.robustness) == (0, 1, None, ())
    assert config.run.directory == str(tmp_path)
    alone = parse_config(shortened(parse_config(recipe(training={"steps": 0}, sft={"steps": 9})), str(tmp_path)))
    assert (alone.training.steps, alone.sft.steps) == (0, 2)


@pytest.mark.parametrize(("code", "kind"), [(2, UserError), (1, RunError)])
def test_a_run_that_fails_is_told_in_its_own_last_line(code: int, kind: type[Exception]) -> None:
    script = (
        f"import sys; print('warning: x', file=sys.stderr); print('error: no room', file=sys.stderr); sys.exit({code})"
    )
    with pytest.raises(kind, match=r"^--measure: no room$"):
        measurement._run([sys.executable, "-c", script])


def test_a_process_that_was_killed_says_why() -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RunError, match="killed, most likely for want of memory"):
        measurement._run([sys.executable, "-c", script])


def test_a_recipe_without_steps_has_nothing_to_measure(recipe: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="there is no step to measure"):
        measure_run(parse_config(recipe(training={"steps": 0})), price=None)


def test_a_measured_recipe_is_written_as_a_run_reads_it(recipe: Callable[..., Any], tmp_path: Path) -> None:
    config = parse_config(recipe())
    again = yaml.safe_load(yaml.safe_dump(shortened(config, str(tmp_path))))
    assert parse_config(again).task == config.task
