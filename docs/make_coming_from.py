"""Write the page for users of other libraries: `python docs/make_coming_from.py > docs/coming_from.md`.

Its tables have the answers that the command line gives to their names (`flatpeak.config.foreign_names`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from flatpeak.config.foreign_names import HERE, translate

TRL: Final = """
model_name_or_path  dataset_name  dataset_config  dataset_train_split  reward_funcs  reward_weights  output_dir
per_device_train_batch_size  generation_batch_size  batch_size  gradient_accumulation_steps  micro_batch_size
num_generations  steps_per_generation  num_iterations  max_steps  num_train_epochs
max_prompt_length  max_completion_length  max_seq_length  system_prompt  chat_template  min_p  repetition_penalty
learning_rate  lr  lr_scheduler_type  warmup_ratio  optim  optim=adamw_8bit  optimizer.beta  optimizer.epsilon
loss_type  loss_type=grpo  loss_type=dr_grpo  loss_type=dapo  loss_type=cispo  loss_type=sapo  loss_type=vespo
loss_type=luspo
beta  epsilon  epsilon_high  scale_rewards  scale_rewards=batch  scale_rewards=none  scale_rewards=false
advantage.epsilon  importance_sampling_level  importance_sampling_level=sequence  mask_truncated_completions
sync_ref_model  ref_model_sync_steps  ref_model_mixup_alpha  disable_dropout
top_entropy_quantile  off_policy_mask_threshold  sapo_temperature_pos  sapo_temperature_neg  use_adaptive_entropy
entropy_target  multi_objective_aggregation
use_vllm  vllm_mode  vllm_importance_sampling_cap  gpu_memory_utilization  fast_inference  rollout.engine=vllm
use_peft  peft_config  lora_r  lora_alpha  lora_dropout  lora_target_modules  load_in_4bit  load_in_8bit
bf16  fp16  gradient_checkpointing  use_liger_kernel  use_liger_loss  deepspeed  fsdp  nproc_per_node
eval_strategy  eval_steps  per_device_eval_batch_size  save_steps  save_total_limit  push_to_hub
report_to  logging_steps  log_completions  remove_unused_columns
tools  environment_factory  max_tool_calling_iterations
"""

VERL: Final = """
actor_rollout_ref.model.path  actor_rollout_ref.model.lora_rank  actor_rollout_ref.model.lora_alpha
actor_rollout_ref.model.enable_gradient_checkpointing
data.train_files  data.val_files  data.train_batch_size  data.max_prompt_length  data.max_response_length
actor_rollout_ref.rollout.n  actor_rollout_ref.rollout.temperature  actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization  actor_rollout_ref.rollout.tensor_model_parallel_size
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
actor_rollout_ref.rollout.multi_turn  multi_turn.enable  multi_turn.max_assistant_turns  multi_turn.tool_config_path
multi_turn.max_tool_response_length
actor_rollout_ref.actor.ppo_mini_batch_size  actor_rollout_ref.actor.ppo_micro_batch_size
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu  actor_rollout_ref.actor.ppo_max_token_len_per_gpu
actor_rollout_ref.actor.ppo_epochs  actor_rollout_ref.actor.optim.lr
actor_rollout_ref.actor.clip_ratio  actor_rollout_ref.actor.clip_ratio_low  actor_rollout_ref.actor.clip_ratio_high
actor_rollout_ref.actor.clip_ratio_c  actor_rollout_ref.actor.entropy_coeff
actor_rollout_ref.actor.loss_agg_mode  actor_rollout_ref.actor.loss_agg_mode=token-mean
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
actor_rollout_ref.actor.use_kl_loss  actor_rollout_ref.actor.kl_loss_coef  actor_rollout_ref.actor.tis_imp_ratio_cap
algorithm.adv_estimator  algorithm.adv_estimator=grpo  algorithm.adv_estimator=rloo  algorithm.adv_estimator=gae
algorithm.adv_estimator=remax  algorithm.adv_estimator=opo  algorithm.adv_estimator=gdpo
algorithm.adv_estimator=reinforce_plus_plus  algorithm.adv_estimator=reinforce_plus_plus_baseline
policy_loss.loss_mode  policy_loss.loss_mode=clip_cov  policy_loss.loss_mode=kl_cov  policy_loss.loss_mode=geo_mean
policy_loss.loss_mode=dppo_tv  policy_loss.loss_mode=dppo_kl
algorithm.norm_adv_by_std_in_grpo  algorithm.norm_adv_by_std_in_grpo=false
algorithm.use_kl_in_reward  algorithm.kl_ctrl.kl_coef  algorithm.kl_ctrl.target_kl  algorithm.kl_ctrl.horizon
rollout_correction.rollout_is  rollout_correction.rollout_is_threshold
rollout_correction.rollout_is_batch_normalize  rollout_correction.rollout_rs  rollout_correction.rollout_rs_threshold
algorithm.filter_groups.enable  algorithm.filter_groups.max_num_gen_batches  algorithm.filter_groups
reward_model.reward_manager  reward_model.overlong_buffer.enable  reward_model.overlong_buffer.len
custom_reward_function  custom_reward_function.path  custom_reward_function.name  critic.optim.lr
trainer.n_gpus_per_node  trainer.total_epochs  trainer.total_training_steps  trainer.test_freq  trainer.save_freq
trainer.logger
"""

OPENRLHF: Final = """
prompt_data_probs  prompt_max_len  generate_max_len  rollout_batch_size  n_samples_per_prompt
micro_rollout_batch_size  train_batch_size  micro_train_batch_size  num_episodes  actor_learning_rate
critic_learning_rate  advantage_estimator  advantage_estimator=group_norm  advantage_estimator=dr_grpo
advantage_estimator=rloo  advantage_estimator=reinforce  advantage_estimator=gae
eps_clip  eps_clip_low_high  init_kl_coef  use_kl_loss  remote_rm_url  lora_rank  lora_alpha  load_in_4bit
bf16  gradient_checkpointing  save_steps  eval_steps  logging_steps  agent_func_path
"""

SAME: Final = {
    "learning_rate": "optimizer.learning_rate",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "tools": "tools",
}
"""Names whose last word is the same here, which the command line answers with "did you mean"."""

PAGE: Final = '''
# Coming from TRL, verl or OpenRLHF

This page shows flatpeak's equivalents of TRL scripts and verl commands, which defaults differ, and what flatpeak lacks.
The command line knows the same tables. Type a name that you know, and flatpeak answers with its own:

```text
$ flatpeak train flatpeak:tasks/gsm8k model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.kl_loss_coef=0.001
error: unknown key actor_rollout_ref.actor.kl_loss_coef: here it is kl.coefficient
```

Settings are `key.path=value`, without dashes. In a recipe they are YAML ([recipes](recipes.md)).

## A TRL script

A `GRPOTrainer` with a reward function and a data set becomes one call. Reward functions with TRL's signature work
unchanged:

```py
import flatpeak

dataset = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(100) for b in range(100)]


def correct(completions, answer, **columns):
    """1.0 for each completion that contains its row's answer."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(gold in text) for text, gold in zip(texts, answer, strict=True)]


