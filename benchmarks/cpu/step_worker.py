"""Worker of `step`: a few GRPO steps with flatpeak or TRL, whose reward function waits for its turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import flatpeak
from benchmarks.harness.models import load_model, load_tokenizer
from benchmarks.harness.worker_process import Meter, ParentPipe
from benchmarks.harness.workloads import Workload, prompt_texts
from flatpeak.config.load import merge
from flatpeak.rollout.randomness import derive_seed
from flatpeak.training.curriculum import Stream
from flatpeak.types import Example

LEARNING_RATE = 1e-6
BETAS = (0.9, 0.999)
SEED = 0
TRL_SETTINGS: dict[str, Any] = {
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "adam_beta1": BETAS[0],
    "adam_beta2": BETAS[1],
    "weight_decay": 0.0,
    "beta": 0.0,
    "temperature": 1.0,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": SEED,
}
"""The settings of TRL's trainer in every benchmark of steps."""


class StepReward:
    """A reward function that measures steps: from one call to the next is exactly one step.

    That is the update on one step's completions and the rollout of the next, with everything in between. Its number of
    tokens is the mean of the two steps.
    """

    __name__ = "turns"

    def __init__(self, parent: ParentPipe, meter: Meter, *, completions: int) -> None:
        self.parent, self.meter, self.completions = parent, meter, completions
        self.last_tokens = 0

    def __call__(self, completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Score nearly every completion differently, so that no group is skipped."""
        if len(completion_ids) == self.completions:  # else flatpeak's held-out evaluation before the first step
            tokens = sum(len(ids) for ids in completion_ids)
            self.parent.send(tokens=(self.last_tokens + tokens) / 2, **self.meter.stop())
            self.last_tokens = tokens
            self.parent.receive()
            self.meter.start()
        return [sum(ids) % 97 / 97 for ids in completion_ids]


def main() -> None:
    """Load, report, and train in turns."""
    parent, meter = ParentPipe(), Meter()
    arguments = json.loads(sys.argv[1])
    work = Workload(**arguments["workload"])
    torch.set_num_threads(arguments.get("threads", 1))
    model, tokenizer = load_model(arguments["model"]), load_tokenizer(arguments["model"])
    reward = StepReward(parent, meter, completions=work.prompts * work.group)
    rows = [
        {"id": f"{step}.{index}", "prompt": text}
        for step in range(arguments["steps"])
        for index, text in enumerate(prompt_texts(work, step))
    ]
    train = TRAIN[arguments["contender"]]
    parent.send()
    parent.receive()
    train(arguments, work, model, tokenizer, rows, reward)


def train_flatpeak(
    arguments: dict[str, Any],
    work: Workload,
    model: Any,
    tokenizer: Any,
    rows: list[dict[str, str]],
    reward: StepReward,
) -> None:
    """Train through the public entry point, with metrics, rollout log and recorder as in every run."""
    examples = [Example(id=row["id"], question=row["prompt"], gold="") for row in rows]
    held_out_example = Example(id="held-out", question=rows[0]["prompt"], gold="")
    settings: dict[str, Any] = arguments.get("settings", {})
    # If the recipe has model settings, flatpeak loads the model; otherwise it gets the loaded model.
    given: dict[str, Any] = {"model": model, "tokenizer": tokenizer}
    if "model" in settings:
        settings = merge(settings, {"model": {"path": arguments["model"], "device": "cpu"}})
        given = {}
        if "lora" in settings["model"]:
            import peft.tuners.lora  # noqa: F401  # imports bitsandbytes, as TRL's trainer does
    reward.meter.loaded()
    reward.meter.start()
    recipe = merge(
        {
            "run": {
                "directory": str(Path(arguments["scratch"]) / "flatpeak"),
                "threads": torch.get_num_threads(),
                "seed": SEED,
            },
            "rollout": {
                "prompts_per_step": work.prompts,
                "group_size": work.group,
                "max_new_tokens": work.limits.cap,
            },
            "optimizer": {"learning_rate": LEARNING_RATE, "betas": list(BETAS)},
            "training": {"steps": arguments["steps"]},
            "evaluation": {"every": 0},
        },
        settings,
    )
    flatpeak.train(
        recipe,
        **given,
        task=SimpleNamespace(name="random", train=examples, test=[held_out_example]),
        reward=reward,
        progress=reward.meter,
    )


def train_trl(
    arguments: dict[str, Any],
    work: Workload,
    model: Any,
    tokenizer: Any,
    rows: list[dict[str, str]],
    reward: StepReward,
) -> None:
    """Train with the same loss, batch, optimizer and data order; TRL logs its metrics at every step, as flatpeak
    does."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    completions = work.prompts * work.group
    micro = arguments.get("micro_batch") or completions
    config = GRPOConfig(
        output_dir=str(Path(arguments["scratch"]) / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=completions // micro,
        num_generations=work.group,
        max_completion_length=work.limits.cap,
        max_steps=arguments["steps"],
        max_grad_norm=1.0,
        loss_type="grpo",
        scale_rewards="group",
        logging_steps=1,
        use_transformers_continuous_batching=arguments["contender"] == "TRL generate_batch",
        transformers_continuous_batching_config=arguments.get("continuous_batching"),
        **TRL_SETTINGS,
    )
    ordered = Stream(items=rows, seed=derive_seed(SEED, "prompts", "main")).take(0, len(rows))
    trainer = GRPOTrainer(
        model,
        reward_funcs=[reward],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for _, row in ordered]),
        processing_class=tokenizer,
        peft_config=lora_config(arguments["lora"]) if "lora" in arguments else None,
    )
    reward.meter.loaded()
    reward.meter.start()
    trainer.train()


def lora_config(settings: dict[str, Any]) -> Any:
    """The adapters of `model.lora` with these settings."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM", r=settings["rank"], lora_alpha=settings["alpha"], target_modules="all-linear"
    )


TRAIN = {"flatpeak": train_flatpeak, "TRL generate": train_trl, "TRL generate_batch": train_trl}

if __name__ == "__main__":
    main()
