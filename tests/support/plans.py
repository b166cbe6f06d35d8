"""Recipes, models and real passes that plans are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatpeak.apps.planning.device import GIB, PlannedDevice
from flatpeak.apps.planning.fake_policy import MemoryTracker
from flatpeak.apps.planning.memory import MemoryEstimate, estimate_memory
from flatpeak.apps.planning.planned_model import PlannedModel, read_model
from flatpeak.apps.planning.workload import Request, Workload
from flatpeak.config.load import merge, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import training_layers
from flatpeak.types import Batch
from support.models import RUN_SIZES, letter_tokenizer, tiny_model

LETTERS = 24
"""The vocabulary of `saved_model`."""
CPU = PlannedDevice(name="CPU", on_cpu=True, memory=8 * GIB, libraries=GIB // 2)
GPU = PlannedDevice(name="GPU", on_cpu=False, memory=8 * GIB, libraries=GIB // 2)
WORK = Workload(
    task="sums",
    train_rows=10,
    test_rows=2,
    prompt_lengths=(9, 7, 5),
    group_size=4,
    new_tokens=20,
    draws=1,
    steps=3,
    updates=3,
    sft_steps=0,
    demonstrations=(),
    evaluation=Request(prompt_lengths=(9, 4), group_size=1, new_tokens=20),
    notes=(),
)
"""A run of three steps of twelve completions each."""


def saved_model(directory: Path, architecture: str = "qwen2", *, weights: bool = False, **settings: Any) -> Path:
    """A directory with config.json and a tokenizer, as a plan reads it, and with weights where they are wanted."""
    model = tiny_model(architecture, **settings)
    (model if weights else model.config).save_pretrained(directory)
    letter_tokenizer().save_pretrained(directory)
    return directory


def planned(directory: Path, **settings: Any) -> PlannedModel:
    """The model of such a directory as a plan has it."""
    return read_model(ModelConfig.model_validate({"path": str(directory), "device": "cpu", **settings}))


def config_of(directory: Path, **sections: Any) -> RunConfig:
    """The recipe of three steps with the model in such a directory."""
    model = {"path": str(directory), "device": "cpu", **sections.pop("model", {})}
    return parse_config({"model": model, "training": {"steps": 3}, **sections})


def estimated(directory: Path, device: PlannedDevice = CPU, work: Workload = WORK, **sections: Any) -> MemoryEstimate:
    """The memory of that recipe's run, as a plan has it."""
    config = config_of(directory, **sections)
    return estimate_memory(config, work, planned(directory, **sections.get("model", {})), device)


def sums_recipe(**sections: Any) -> RunConfig:
    """A recipe of single-digit sums with a new model, never run."""
    base = {
        "model": {"new": {"architecture": "qwen2", "config": RUN_SIZES}, "device": "cpu"},
        "task": {"type": "arithmetic", "max_value": 9, "train_size": 30, "test_size": 6},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4},
        "training": {"steps": 2},
    }
    return parse_config(merge(base, sections))


def real_update_peak(policy: Policy, batch: Batch, *, recompute: bool, accumulated: bool) -> int:
    """Bytes alive at most in a real pass of a policy over a micro-batch, all its gradients included; by torch."""
    policy.kernels.setting = "torch"
    trained = policy.parameters()
    held = [*policy.model.parameters(), *policy.model.buffers()]
    for parameter in trained:
        parameter.grad = None
        parameter.grad_dtype = torch.float32
    with training_layers(policy.causal, recompute=recompute, compiled=False), MemoryTracker(held) as memory:
        if accumulated:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        loss = _logprobs(policy, batch).sum()
        loss.backward()
    return memory.peak


def _logprobs(policy: Policy, batch: Batch) -> Tensor:
    logprobs_T, _ = policy.token_logprobs(batch, temperature=1.0)
    return logprobs_T