flatpeak.train(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    dataset=dataset,  # a list, a datasets.Dataset, a DataFrame or a file
    reward=correct,
    settings={"training.steps": 200, "rollout.prompts_per_step": 8, "kl.coefficient": 0.04},
)
```

If the model has a chat template, every completion is a list with one message, as in TRL for conversations.
[Your data, your reward](own_data.md) has the columns and the other signatures.

To keep `GRPOTrainer` and add gradient regularization, use
[its subclass](gradient_regularization.md#in-a-hugging-face-trainer).

## A verl command

verl's GRPO on GSM8K, with two updates per rollout and a KL loss of 0.001:

```sh
flatpeak train flatpeak:tasks/gsm8k model.path=Qwen/Qwen2.5-0.5B-Instruct run.name=gsm8k \\
    rollout.prompts_per_step=256 rollout.group_size=8 training.minibatches=2 \\
    objective.normalization=token_mean objective.dual_clip=3 kl.coefficient=0.001 optimizer.weight_decay=0.01
```

The settings of the last line are verl's defaults, except for the KL. verl can also call flatpeak's losses and gradient
regularization ([scaling](scaling.md)).

## Defaults side by side

| | flatpeak | TRL 1.16 | verl |
|---|---|---|---|
| Average | `sequence_mean`: per completion first | `dapo`: all tokens alike | `token-mean`: all tokens alike |
| Divisor of advantages | group's std + 1e-6 | group's std + 1e-4 | group's std + 1e-6 (`grpo`) |
| KL | coefficient 0; k3, in the loss | `beta` 0; k3 times the ratio, in the loss | none; `use_kl_loss` adds 0.001 |
| Clip | 0.2 / 0.2 | 0.2 / 0.2 | 0.2 / 0.2, and dual clip 3 |
| Temperature | 1.0 | 1.0 | 1.0 |
| Prompts x completions per step | 32 x 8; without a recipe 16 x 8 | 8 per device, in groups of 8 | 1024 x 1 |
| Longest completion | 256 | 512 | 512 |
| Learning rate | 1e-6, constant | 1e-6, linear to 0 | 1e-6, constant |
| Adam's betas, weight decay | 0.9, 0.95; 0 | 0.9, 0.999; 0 | weight decay 0.01 |
| Precision | float32 | bfloat16 autocast | bfloat16 rollouts |
| Dropout of the model | off | on (`disable_dropout` is false) | |
| Evaluation | before training, every 50 steps (without a recipe 20), at the end | none | before training |

TRL's column is `GRPOConfig` of 1.16.0, verl's `_generated_ppo_trainer.yaml` at 035682e. GRPO is the default of flatpeak
and TRL. verl and OpenRLHF default to GAE with a critic. OpenRLHF also subtracts a KL (k1, 0.01) from the reward.

Two more differences:

- **Batch sizes.** A step samples `rollout.prompts_per_step` times `rollout.group_size` completions.
  `training.minibatches` says how many updates they make. `training.micro_batch_tokens` bounds memory and never changes
  the gradient.
- **Resume.** A resumed run ends with the same weights, bit for bit, as an uninterrupted run on the same machine.

## What flatpeak does not have

| Missing | Instead |
|---|---|
| servers of environments, adapters for gym | [tools and environments](agents.md) in Python |
| calls in the forms of Gemma 4, gpt-oss and DeepSeek | [other forms](agents.md#forms-of-calls), or plain text |
| rewards or advantages per turn | one reward per episode |
| a critic, GAE, PPO with a value model | baselines of a group ([algorithms](algorithms.md#advantages)) |
| DeepSpeed, Megatron | [DDP and FSDP2](scaling.md) |
| tensor parallelism in training | in vLLM servers only ([engines](engines.md)) |
| Liger's kernels | logits in chunks; `training.micro_batch_tokens` |
| float16, weights in 8 bits | bfloat16; `model.quantization=nf4` |
| rollouts more than one step old | `rollout.staleness=1` |
| images | |
'''

PEERS: Final = {
    "TRL, Hugging Face and Unsloth": TRL.split(),
    "verl": VERL.split(),
    "OpenRLHF": OPENRLHF.split(),
}
_KEY: Final = re.compile(
    r"(?:tools|environment)=[^\s,;]+|extends: flatpeak:[\w/]+|flatpeak (?:push|serve)[^,;]*"
    r"|(?<![\w:/.-])[a-z_]+(?:\.[A-Za-z0-9_]+)+(?:=[^\s,;]+)?"
)


def answer(name: str) -> str:
    """What flatpeak has in place of `key.path` or `key.path=value`, in Markdown."""
    key, _, value = name.partition("=")
    found = translate(key.split("."), value)  # without a value, no row for a value
    if found is None:
        return f"`{SAME[name]}`"
    text = found.removeprefix(HERE)
    text = re.sub(r"docs/(algorithms|agents)\.md", r"[\1](\1.md)", text)
    return _KEY.sub(lambda match: match[0] if match[0].endswith(".md") else f"`{match[0]}`", text)


def table(names: Sequence[str]) -> Iterator[str]:
    """A row per answer with all names that have it; what flatpeak lacks comes last."""
    rows: dict[str, list[str]] = {}
    for name in names:
        rows.setdefault(answer(name), []).append(f"`{name}`")
    yield from ("| There | Here |", "|---|---|")
    for text, same in sorted(rows.items(), key=lambda row: row[0].startswith("not in flatpeak")):
        yield f"| {', '.join(same)} | {text} |"


def page() -> str:
    """The page: the part written by hand, then a table per library."""
    tables = ["\n".join([f"## Names of {peer}", "", *table(names)]) for peer, names in PEERS.items()]
    return "\n\n".join([PAGE.strip(), *tables]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
