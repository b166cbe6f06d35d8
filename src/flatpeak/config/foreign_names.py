"""Keys of TRL, verl and others by which a user may look for a setting, and where flatpeak has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_LOSS: Final = "a recipe: extends: flatpeak:algorithms/dapo, or another of docs/algorithms.md"
_BATCH: Final = "rollout.prompts_per_step times rollout.group_size, split by training.minibatches"
_MEMORY: Final = "training.micro_batch_tokens, which bounds the memory of a pass"
_PROCESSES: Final = "distributed.processes"
_STEPS: Final = "run.checkpoint_every"

FOREIGN_NAMES: Final = {
    "adv_estimator": _LOSS,
    "batch_size": _BATCH,
    "beta": "kl.coefficient",
    "bf16": "model.dtype=bfloat16",
    "epsilon": "objective.clip_low and objective.clip_high",
    "epsilon_high": "objective.clip_high",
    "eval_steps": "evaluation.every",
    "generation_batch_size": _BATCH,
    "gradient_accumulation_steps": _MEMORY,
    "gradient_checkpointing": "training.activation_checkpointing",
    "kl_coef": "kl.coefficient",
    "kl_loss_coef": "kl.coefficient",
    "load_in_4bit": "model.quantization",
    "load_in_8bit": "model.quantization",
    "log_completions": "run.log_rollouts_every",
    "loss_type": _LOSS,
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "prompt.max_tokens and prompt.overlong",
    "max_response_length": "rollout.max_new_tokens",
    "micro_batch_size": _MEMORY,
    "model_name_or_path": "model.path",
    "n": "rollout.group_size",
    "n_gpus_per_node": _PROCESSES,
    "nproc_per_node": _PROCESSES,
    "num_generations": "rollout.group_size",
    "num_iterations": "training.epochs_per_rollout",
    "output_dir": "run.directory and run.name",
    "peft_config": "model.lora",
    "per_device_train_batch_size": _BATCH,
    "ppo_epochs": "training.epochs_per_rollout",
    "ppo_micro_batch_size": _MEMORY,
    "ppo_mini_batch_size": _BATCH,
    "push_to_hub": "the command flatpeak push RUN --repo OWNER/NAME, after the run",
    "ref_model_sync_steps": "reference.reset_every",
    "report_to": "tracking.wandb, tracking.tensorboard, tracking.trackio or tracking.mlflow",
    "reward_weights": "rewards.NAME.weight",
    "save_steps": _STEPS,
    "save_freq": _STEPS,
    "scale_rewards": "advantage.scale",
    "train_batch_size": _BATCH,
    "use_vllm": "rollout.engine.type=vllm",
    "warmup_ratio": "optimizer.warmup_steps",
}
"""The last part of a key elsewhere, and its setting here."""


def translate(path: Sequence[str]) -> str | None:
    """The setting for which another tool has this key, in words; None where none is known."""
    return FOREIGN_NAMES.get(path[-1].lower().replace("-", "_"))
