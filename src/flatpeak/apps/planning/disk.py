"""The disk of a planned run: its checkpoints and its logs of rollouts, at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flatpeak.apps.planning.inventory import Inventory
from flatpeak.apps.planning.workload import Workload
from flatpeak.config.run_config import RunConfig
from flatpeak.training.config import OptimizerConfig

LOGGED_TOKEN: Final = 36
"""Bytes of a completion's token in a rollout log: its id (6 digits), its log-probability (up to 22 characters), both
with a comma and a blank, and its text (4)."""
LOGGED_PROMPT_TOKEN: Final = 12
"""Bytes of a prompt's token, which has no log-probability."""
LOGGED_ROW: Final = 300
"""Bytes of a row's names, rewards and advantage."""
OTHER_CHECKPOINTS: Final = 3
"""Checkpoints beside the periodic ones: the first, the best and the last."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Bytes on disk at most."""

    checkpoint: int
    """One checkpoint: the model, or its adapters, and the optimizer's state."""
    checkpoints: int
    """The number of checkpoints at hand at a time, the one that is being written included."""
    rollout_log: int
    """The log of one step."""
    logged_steps: int

    @property
    def total(self) -> int:
        """Bytes of all checkpoints and logs."""
        return self.checkpoints * self.checkpoint + self.logged_steps * self.rollout_log


def plan_disk(config: RunConfig, work: Workload, inventory: Inventory) -> Disk:
    """The disk that a run takes; the checkpoints of SFT lie beside those of RL."""
    checkpoint = checkpoint_bytes(inventory, config.optimizer if work.steps else config.sft.optimizer)
    count = _kept(config, work.steps) + _kept(config, work.sft_steps)
    every = config.run.log_rollouts_every
    return Disk(
        checkpoint=checkpoint,
        checkpoints=count + 1 if count else 0,
        rollout_log=log_bytes(work),
        logged_steps=work.steps // every if every else 0,
    )


def checkpoint_bytes(inventory: Inventory, optimizer: OptimizerConfig) -> int:
    """Bytes of a checkpoint: the weights as they are stored, under adapters these alone, masters and moments."""
    model = inventory.adapters or inventory.weights
    return model + inventory.masters + inventory.moments(optimizer)


def log_bytes(work: Workload) -> int:
    """Bytes of the rollouts of a step."""
    prompts = sum(work.prompt_lengths) * work.group_size * LOGGED_PROMPT_TOKEN
    return work.completions * (work.new_tokens * LOGGED_TOKEN + LOGGED_ROW) + prompts


def _kept(config: RunConfig, steps: int) -> int:
    """Checkpoints of a stage that are kept beside each other: no more than there are."""
    if not steps:
        return 0
    every = config.run.checkpoint_every
    periodic = min(config.run.keep_checkpoints, steps // every) if every else 0
    return min(OTHER_CHECKPOINTS + periodic, 1 + steps)
