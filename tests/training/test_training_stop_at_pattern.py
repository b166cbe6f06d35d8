"""Runs that end once a habit pays more than answers usually differ by: `training.stop_when` by patterns/spreads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import flatpeak
import flatpeak.runs.paid_patterns as paid_patterns_module
from flatpeak.errors import UserError
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.paid_patterns import SPREADS, most_spreads, paid_patterns
from support.rows_of_answers import rows_of_answers
from support.runs import Train, tiny_recipe

CONDITION = {"metric": SPREADS, "above": 2.0}


def pays_for_three(completion: str) -> float:
    """A reward that any prompt's answer can have."""
    return float("3" in completion)


def pays_nothing(completion: str) -> float:
    """A reward without a pattern."""
    return 0.5


def recipe(directory: Path, **sections: Any) -> dict[str, Any]:
    """Steps of 64 completions, all logged."""
    rollout = {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 4}
    evaluation = {"every": 0, "accuracy": None, "metric": "reward"}
    training = {"steps": 3, "stop_when": CONDITION}
    base = {"run": {"log_rollouts_every": 1}, "rollout": rollout, "evaluation": evaluation, "training": training}
    return tiny_recipe(directory, **(base | sections))


def values(run: Path) -> list[float | None]:
    """The metric of every training step."""
    return [row.get(SPREADS) for row in read_metrics(run / "metrics.jsonl") if row["stage"] == "train"]


def test_a_run_ends_where_a_pattern_of_any_prompt_pays(tmp_path: Path, train: Train, one_thread: None) -> None:
    result = train(recipe(tmp_path), reward=pays_for_three, progress=False)
    (value,) = values(result.path)
    assert value is not None
    assert value > 2
    assert value == most_spreads(RunPaths(result.path), 1)[SPREADS]
    assert result.summary.ended_by is not None
    assert result.summary.ended_by.startswith("training.stop_when: patterns/spreads was ")


def test_a_run_without_a_pattern_goes_on(tmp_path: Path, train: Train, one_thread: None) -> None:
    result = train(recipe(tmp_path), reward=pays_nothing, progress=False)
    assert values(result.path) == [0.0, 0.0, 0.0]
    assert result.summary.ended_by is None


@pytest.mark.parametrize("condition", [None, {"metric": "reward/mean", "above": 2.0}])
def test_patterns_are_measured_only_where_a_run_may_end_by_them(
    tmp_path: Path, train: Train, one_thread: None, condition: dict[str, Any] | None
) -> None:
    training = {"steps": 1, "stop_when": condition}
    result = train(recipe(tmp_path, training=training), reward=pays_for_three, progress=False)
    assert values(result.path) == [None]


def write_steps(directory: Path, *steps: list[dict[str, Any]], forked: int = 0) -> RunPaths:
    """A run with these rollouts."""
    (directory / "rollouts").mkdir(exist_ok=True)
    fork = {"forked": {"step": forked}} if forked else {}
    (directory / "manifest.json").write_text(json.dumps({"versions": {"flatpeak": "0"}, **fork}))
    for step, rows in enumerate(steps, start=1):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / "rollouts" / f"step_{step:06d}.jsonl").write_text(lines)
    return RunPaths(directory)


def test_only_a_step_that_is_logged_has_the_value(tmp_path: Path) -> None:
    run = write_steps(tmp_path, rows_of_answers(cheat="trick", share=0.1))
    assert most_spreads(run, 1)[SPREADS] > 2
    assert most_spreads(run, 2) == {}


def test_a_damaged_file_among_the_last_five_is_no_silent_end_of_the_alarm(tmp_path: Path) -> None:
    run = write_steps(tmp_path, rows_of_answers(seed=1), rows_of_answers(seed=2))
    (run.rollouts / "step_000001.jsonl").write_text('{"reward": 1')
    with pytest.raises(UserError, match=r"step_000001\.jsonl is incomplete"):
        most_spreads(run, 2)


def test_large_steps_are_not_pooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_steps(tmp_path, rows_of_answers(cheat="trick", seed=1), rows_of_answers(seed=2))
    assert most_spreads(run, 2)[SPREADS] > 1
    monkeypatch.setattr(paid_patterns_module, "MOST_ROWS", 96 + 95)  # a step has 96
    assert most_spreads(run, 2) == {SPREADS: 0.0}


def test_a_fork_does_not_count_the_steps_before_it(tmp_path: Path) -> None:
    """Its reward may be a mended one."""
    steps = rows_of_answers(cheat="trick", seed=1), rows_of_answers(seed=2)
    assert most_spreads(write_steps(tmp_path, *steps), 2)[SPREADS] > 1
    assert most_spreads(write_steps(tmp_path, *steps, forked=1), 2) == {SPREADS: 0.0}


def test_a_fork_with_a_mended_reward_trains_on_where_the_alarm_ended_its_source(
    tmp_path: Path, train: Train, one_thread: None
) -> None:
    source = train(recipe(tmp_path), reward=pays_for_three, progress=False)
    assert source.summary.last_step == 1
    fork = flatpeak.fork(source.path, 1, name="mended", reward=pays_nothing, progress=False)
    assert (fork.summary.last_step, fork.summary.ended_by) == (3, None)
    assert values(fork.path)[1:] == [0.0, 0.0]


def test_the_words_of_an_environment_are_no_pattern_of_the_policy(tmp_path: Path) -> None:
    """It says when a move was right, so that its answer comes with every reward."""
    rows = rows_of_answers(seed=4)
    for row in rows:
        right = row["reward"] > 0.25
        row["turns"] = [{"text": row["text"]}, {"text": "done"}]
        row["text"] += "\n> right\ndone" if right else "\n> wrong\ndone"
        row |= {"token_ids": [1] * (40 if right else 20), "trained": [1] * 10 + [0] * (30 if right else 10)}
    assert most_spreads(write_steps(tmp_path, rows), 1) == {SPREADS: 0.0}


def test_large_steps_of_few_prompts_are_pooled_until_five_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [rows_of_answers(cheat="trick", bonus=3.0, prompts=3, group=32, seed=seed) for seed in range(2)]
    for row in steps[1]:
        row |= {"group": f"h{row['group']}", "prompt": f"another {row['prompt']}"}
    monkeypatch.setattr(paid_patterns_module, "MOST_ROWS", 96)
    assert most_spreads(write_steps(tmp_path, *steps), 2)[SPREADS] > 2


def test_no_other_habit_hides_a_pattern_that_pays_most(tmp_path: Path) -> None:
    """Neither in the table, which has ten and the others by what they pay in all, nor in the metric."""
    draw = random.Random(0)
    rows = rows_of_answers(cheat="open sesame", share=0.02, bonus=3.0, prompts=64)
    for row in rows:
        for habit in range(12):
            if draw.random() < 0.5:
                row["text"] += f" habit{habit}"
                row["reward"] += 0.3
    first, *others = paid_patterns(rows, rows)
    assert "sesame" in first.name
    assert len(others) == 9
    assert all("habit" in one.name for one in others)
    assert most_spreads(write_steps(tmp_path, rows), 1)[SPREADS] >= first.spreads > 3
