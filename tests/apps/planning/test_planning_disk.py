"""The disk of a planned run, beside a run's own directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatpeak.apps.planning.inventory import take_inventory
from flatpeak.apps.planning.run_plan import checkpoint_bytes, log_bytes, plan_disk, plan_run
from flatpeak.apps.planning.workload import plan_workload
from flatpeak.config.load import merge
from flatpeak.config.run_config import RunConfig
from flatpeak.runs.checkpoints import checkpoint_steps
from flatpeak.training.config import OptimizerConfig
from support.plans import planned, saved_model, sums_recipe
from support.reward_functions import varied


def counted(**sections: Any) -> tuple[int, int]:
    """(checkpoints, logged steps) of a recipe."""
    config = sums_recipe(**sections)
    work, model = plan_workload(config)
    disk = plan_disk(config, work, take_inventory(model))
    return disk.checkpoints, disk.logged_steps


def test_checkpoints_are_the_first_the_best_the_last_some_periodic_ones_and_the_one_being_written() -> None:
    assert counted(training={"steps": 200}, run={"checkpoint_every": 50, "keep_checkpoints": 2}) == (6, 200)
    assert counted(training={"steps": 200}, run={"checkpoint_every": 0, "log_rollouts_every": 10}) == (4, 20)
    assert counted(training={"steps": 60}, run={"checkpoint_every": 50, "log_rollouts_every": 0}) == (5, 0)
    assert counted(training={"steps": 1}) == (3, 1)
    assert counted(training={"steps": 200}, sft={"steps": 200}) == (11, 200)


def test_a_checkpoint_has_weights_masters_and_moments_and_of_adapters_no_base(tmp_path: Path) -> None:
    adamw = OptimizerConfig()
    base = saved_model(tmp_path)
    full, half, adapted = (
        take_inventory(planned(base, **model)) for model in ({}, {"dtype": "bfloat16"}, {"lora": {"rank": 2}})
    )
    assert checkpoint_bytes(full, adamw) == 12 * full.parameters
    assert checkpoint_bytes(half, adamw) == (2 + 4 + 8) * full.parameters
    assert checkpoint_bytes(adapted, adamw) == 12 * adapted.trained_parameters
    assert checkpoint_bytes(full, OptimizerConfig(name="sgd")) == 4 * full.parameters


REFERENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "reset": {"kl": {"coefficient": 0.1}, "reference": {"reset_every": 1}},
    "average in bfloat16": {"kl": {"coefficient": 0.1}, "reference": {"ema": 0.9}, "model": {"dtype": "bfloat16"}},
}


@pytest.fixture(params=REFERENCES)
def run(
    recipe: Callable[..., Any], train: Callable[..., Any], request: pytest.FixtureRequest
) -> tuple[dict[str, Any], Path]:
    """A recipe of a wider model, and the directory of its run."""
    sizes = {"hidden_size": 64, "intermediate_size": 256}
    config = merge(
        recipe(run={"checkpoint_every": 1}, **REFERENCES[request.param]), {"model": {"new": {"config": sizes}}}
    )
    return config, train(config, reward={"correctness": varied}, progress=False).path


def test_a_real_run_takes_no_more_and_not_much_less(run: tuple[dict[str, Any], Path]) -> None:
    config, directory = run
    plan = plan_run(RunConfig.model_validate(config))
    newest = directory / "checkpoints" / "step_000002"
    real = sum(file.stat().st_size for file in newest.rglob("*.safetensors"))
    assert plan.disk.checkpoint == pytest.approx(real, rel=0.05)
    assert len(checkpoint_steps(directory / "checkpoints")) <= plan.disk.checkpoints
    logged = (directory / "rollouts" / "step_000001.jsonl").stat().st_size
    assert logged <= log_bytes(plan.work) < 2 * logged
