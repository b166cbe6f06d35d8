"""`flatpeak plan`: what a recipe will run, how much memory and disk it needs, and whether it fits, before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flatpeak.apps.planning.device import GIB, PlannedDevice, plan_device
from flatpeak.apps.planning.inventory import Inventory
from flatpeak.apps.planning.memory import MemoryEstimate, estimate_memory
from flatpeak.apps.planning.planned_model import PlannedModel
from flatpeak.apps.planning.workload import Workload, plan_workload
from flatpeak.config.run_config import RunConfig
from flatpeak.runs.disk_space import free_bytes
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.master_weights import moved_reference_bytes

TIGHT: Final = 0.95
"""The share of a device's memory above which a plan says that it is tight."""
LOGGED_TOKEN: Final = 36
"""Bytes of a completion's token in a rollout log: its id (6 digits) and its log-probability (up to 22 characters), each
with a comma and a blank, and its text (4)."""
LOGGED_PROMPT_TOKEN: Final = 12
"""Bytes of a prompt's token, which has no log-probability."""
LOGGED_ROW: Final = 300
"""Bytes of a row's names, rewards and advantage."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The most bytes on disk."""

    checkpoint: int
    """One checkpoint: the model, or its adapters, and the optimizer's state."""
    checkpoints: int
    """The most checkpoints that exist at once, including the one being written."""
    rollout_log: int
    """The log of one step."""
    logged_steps: int
    free: int
    """Bytes that are free where the run will be."""

    @property
    def fits(self) -> bool:
        """Whether there is room for a save, which needs the old checkpoint and the new one."""
        return min(2, self.checkpoints) * self.checkpoint <= self.free

    @property
    def total(self) -> int:
        """Bytes of all checkpoints and logs."""
        return self.checkpoints * self.checkpoint + self.logged_steps * self.rollout_log


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run on a device."""

    config: RunConfig
    work: Workload
    model: PlannedModel
    device: PlannedDevice
    memory: MemoryEstimate
    disk: Disk

    @property
    def needed(self) -> int:
        """The most bytes of memory needed, including libraries."""
        return self.memory.peak + self.device.libraries

    @property
    def fits(self) -> bool:
        """Whether the device has this much memory."""
        return self.needed <= self.device.memory

    @property
    def is_tight(self) -> bool:
        """Whether it fits with less to spare than allocators may lose to gaps between blocks."""
        return self.fits and self.needed > TIGHT * self.device.memory

    @property
    def notes(self) -> tuple[str, ...]:
        """All assumptions and omissions of the plan."""
        return (*self.work.notes, *self.memory.notes)

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON values; sizes in GiB."""
        inventory, work, disk = self.memory.inventory, self.work, self.disk
        source = self.model.config
        return {
            "fits": self.fits,
            "tight": self.is_tight,
            "model": {
                "source": source.path or f"new {source.new.architecture if source.new else ''}",
                "type": self.model.shape.model_type,
                "parameters": inventory.parameters,
                "trained": inventory.trained_parameters,
                "dtype": source.dtype,
                "quantization": source.quantization,
                "lora": source.lora is not None,
                "native": self.model.fallback is None,
            },
            "data": {"task": work.task, "train_rows": work.train_rows, "test_rows": work.test_rows},
            "step": {
                "prompts": len(work.prompt_lengths),
                "completions": work.completions,
                "prompt_tokens_at_most": sum(work.prompt_lengths),
                "new_tokens_at_most": work.step_tokens,
                "micro_batch_tokens": self.memory.micro_batch_tokens,
            },
            "run": {
                "sft_steps": work.sft_steps,
                "steps": work.steps,
                "updates_at_most": work.updates,
                "new_tokens_at_most": work.steps * work.step_tokens,
            },
            "memory": self._memory_as_json(),
            "disk": {
                "checkpoint_gib": in_gib(disk.checkpoint),
                "checkpoints_at_most": disk.checkpoints,
                "rollout_log_gib": in_gib(disk.rollout_log),
                "logged_steps": disk.logged_steps,
                "total_gib": in_gib(disk.total),
            },
            "notes": list(self.notes),
        }

    def _memory_as_json(self) -> dict[str, Any]:
        return {
            "device": self.device.name,
            "device_gib": in_gib(self.device.memory),
            "libraries_gib": in_gib(self.device.libraries),
            "peak_gib": in_gib(self.memory.peak),
            "needed_gib": in_gib(self.needed),
            "host_gib": in_gib(self.memory.host),
            "peak_phase": self.memory.largest.name,
            "phases": {
                phase.name: {item: in_gib(size) for item, size in phase.items.items()} for phase in self.memory.phases
            },
        }


def plan_run(config: RunConfig, *, device_memory: float | None = None) -> RunPlan:
    """Plan a run on this machine's device, or on one sold with this many GB; UserError if the recipe cannot run."""
    device = plan_device(config.model.device, device_memory=device_memory)
    work, model = plan_workload(config)
    return plan_on(config, work, model, device)


def plan_on(config: RunConfig, work: Workload, model: PlannedModel, device: PlannedDevice) -> RunPlan:
    """The plan of this work with this model on a device."""
    memory = estimate_memory(config, work, model, device)
    disk = plan_disk(config, work, memory.inventory)
    return RunPlan(config=config, work=work, model=model, device=device, memory=memory, disk=disk)


def in_gib(size: int) -> float:
    """Bytes as GiB, to three decimals."""
    return round(size / GIB, 3)


def plan_disk(config: RunConfig, work: Workload, inventory: Inventory) -> Disk:
    """The disk that a run needs; the checkpoints of SFT are kept next to those of RL."""
    checkpoint = checkpoint_bytes(inventory, config.optimizer if work.steps else config.sft.optimizer)
    checkpoint += moved_reference_bytes(inventory.trained, config.reference) if work.steps else 0
    every = config.run.log_rollouts_every
    return Disk(
        checkpoint=checkpoint,
        checkpoints=config.run.most_checkpoints(work.steps, work.sft_steps),
        free=free_bytes(Path(config.run.directory) / config.run.name),
        rollout_log=log_bytes(work),
        logged_steps=work.steps // every if every else 0,
    )


def checkpoint_bytes(inventory: Inventory, optimizer: OptimizerConfig) -> int:
    """Bytes of a checkpoint: weights as stored (under adapters only these), masters and moments."""
    model = inventory.adapters or inventory.weights
    return model + inventory.masters + inventory.moments(optimizer)


def log_bytes(work: Workload) -> int:
    """Bytes of the rollouts of a step."""
    prompts = sum(work.prompt_lengths) * work.group_size * LOGGED_PROMPT_TOKEN
    return work.completions * (work.new_tokens * LOGGED_TOKEN + LOGGED_ROW) + prompts
