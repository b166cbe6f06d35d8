"""Recipes for several processes: what is refused, in one line, before any of them is started."""

from __future__ import annotations

import pytest

import flatpeak
from flatpeak.config.load import parse_config
from flatpeak.distributed.config import DistributedConfig
from flatpeak.distributed.launch import check_processes, is_repeated, needs_launch
from flatpeak.errors import UserError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_replicas_may_regularize_by_exact_curvature():
    recipe = {"distributed": {"processes": 2}, "gradient_regularization": {"strength": 0.1, "difference": "exact"}}
    assert parse_config(recipe).gradient_regularization.difference == "exact"


def test_servers_may_draw_ahead_for_several_processes():
    recipe = {"distributed": {"processes": 2}, "rollout": {"staleness": 1, "engine": {"type": "vllm"}}}
    assert parse_config(recipe).rollout.staleness == 1


def test_one_process_may_name_any_strategy():
    assert parse_config({"distributed": {"strategy": "fsdp2"}, "training": {"compile": True}}).distributed.sharded


def test_processes_are_started_where_torchrun_has_not(monkeypatch):
    assert needs_launch(DistributedConfig(processes=2))
    assert not needs_launch(DistributedConfig())
    with pytest.raises(UserError, match="this is one process: start it with `flatpeak train RECIPE`"):
        check_processes(DistributedConfig(processes=2))
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert not needs_launch(DistributedConfig(processes=2))
    assert is_repeated()  # of two processes with the same error the second is silent


def test_a_reward_model_is_trained_in_one_process_whoever_starts_it(monkeypatch, tmp_path):
    recipe = {"run": {"directory": str(tmp_path)}, "task": {"type": "preferences", "path": "none.jsonl"}}
    with pytest.raises(UserError, match=r"reward models are trained in one process: set distributed\.processes=1"):
        flatpeak.train_reward_model(recipe, settings={"distributed.processes": 2})
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"trained in one process, but torchrun has started 2: do not use torchrun"):
        flatpeak.train_reward_model(recipe)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("processes", [1, 4])
def test_torchrun_without_the_section_says_what_to_write(monkeypatch, processes):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"write `distributed: \{processes: 2, strategy: ddp\}` into it, or add"):
        needs_launch(DistributedConfig(processes=processes))
