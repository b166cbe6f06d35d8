"""Settings of trackers: what is refused, in one line; and the group that a sweep gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatpeak.config.load import parse_config
from flatpeak.errors import UserError
from flatpeak.experiments.config import read_sweep
from flatpeak.experiments.plan import build_plan
from flatpeak.runs.manifest import check_resumable
from flatpeak.tracking.trackers import Steps

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"wandb": {"project": "a/b"}}, ("project='a/b' of a tracker", "letters, digits")),
        ({"wandb": {"mode": "onlin"}}, ("tracking.wandb.mode", "offline")),
        ({"wandb": {"api_key": KEY}}, ("tracking.wandb.api_key",)),
        ({"mlflow": {"uri": "localhost:5000"}}, ("tracking.mlflow.uri", "write http://HOST:PORT")),
        ({"tags": {"note": "x" * 60}}, ("tracking.tags", "1 to 60 characters")),
        ({"completions_every": -1}, ("tracking.completions_every",)),
        ({"tensorbord": {}}, ("tensorbord", "tensorboard")),
    ],
)
def test_a_bad_setting_is_one_clear_line(section: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as raised:
        parse_config({"tracking": section})
    message = str(raised.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    assert KEY not in message


def test_trackers_may_come_go_and_change_between_the_starts_of_a_run() -> None:
    before = parse_config({}).model_dump(mode="json")
    after = parse_config({"tracking": {"wandb": {"project": "x"}, "tags": {"a": 1}}}).model_dump(mode="json")
    assert check_resumable(before, after).keys() >= {"tracking.wandb.project", "tracking.tags.a"}
    with pytest.raises(UserError):
        check_resumable(before, after | {"task": {"type": "gsm8k"}})


def test_a_sweep_is_one_group_with_tags_for_arm_and_seed(tmp_path: Path) -> None:
    text = """
name: pairs
seeds: [3, 4]
recipe: flatpeak:demo
settings: {tracking.tensorboard: {}, tracking.tags.kind: clean}
arms: {plain: {}, gr: {settings: {gradient_regularization.strength: 0.1}}}
"""
    (tmp_path / "sweep.yaml").write_text(text)
    plan = build_plan(read_sweep(tmp_path / "sweep.yaml"))
    tracked = {run.name: run.recipe.tracking for run in plan.runs}
    assert {section.group for section in tracked.values()} == {"pairs"}
    assert tracked["gr/seed-4"].tags == {"kind": "clean", "sweep": "pairs", "arm": "gr", "seed": 4}
    assert plan.columns == ("gradient_regularization.strength",)
    (tmp_path / "sweep.yaml").write_text(
        text.replace("settings: {tracking.tensorboard: {}, tracking.tags.kind: clean}", "")
    )
    assert build_plan(read_sweep(tmp_path / "sweep.yaml")).runs[0].recipe.tracking.group is None


def test_steps_of_rl_follow_those_of_sft_and_evaluations_belong_to_their_stage() -> None:
    steps = Steps()
    rows = [("eval", 0), ("sft", 1), ("sft", 2), ("eval", 2), ("train", 1), ("eval", 1), ("train", 2)]
    assert [steps.number(stage, step) for stage, step in rows] == [0, 1, 2, 2, 3, 3, 4]
