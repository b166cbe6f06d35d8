"""Advice that makes a run fit: the search over sizes that are known by hand, and one of the estimate's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatpeak.apps.planning import advice
from flatpeak.apps.planning.advice import Advice, advise
from flatpeak.apps.planning.device import GIB, PlannedDevice
from flatpeak.apps.planning.inventory import Inventory
from flatpeak.apps.planning.memory import MemoryEstimate, Phase
from flatpeak.apps.planning.planned_model import PlannedModel
from flatpeak.apps.planning.run_plan import Disk, RunPlan, plan_on
from flatpeak.apps.planning.workload import Workload, plan_workload
from flatpeak.config.load import apply_settings, merge, parse_config
from flatpeak.config.run_config import RunConfig
from support.plans import planned, saved_model, sums_recipe

EMPTY = Inventory(parameters=0, weights=0, quantized=0, adapters=0, files=0, trained=())
DISK = Disk(checkpoint=0, checkpoints=0, rollout_log=0, logged_steps=0, free=0)
TOKENS = 4096
"""Tokens of the largest micro-batch where nothing bounds it."""
ROLLOUT = {"prompts_per_step": 4, "group_size": 16, "max_new_tokens": 4}


def gib_of(config: RunConfig) -> dict[str, float]:
    """A rule instead of an estimate: 8 of weights, 12 of moments, 8 of activations, 1 of keys and values."""
    model, optimizer = config.model, config.optimizer
    moments = {"adamw": 12.0, "adamw_8bit": 5.0, "sgd": 0.0}[optimizer.name]
    activations = min(TOKENS, config.training.micro_batch_tokens or TOKENS) / 512
    return {
        "weights": 2.0 if model.quantization else 4.0 if model.dtype == "bfloat16" else 8.0,
        "optimizer": 0.0 if optimizer.offload or model.lora is not None else moments,
        "activations": activations / 4 if config.training.activation_checkpointing else activations,
        "keys and values": min(64, config.rollout.max_rows) / 64,
        "reference": 3.0 if config.kl.coefficient and not config.reference.offload else 0.0,
    }


def plan_by_rule(config: RunConfig, work: Workload, model: PlannedModel, device: PlannedDevice) -> RunPlan:
    items = {name: int(size * GIB) for name, size in gib_of(config).items() if size}
    tokens = min(TOKENS, config.training.micro_batch_tokens or TOKENS)
    memory = MemoryEstimate(
        phases=(Phase(name="update", items=items),), inventory=EMPTY, micro_batch_tokens=tokens, host=0, notes=()
    )
    return RunPlan(config=config, work=work, model=model, device=device, memory=memory, disk=DISK)


@pytest.fixture
def advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`advised(gib, on_cpu=False, **sections)`: the advice on a plan by the rule, on a device of so many GiB."""
    monkeypatch.setattr(advice, "plan_on", plan_by_rule)
    base = {"model": {"path": str(saved_model(tmp_path)), "new": None}, "rollout": ROLLOUT}
    work, _ = plan_workload(sums_recipe(**base))

    def report(gib: float, *, on_cpu: bool = False, **sections: Any) -> tuple[Advice, ...]:
        config = sums_recipe(**merge(base, sections))
        device = PlannedDevice(name="device", on_cpu=on_cpu, memory=int(gib * GIB), libraries=0)
        plan = plan_by_rule(config, work, planned(tmp_path), device)
        assert not plan.fits
        return advise(plan)

    return report


def settings_of(report: tuple[Advice, ...]) -> list[dict[str, Any]]:
    return [dict(one.settings) for one in report]


def saved(report: tuple[Advice, ...]) -> list[dict[str, float]]:
    return [{key: size / GIB for key, size in one.saves.items()} for one in report]


def test_settings_that_help_by_themselves_stand_in_the_order_of_their_time(advised: Any) -> None:
    report = advised(22)  # of 29: bfloat16 saves 4, micro-batches 6 at most, recomputation 6, rows less than 1
    assert settings_of(report) == [
        {"optimizer.name": "adamw_8bit"},
        {"optimizer.offload": True},
        {"model.lora": {}},
        {"model.quantization": "nf4", "model.lora": {}},
    ]
    assert saved(report) == [
        {"optimizer.name": 7},
        {"optimizer.offload": 12},
        {"model.lora": 12},
        {"model.quantization": 18},
    ]
    assert [one.needed / GIB for one in report] == [22, 17, 17, 11]
    assert all(one.fits for one in report)


