"""Whole runs whose penalty is checked: what is refused when, with which exit code, and what stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model

from flatpeak.errors import RunError, UserError
from flatpeak.runs.checkpoints import newest_valid
from flatpeak.runs.summary import read_summary
from support.commands import command
from support.resumes import MakeRun, Whole, assert_same
from support.reward_functions import parity
from support.runs import MakeModel, Recipe, Train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TOO_LONG = {"strength": "ratio:0.3", "step": 10.0, "perturbed": "all"}
"""A step of ten times the weights' norm: nothing like a derivative, and only a gradient can tell."""


def summary_of(config: dict[str, Any]) -> Any:
    return read_summary(Path(config["run"]["directory"]) / config["run"]["name"] / "summary.json")


def test_a_refusal_after_sft_leaves_its_checkpoint_and_is_a_failed_run(recipe: Recipe, train: Train) -> None:
    config = recipe(sft={"steps": 2}, gradient_regularization=TOO_LONG)
    with pytest.raises(RunError, match=r"is not linear over so long a step: lower gradient_regularization\.step"):
        train(config, reward=parity)
    path = Path(config["run"]["directory"]) / config["run"]["name"]
    assert newest_valid(path / "checkpoints" / "sft") == path / "checkpoints" / "sft" / "step_000002"
    assert summary_of(config).status == "failed"


def test_a_refusal_in_the_middle_keeps_the_last_step_and_is_a_failed_run(recipe: Recipe, train: Train) -> None:
    config = recipe(training={"steps": 4}, gradient_regularization={**TOO_LONG, "delay_updates": 2})
    with pytest.raises(RunError, match="is not linear over so long a step"):
        train(config, reward=parity)
    assert summary_of(config).status == "failed"
    path = Path(config["run"]["directory"]) / config["run"]["name"]
    assert newest_valid(path / "checkpoints") == path / "checkpoints" / "step_000002"


@pytest.mark.parametrize(
    ("section", "code", "said"),
    [
        (TOO_LONG, 1, "the penalty at the step and that at its opposite"),
        ({"strength": "ratio:0.3", "step": 1e-12}, 2, "rounding keeps too little of the perturbation"),
    ],
)
def test_the_command_exits_with_1_after_sft_and_with_2_before_anything_ran(
    recipe: Recipe, tmp_path: Path, section: dict[str, Any], code: int, said: str
) -> None:
    (tmp_path / "parity.py").write_text("def parity(completion):\n    return float(sum(map(ord, completion)) % 2)\n")
    rewards = {"correctness": {"type": "function", "function": f"{tmp_path / 'parity.py'}:parity", "timeout": None}}
    file = tmp_path / "recipe.yaml"
    config = recipe(sft={"steps": 1}, gradient_regularization=section, rewards=rewards)
    file.write_text(yaml.safe_dump(config))
    done = command("train", str(file), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert f"error: gradient regularization: {said}" in done.stderr
    assert bool(list(tmp_path.rglob("step_000001"))) == (code == 1)


def adapted(make_tiny_model: MakeModel) -> tuple[Any, Any]:
    """A bfloat16 model with float32 adapters, as PEFT makes them."""
    model, tokenizer = make_tiny_model()
    torch.manual_seed(0)
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    adapted = get_peft_model(model.bfloat16(), adapters)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float() + 0.05 * torch.randn(parameter.shape)
    return adapted, tokenizer


def test_float32_adapters_of_a_bfloat16_model_take_a_longer_step(
    recipe: Recipe, train: Train, watch: Any, make_tiny_model: MakeModel
) -> None:
    model, tokenizer = adapted(make_tiny_model)
    progress = watch()
    config = recipe(training={"steps": 2}, gradient_regularization={"strength": "ratio:0.3"})
    config["model"].pop("new", None)
    assert train(config, model=model, tokenizer=tokenizer, reward=parity, progress=progress).exit_code == 0
    checked = [row["gradreg/step_consistency"] for _, _, row in progress.rows if "gradreg/step_consistency" in row]
    assert len(checked) == 1
    assert checked[0] > 0.5


def test_the_step_of_float32_is_refused_for_them(recipe: Recipe, train: Train, make_tiny_model: MakeModel) -> None:
    model, tokenizer = adapted(make_tiny_model)
    config = recipe(training={"steps": 2}, gradient_regularization={"strength": "ratio:0.3", "step": 3e-5})
    config["model"].pop("new", None)
    with pytest.raises(UserError, match="rounding to bfloat16 swamps the difference"):
        train(config, model=model, tokenizer=tokenizer, reward=parity)


def no_signal(completion: str) -> float:
    return 0.0


def test_updates_without_advantages_leave_strength_and_check_to_the_first_that_has_some(
    recipe: Recipe, train: Train, watch: Any
) -> None:
    # The entropy's gradient is small and its curvature smaller: 0.3 of it would ask for a strength of thousands.
    rewarded: list[bool] = []
    progress = watch({("train", 2): lambda: rewarded.append(True)})
    config = recipe(
        training={"steps": 4},
        objective={"entropy_coefficient": 0.001},
        gradient_regularization={"strength": "ratio:0.3"},
    )
    assert (
        train(config, reward=lambda completion: parity(completion) * bool(rewarded), progress=progress).exit_code == 0
    )
    rows = [row for stage, _, row in progress.rows if stage == "train"]
    assert [row["gradreg/strength"] for row in rows[:2]] == [0.0, 0.0]
    assert all(row["gradreg/g1_norm"] > 0 for row in rows)
    assert rows[2]["gradreg/penalty_ratio"] == pytest.approx(0.3, rel=1e-6)
    assert rows[3]["gradreg/penalty_ratio"] <= 0.6
    assert ["gradreg/step_consistency" in row for row in rows] == [False, False, True, False]


def test_a_run_that_is_stopped_between_checks_resumes_to_the_same_bits(make_run: MakeRun, whole: Whole) -> None:
    sections = {"gradient_regularization": {"strength": "ratio:0.3", "check_every": 3}}
    expected, run = whole(**sections), make_run(**sections)
    assert sum("gradreg/step_consistency" in row for row in expected["metrics"]) >= 2
    run.stop_at("train", 2)
    assert_same(run.go_on(), expected)
