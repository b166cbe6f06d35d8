"""A run in words: the sentence of what happened, warnings, phases, the recipe's own settings, next commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.report.story import next_commands, phases, recipe_changes, sentence, warnings
from flatpeak.runs.summary import RunSummary, StageEvaluation


def evaluation(stage: Any, step: int, **metrics: float) -> StageEvaluation:
    return StageEvaluation(stage=stage, step=step, task="sums", size=100, metrics=metrics, intervals={})


def summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = {
        "name": "demo",
        "status": "done",
        "metric": "accuracy",
        "best_step": 20,
        "last_step": 20,
        "evaluations": (),
        "checkpoints": (),
        "wall_seconds": 62.0,
    }
    return RunSummary(**{**values, **changes})


def steps(count: int, **metrics: Any) -> list[dict[str, Any]]:
    """RL steps whose metrics go linearly from the first to the second number of each pair."""
    rows = []
    for step in range(count):
        at = step / (count - 1)
        values = {name.replace("__", "/"): low + at * (high - low) for name, (low, high) in metrics.items()}
        rows.append({"stage": "train", "step": step + 1, "rollout/length_mean": 10.0, **values})
    return rows


EVALUATIONS = (evaluation("start", 0, accuracy=0.0), evaluation("train", 20, accuracy=0.9))
SFT = [{"stage": "sft", "step": 1, "sft/loss": 1.0}]


def test_what_happened_is_told_in_a_sentence() -> None:
    rows = SFT + steps(20)
    assert sentence(summary(), EVALUATIONS, rows) == (
        "Held-out accuracy went from 0.000 to 0.900 over 1 step of SFT and 20 steps of RL, in 62 s."
    )
    ended = summary(ended_by="training.stop_at=0.9 was reached", best_step=10, wall_seconds=3900.0)
    assert sentence(ended, EVALUATIONS, steps(20)) == (
        "Held-out accuracy went from 0.000 to 0.900 over 20 steps of RL, in 65 min. It ended early: "
        "training.stop_at=0.9 was reached. The best checkpoint is that of step 10."
    )


def test_a_run_that_has_only_begun_has_the_sentence_that_it_can() -> None:
    assert sentence(None, (), []) is None
    running = summary(status="running", wall_seconds=0.0, best_step=None)
    assert sentence(running, EVALUATIONS, steps(20)) == (
        "Held-out accuracy went from 0.000 to 0.900 over 20 steps of RL."
    )
    assert sentence(None, EVALUATIONS[:1], []) == "Held-out accuracy is 0.000 before any training."
    once = "Held-out accuracy was 0.000 before training; it was not measured again."
    assert sentence(None, EVALUATIONS[:1], steps(2)) == once
    stopped = summary(ended_by="Mine.on_step: enough")
    assert sentence(stopped, EVALUATIONS[:1], steps(2)) == f"{once} It ended early: Mine.on_step: enough."


def test_a_run_without_a_value_has_no_sentence() -> None:
    missing = replace(EVALUATIONS[1], metrics={"accuracy": None})
    assert sentence(summary(), (missing,), steps(2)) is None
    assert sentence(summary(), (EVALUATIONS[0], missing), steps(2)) is None


@pytest.mark.parametrize(
    ("metrics", "beginning"),
    [
        ({"rollout__truncated_fraction": (0.0, 0.5)}, "50% of the last completions were cut off at rollout.max_new_"),
        ({"policy__entropy": (1.0, 0.01), "reward__mean": (0.3, 0.3)}, "Entropy fell from 1 to 0.01 nats per token"),
        ({"rollout/length_mean": (10, 30), "reward__mean": (0.3, 0.3)}, "Completions became longer, from 10 to 30"),
        ({"rollout/length_mean": (30, 3), "reward__mean": (0.3, 0.3)}, "Completions became shorter, from 30 to 3"),
    ],
)
def test_what_looks_wrong_at_the_end_is_a_warning_with_a_remedy(metrics: Any, beginning: str) -> None:
    (text,) = warnings(steps(10, **metrics), EVALUATIONS, limit=64)
    assert text.startswith(beginning)
    assert any(remedy in text for remedy in ("objective.", "optimizer."))


@pytest.mark.parametrize(
    "metrics",
    [
        {"rollout__truncated_fraction": (0.5, 0.1)},
        {"policy__entropy": (1.0, 0.01), "reward__mean": (0.1, 0.9)},
        {"policy__entropy": (1.0, 0.5), "reward__mean": (0.3, 0.3)},
        {"rollout/length_mean": (10, 30), "reward__mean": (0.1, 0.9)},
        {"rollout/length_mean": (10, 15), "reward__mean": (0.3, 0.3)},
        {},
    ],
)
def test_a_run_that_learns_or_only_varies_has_no_warning(metrics: Any) -> None:
    assert warnings(steps(10, **metrics), EVALUATIONS) == []


def test_a_format_that_was_learned_without_the_task_is_a_warning() -> None:
    failing = [
        evaluation("start", 0, accuracy=0.0, extraction_failed=0.9),
        evaluation("train", 9, accuracy=0.01, extraction_failed=0.1),
    ]
    (text,) = warnings(steps(10), failing)
    assert text.startswith("Answers without a result fell from 90% to 10%, but accuracy only went from 0.000 to 0.010")
    learning = [failing[0], evaluation("train", 9, accuracy=0.5, extraction_failed=0.1)]
    assert warnings(steps(10), learning) == []


def test_a_reward_that_rises_while_accuracy_falls_is_a_warning_of_hacking() -> None:
    rising = steps(10, reward__mean=(0.7, 1.2))
    falling = [
        evaluation("start", 0, accuracy=0.1),
        evaluation("sft", 5, accuracy=0.6),
        evaluation("train", 9, accuracy=0.0),
    ]
    (text,) = warnings(rising, falling)
    assert text.startswith("The reward rose from 0.70 to 1.20, but held-out accuracy fell from 0.600 to 0.000")
    assert warnings(rising, EVALUATIONS) == []
    assert warnings(steps(10, reward__mean=(1.2, 0.7)), falling) == []


def test_phases_have_their_share_of_time_and_their_peak_of_memory() -> None:
    row = {"stage": "train", "step": 1, "time/rollout": 3.0, "time/train": 1.0, "memory/rollout_peak_gib": 1.5}
    table = phases([row, {**row, "memory/rollout_peak_gib": 1.25}, {"stage": "sft", "time/train": 99.0}])
    assert [(entry["phase"], entry["time"], entry["share"], entry["memory"]) for entry in table] == [
        ("sampling completions", "6 s", "75%", "1.50 GiB"),
        ("gradients and updates", "2 s", "25%", ""),
    ]
    assert phases([]) == []


def test_a_recipe_is_told_by_what_differs_from_the_defaults() -> None:
    overrides = [
        "task.type=gsm8k",
        "task.train_size=9",
        "rewards.correctness={type: number, weight: 2.0}",
        "run.name=x",
    ]
    changed = recipe_changes(parse_config(load_recipe("flatpeak:algorithms/dr_grpo", overrides)))
    assert changed["task"] == {"type": "gsm8k", "train_size": 9}
    assert changed["rewards"] == {"correctness": {"type": "number", "weight": 2.0}}
    assert changed["advantage"] == {"scale": "none"}
    assert "run" not in changed
    assert recipe_changes(parse_config({})) == {}


def test_the_settings_that_differ_make_the_same_configuration() -> None:
    for name in ("flatpeak:demo", "flatpeak:laptop", "flatpeak:camel_ai_judge", "flatpeak:rlhf_from_scratch"):
        config = parse_config(load_recipe(name))
        changed = recipe_changes(config)
        changed.setdefault("run", {})["name"] = config.run.name
        assert parse_config(changed) == config


def test_next_commands_fit_the_state_of_the_run() -> None:
    run = Path("runs/my run")
    assert next(command for command, _ in next_commands(run, summary())) == "flatpeak explain 'runs/my run'"
    assert next_commands(run, summary(status="stopped")) == [
        ("flatpeak train 'runs/my run'/config.yaml --resume", "continue from the last checkpoint")
    ]
    from_python = next_commands(run, summary(status="stopped"), from_command=False)
    assert from_python == [("flatpeak.train(..., resume=True)", "continue from the last checkpoint")]
    commands = [command for command, _ in next_commands(run, summary(), from_command=False, rollouts=False)]
    assert [command.split()[1] for command in commands] == ["chat", "export"]
    assert next_commands(run, summary(status="running")) == []
    assert next_commands(run, None) == []
