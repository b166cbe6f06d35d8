"""Keys of TRL, verl, OpenRLHF and others that a user may look for, and the corresponding settings of flatpeak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

HERE: Final = "here it is "
_NONE: Final = "not in flatpeak"
_LOSS: Final = "a recipe: extends: flatpeak:algorithms/dapo, or another of docs/algorithms.md"
_BATCH: Final = "rollout.prompts_per_step times rollout.group_size, split by training.minibatches"
_CLIP: Final = "objective.clip_low and objective.clip_high"
_MEMORY: Final = "training.micro_batch_tokens, which bounds the memory of a pass"
_PROCESSES: Final = "distributed.processes"
_STEPS: Final = "training.steps, each with rollout.prompts_per_step questions"
_CHECKPOINTS: Final = "run.checkpoint_every"
_TRACKERS: Final = "tracking.wandb, tracking.tensorboard, tracking.trackio or tracking.mlflow"
_FUNCTION: Final = "rewards.NAME.type=function and rewards.NAME.function=file.py:name"
_ROWS: Final = "task.type=rows and task.train.0.path"
_SERVER: Final = "an argument of the server: flatpeak serve MODEL -- --"
_TOOLS: Final = "tools=[file.py:name]"
_ACTS: Final = f"{_TOOLS}, or environment=file.py:Class (docs/agents.md)"
_CRITIC: Final = f"{_NONE}: baselines are those of a group, without a critic"
_LIGER: Final = f"{_NONE}: logits are computed in chunks, training.micro_batch_tokens bounds the memory of a pass"
_SHARDS: Final = f"{_NONE}: distributed.strategy=fsdp2 shards weights and optimizer"
_NO_PENALTY: Final = f"{_NONE}: rollout.top_p, rollout.top_k and rollout.min_p narrow the sampling"
_ALGORITHMS: Final = {
    "cispo": "flatpeak:algorithms/cispo",
    "dapo": "flatpeak:algorithms/dapo",
    "clip_cov": "flatpeak:algorithms/clip_cov",
    "dppo_kl": "flatpeak:algorithms/dppo_kl",
    "dppo_tv": "flatpeak:algorithms/dppo",
    "dr_grpo": "flatpeak:algorithms/dr_grpo",
    "gdpo": "flatpeak:algorithms/gdpo",
    "geo_mean": "flatpeak:algorithms/gmpo",
    "grpo": "flatpeak:algorithms/grpo",
    "gspo": "flatpeak:algorithms/gspo",
    "kl_cov": "flatpeak:algorithms/kl_cov",
    "luspo": "flatpeak:algorithms/luspo",
    "opo": "flatpeak:algorithms/opo",
    "reinforce": "flatpeak:algorithms/reinforce",
    "reinforce_plus_plus": "flatpeak:algorithms/reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "flatpeak:algorithms/reinforce_plus_plus_baseline",
    "remax": "flatpeak:algorithms/remax",
    "rloo": "flatpeak:algorithms/rloo",
    "sapo": "flatpeak:algorithms/sapo",
    "vespo": "flatpeak:algorithms/vespo",
}

FOREIGN_NAMES: Final = {
    "actor_learning_rate": "optimizer.learning_rate",
    "adv_estimator": _LOSS,
    "adv_estimator=gae": _CRITIC,
    "advantage.epsilon": "advantage.eps",
    "advantage_estimator": _LOSS,
    "advantage_estimator=gae": _CRITIC,
    "advantage_estimator=group_norm": "a recipe: extends: flatpeak:algorithms/grpo",
    "agent_func_path": "environment=file.py:Class, whose step answers each message (docs/agents.md)",
    "batch_size": _BATCH,
    "beta": "kl.coefficient",
    "bf16": "model.dtype=bfloat16",
    "chat_template": "prompt.template=chat, which takes the tokenizer's",
    "clip_ratio": _CLIP,
    "clip_ratio_c": "objective.dual_clip",
    "clip_ratio_high": "objective.clip_high",
    "clip_ratio_low": "objective.clip_low",
    "critic.*": _CRITIC,
    "critic_learning_rate": _CRITIC,
    "custom_reward_function": _FUNCTION,
    "custom_reward_function.name": _FUNCTION,
    "custom_reward_function.path": _FUNCTION,
    "data.train_batch_size": "rollout.prompts_per_step",
    "dataset_config": "task.train.0.hub_config",
    "dataset_name": "task.type=rows and task.train.0.hub",
    "dataset_train_split": "task.train.0.split",
    "deepspeed": _SHARDS,
    "disable_dropout": "model.dropout, which is off by default",
    "enable_gradient_checkpointing": "training.activation_checkpointing",
    "entropy_coeff": "objective.entropy_coefficient",
    "entropy_target": "objective.adaptive_entropy.target",
    "eps_clip": _CLIP,
    "eps_clip_low_high": _CLIP,
    "environment_factory": "environment=file.py:Class (docs/agents.md)",
    "epsilon": _CLIP,
    "epsilon_high": "objective.clip_high",
    "eval_steps": "evaluation.every",
    "eval_strategy": "evaluation.every",
    "fast_inference": "rollout.engine.type=vllm",
    "filter_groups": "training.dynamic_sampling.max_resamples",
    "filter_groups.enable": "training.dynamic_sampling.max_resamples",
    "filter_groups.max_num_gen_batches": "training.dynamic_sampling.max_resamples",
    "fp16": f"{_NONE}: model.dtype=bfloat16 halves the memory of the weights too",
    "fsdp": "distributed.strategy=fsdp2",
    "generate_max_len": "rollout.max_new_tokens",
    "generation_batch_size": _BATCH,
    "gpu_memory_utilization": f"{_SERVER}gpu-memory-utilization",
    "gradient_accumulation_steps": _MEMORY,
    "gradient_checkpointing": "training.activation_checkpointing",
    "importance_sampling_level": "objective.ratio",
    "importance_sampling_level=sequence": "objective.ratio=sequence",
    "init_kl_coef": "kl.coefficient",
    "kl_coef": "kl.coefficient",
    "kl_ctrl.horizon": "kl.adaptive.horizon",
    "kl_ctrl.target_kl": "kl.adaptive.target",
    "kl_loss_coef": "kl.coefficient",
    "load_in_4bit": "model.quantization=nf4 with model.lora={}",
    "load_in_8bit": f"{_NONE}: model.quantization=nf4 has 4 bits",
    "log_completions": "run.log_rollouts_every",
    "log_prob_micro_batch_size_per_gpu": _MEMORY,
    "logger": _TRACKERS,
    "logging_steps": f"{_NONE}: metrics are logged at every step, completions by run.log_rollouts_every",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.target_modules",
    "loss_agg_mode": "objective.normalization",
    "loss_agg_mode=seq-mean-token-mean": "objective.normalization=sequence_mean",
    "loss_agg_mode=seq-mean-token-sum": "objective.normalization=sequence_sum",
    "loss_agg_mode=seq-mean-token-sum-norm": "objective.normalization=constant",
    "loss_agg_mode=token-mean": "objective.normalization=token_mean",
    "loss_mode": _LOSS,
    "loss_type": _LOSS,
    "loss_type=dapo": "objective.normalization=token_mean; for all of DAPO extends: flatpeak:algorithms/dapo",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "mask_truncated_completions": "objective.truncated=mask",
    "max_assistant_turns": "episodes.max_turns",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "prompt.max_tokens and prompt.overlong",
    "max_response_length": "rollout.max_new_tokens",
    "max_seq_length": "prompt.max_tokens and rollout.max_new_tokens",
    "max_steps": "training.steps",
    "max_tool_calling_iterations": "episodes.max_turns, which is one more: after the last turn no tool is called",
    "max_tool_response_length": "episodes.answer_tokens, in tokens",
    "micro_batch_size": _MEMORY,
    "micro_rollout_batch_size": "rollout.max_rows",
    "micro_train_batch_size": _MEMORY,
    "min_p": "rollout.min_p",
    "model_name_or_path": "model.path",
    "multi_objective_aggregation": "advantage.function=gdpo",
    "multi_turn": _ACTS,
    "multi_turn.enable": _ACTS,
    "n": "rollout.group_size",
    "n_gpus_per_node": _PROCESSES,
    "n_samples_per_prompt": "rollout.group_size",
    "norm_adv_by_std_in_grpo": "advantage.scale",
    "norm_adv_by_std_in_grpo=false": "advantage.scale=none",
    "nproc_per_node": _PROCESSES,
    "num_episodes": _STEPS,
    "num_generations": "rollout.group_size",
    "num_iterations": "training.epochs_per_rollout",
    "num_train_epochs": _STEPS,
    "off_policy_mask_threshold": "objective.token_weights.function=off_policy_mask",
    "optim": "optimizer.name",
    "optim=adamw_8bit": "optimizer.name=adamw_8bit",
    "optimizer.beta": "optimizer.betas",
    "optimizer.epsilon": "optimizer.eps",
    "output_dir": "run.directory and run.name",
    "overlong_buffer.enable": "objective.truncated=soft_penalty",
    "overlong_buffer.len": "objective.overlong_buffer",
    "peft_config": "model.lora",
    "per_device_eval_batch_size": "rollout.max_rows",
    "per_device_train_batch_size": _BATCH,
    "ppo_epochs": "training.epochs_per_rollout",
    "ppo_max_token_len_per_gpu": _MEMORY,
    "ppo_micro_batch_size": _MEMORY,
    "ppo_micro_batch_size_per_gpu": _MEMORY,
    "ppo_mini_batch_size": "rollout.prompts_per_step divided by training.minibatches",
    "prompt_data_probs": "tasks.0.weight and so on, of a list of tasks in place of task",
    "prompt_max_len": "prompt.max_tokens and prompt.overlong",
    "push_to_hub": "the command flatpeak push RUN --repo OWNER/NAME, after the run",
    "ref_model_mixup_alpha": "reference.ema",
    "ref_model_sync_steps": "reference.reset_every",
    "remote_rm_url": f"{_FUNCTION}, which may ask a server",
    "remove_unused_columns": f"{_NONE}: a function of rewards.NAME.function gets every column of its row",
    "repetition_penalty": _NO_PENALTY,
    "report_to": _TRACKERS,
    "reward_funcs": _FUNCTION,
    "reward_manager": "rewards.NAME.type",
    "reward_weights": "rewards.NAME.weight",
    "rollout.engine=vllm": "rollout.engine.type=vllm",
    "rollout.name=vllm": "rollout.engine.type=vllm",
    "rollout_batch_size": "rollout.prompts_per_step",
    "rollout_is": "objective.sampler_correction.type and objective.sampler_correction.level",
    "rollout_is_batch_normalize": "objective.sampler_correction.normalize",
    "rollout_is_threshold": "objective.sampler_correction.cap and objective.sampler_correction.floor",
    "rollout_rs": "objective.sampler_correction.reject",
    "rollout_rs_threshold": "objective.sampler_correction.reject.above",
    "sapo_temperature_neg": "objective.arguments, with objective.loss=sapo",
    "sapo_temperature_pos": "objective.arguments, with objective.loss=sapo",
    "save_freq": _CHECKPOINTS,
    "save_steps": _CHECKPOINTS,
    "save_total_limit": "run.keep_checkpoints",
    "scale_rewards": "advantage.scale",
    "scale_rewards=batch": "advantage.scale=batch_std",
    "scale_rewards=false": "advantage.scale=none",
    "scale_rewards=none": "advantage.scale=none",
    "steps_per_generation": "training.minibatches",
    "sync_ref_model": "reference.reset_every",
    "system_prompt": "prompt.system",
    "tensor_model_parallel_size": f"{_SERVER}tensor-parallel-size",
    "test_freq": "evaluation.every",
    "tis_imp_ratio_cap": "objective.sampler_correction.type=truncate and objective.sampler_correction.cap",
    "tool_config_path": _TOOLS,
    "top_entropy_quantile": "objective.token_weights.function=top_entropy",
    "total_epochs": _STEPS,
    "total_training_steps": "training.steps",
    "train_batch_size": _BATCH,
    "train_files": _ROWS,
    "use_adaptive_entropy": "objective.adaptive_entropy={}",
    "use_kl_in_reward": "kl.placement=reward",
    "use_kl_loss": "kl.coefficient, above 0",
    "use_liger_kernel": _LIGER,
    "use_liger_loss": _LIGER,
    "use_peft": "model.lora={}",
    "use_vllm": "rollout.engine.type=vllm",
    "val_files": "task.test.0.path",
    "vllm_importance_sampling_cap": "objective.sampler_correction.cap",
    "vllm_mode": "the command flatpeak serve MODEL, where --sleep shares one GPU, and rollout.engine.type=vllm",
    "warmup_ratio": "optimizer.warmup_steps",
} | {
    f"{key}={algorithm}": f"a recipe: extends: {recipe}"
    for key in ("adv_estimator", "advantage_estimator", "loss_mode", "loss_type", "objective.loss")
    for algorithm, recipe in _ALGORITHMS.items()
    if (key, algorithm) != ("loss_type", "dapo")
}
"""Keys of other tools and the settings here: a key's whole path, its last two words, its last word, or its first word
with `.*`; each with `=value` if the answer depends on the value."""


def translate(path: Sequence[str], value: Any = None) -> str | None:
    """The setting that corresponds to another tool's key, in words; None if none is known."""
    for name in _names(path):
        for key in (_with_value(name, value), name):
            if key in FOREIGN_NAMES:
                text = FOREIGN_NAMES[key]
                return text if text.startswith(_NONE) else f"{HERE}{text}"
    return None


def translate_value(path: Sequence[str], value: Any) -> str | None:
    """The setting that corresponds to another tool's value of a key that flatpeak has too; None if none is known."""
    text = FOREIGN_NAMES.get(_with_value(".".join(path), value))
    return None if text is None else f"{HERE}{text}"


def _names(path: Sequence[str]) -> Iterator[str]:
    """The names under which the table may list a key, the longest first."""
    words = [word.lower().replace("-", "_") for word in path]
    yield ".".join(words)
    if len(words) > 1:
        yield f"{words[0]}.*"
        yield ".".join(words[-2:])
    yield words[-1]


def _with_value(name: str, value: Any) -> str:
    return f"{name}={str(value).lower()}"
