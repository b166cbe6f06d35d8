"""RLHF in TRL: GRPO against a reward model, with a KL penalty and gradient regularization.

Needs `pip install flatpeak[trl]`. The reward model is any sequence-classification checkpoint with one output, trained
on preferences (for example by TRL's RewardTrainer). Rows have a `prompt`, or an `instruction` as in AlpacaFarm.

    python examples/trl_rlhf.py --model my-sft-model --reward-model my-reward-model --rows prompts.jsonl

In flatpeak's study of a learned reward model (docs/results/reward_hacking.md), gradient regularization alone did not
stop the policy from gaming it, but KL did. Compare both on your data: `--strength 0` is KL alone, `--beta 0` is
regularization alone. Evaluate by a stronger reward model or by people, not by the reward in training.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from datasets import load_dataset

from flatpeak.integrations.trl import GradientRegularizedGRPOConfig, GradientRegularizedGRPOTrainer


def main(arguments: Sequence[str] | None = None) -> GradientRegularizedGRPOTrainer:
    """Train, and return the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--reward-model", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--output", default="runs/trl-rlhf")
    parser.add_argument("--strength", default="calibrated:3")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--plain", action="store_true", help="text prompts, for a model without a chat template")
    given = parser.parse_args(arguments)

    def worded(row: dict[str, Any]) -> dict[str, Any]:
        text = str(
            row["prompt"] if "prompt" in row else "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        )
        return {"prompt": text if given.plain else [{"role": "user", "content": text}]}

    rows = load_dataset("json", data_files=given.rows, split="train")
    config = GradientRegularizedGRPOConfig(
        output_dir=given.output,
        grad_reg_strength=given.strength,
        grad_reg_ratio_mode="reuse",
        beta=given.beta,
        loss_type="dr_grpo",
        scale_rewards="none",
        num_generations=8,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=given.batch // 8,
        max_completion_length=given.max_tokens,
        temperature=0.7,
        learning_rate=5e-6,
        lr_scheduler_type="constant",
        max_steps=given.steps,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = GradientRegularizedGRPOTrainer(
        model=given.model,
        args=config,
        reward_funcs=given.reward_model,
        train_dataset=rows.map(worded, remove_columns=rows.column_names),
    )
    trainer.train()
    trainer.save_model(given.output)
    return trainer


if __name__ == "__main__":
    main()