def test_of_one_setting_the_value_that_costs_least_time_is_enough(advised: Any) -> None:
    assert settings_of(advised(27))[:2] == [{"model.dtype": "bfloat16"}, {"training.micro_batch_tokens": 2048}]
    assert settings_of(advised(24))[0] == {"training.micro_batch_tokens": 1024}
    assert settings_of(advised(28.5, on_cpu=True))[2] == {"rollout.max_rows": 32}


def test_there_are_five_suggestions_at_most(advised: Any) -> None:
    assert len(advised(28.5)) == 5  # of eight settings with which it fits


def test_settings_are_combined_where_one_is_not_enough(advised: Any) -> None:
    report = advised(12)
    assert settings_of(report) == [
        {"model.dtype": "bfloat16", "training.micro_batch_tokens": 1024, "optimizer.name": "adamw_8bit"},
        {"model.lora": {}, "model.quantization": "nf4"},
    ]
    assert saved(report)[0] == {"model.dtype": 4, "training.micro_batch_tokens": 6, "optimizer.name": 7}


def test_adapters_are_combined_with_savers_where_neither_is_enough(advised: Any) -> None:
    (only,) = settings_of(advised(3))
    assert only["model.quantization"] == "nf4"
    assert "training.activation_checkpointing" in only


def test_where_nothing_helps_the_least_is_told(advised: Any) -> None:
    (least,) = advised(1)
    assert not least.fits
    assert least.needed / GIB == 2 + 2 / 4 + 8 / 64  # nf4; recomputed activations of 1,024 tokens; 8 rows
    assert sum(least.saves.values()) == 29 * GIB - least.needed


def test_a_reference_is_offloaded_where_there_is_one(advised: Any) -> None:
    assert {"reference.offload": True} in settings_of(advised(29, kl={"coefficient": 0.1}))
    assert {"reference.offload": True} not in settings_of(advised(28.9))


def test_on_a_cpu_nothing_is_offloaded_and_roundings_come_last(advised: Any) -> None:
    assert settings_of(advised(25, on_cpu=True))[:4] == [
        {"training.micro_batch_tokens": 2048},
        {"training.activation_checkpointing": True},
        {"optimizer.name": "adamw_8bit"},
        {"model.dtype": "bfloat16"},
    ]


def test_both_stages_have_their_optimizers_changed(tmp_path: Path) -> None:
    config = sums_recipe(sft={"steps": 3})
    work, model = plan_workload(config)
    device = PlannedDevice(name="device", on_cpu=False, memory=GIB, libraries=0)
    savers = advice._savers(plan_by_rule(config, work, model, device))
    assert [{"optimizer.name": "adamw_8bit", "sft.optimizer.name": "adamw_8bit"}] in savers
    assert [{"optimizer.offload": True, "sft.optimizer.offload": True}] in savers


def test_settings_that_contradict_the_recipe_are_left_out(advised: Any) -> None:
    new = {"path": None, "new": {"architecture": "qwen2", "config": {}}}
    keys = {key for one in settings_of(advised(11, model=new)) for key in one}
    assert keys
    assert not keys & {"model.lora", "model.quantization"}  # which a new model is refused


@pytest.mark.slow
def test_advice_is_true_by_the_estimate(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "max_position_embeddings": 512}
    config = sums_recipe(model={"path": str(saved_model(tmp_path, **sizes)), "new": None})
    work, model = plan_workload(config)
    device = PlannedDevice(name="GPU", on_cpu=False, memory=GIB, libraries=0)
    plan = plan_on(config, work, model, device)
    short = replace(plan, device=replace(device, memory=int(0.8 * plan.needed)))
    report = advise(short)
    assert settings_of(report)[0] == {"optimizer.name": "adamw_8bit"}
    first = report[0]
    again = parse_config(apply_settings(config.model_dump(mode="json", exclude_unset=True), first.settings))
    assert plan_on(again, *plan_workload(again), device).needed == first.needed <= short.device.memory


def test_halves_are_powers_of_two() -> None:
    assert advice._halves(6464, 100) == [4096, 2048, 1024, 512, 256, 128]
    assert advice._halves(64, 8) == [32, 16, 8]
    assert advice._halves(8, 8) == advice._halves(1, 1) == []
