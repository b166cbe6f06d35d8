"""Worker of `tools`: a few GRPO steps with a tool by flatpeak or TRL, whose reward function waits for its turn."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import torch

import flatpeak
from benchmarks.cpu.step_worker import BETAS, LEARNING_RATE, SEED, TRL_SETTINGS, StepReward
from benchmarks.harness.models import load_model, load_tokenizer
from benchmarks.harness.worker_process import Meter, ParentPipe

PROMPTS, GROUP, CAP = 4, 4, 96


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    return a * b


def multiply_slowly(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    time.sleep(0.5)
    return a * b


def main() -> None:
    """Load, report, and train in turns."""
    parent, meter = ParentPipe(), Meter()
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    draw = random.Random(SEED)
    questions = [
        f"What is {draw.randint(100, 999)} * {draw.randint(100, 999)}?" for _ in range(PROMPTS * arguments["steps"])
    ]
    reward = StepReward(parent, meter, completions=PROMPTS * GROUP)
    # In a module of its own for flatpeak's worker processes, which import the tool.
    from benchmarks.cpu import tools_worker

    tool = tools_worker.multiply_slowly if arguments["seconds"] else tools_worker.multiply
    parent.send()
    parent.receive()
    TRAIN[arguments["contender"]](arguments, questions, reward, tool)


def train_flatpeak(arguments: dict[str, Any], questions: list[str], reward: StepReward, tool: Any) -> None:
    """Train through the public entry point, with episodes, metrics and rollout log as in every run."""
    recipe = {
        "model": {"path": arguments["model"], "device": "cpu"},
        "run": {"directory": arguments["scratch"], "threads": 1, "seed": SEED, "checkpoint_every": 0},
        "prompt": {"template": "chat"},
        "rollout": {"prompts_per_step": PROMPTS, "group_size": GROUP, "max_new_tokens": CAP},
        "optimizer": {"learning_rate": LEARNING_RATE, "betas": list(BETAS)},
        "training": {"steps": arguments["steps"]},
        "evaluation": {"every": 0},
    }
    reward.meter.loaded()
    reward.meter.start()
    flatpeak.train(recipe, dataset=questions, reward=reward, tools=[tool], progress=reward.meter)


def train_trl(arguments: dict[str, Any], questions: list[str], reward: StepReward, tool: Any) -> None:
    """The same with TRL, whose tools run in the trainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=arguments["scratch"],
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=CAP,
        max_steps=arguments["steps"],
        **TRL_SETTINGS,
    )
    trainer = GRPOTrainer(
        load_model(arguments["model"]),
        reward_funcs=[reward],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in questions]),
        processing_class=load_tokenizer(arguments["model"]),
        tools=[tool],
    )
    reward.meter.loaded()
    reward.meter.start()
    trainer.train()


TRAIN = {"flatpeak": train_flatpeak, "TRL generate": train_trl}

if __name__ == "__main__":
    main()
