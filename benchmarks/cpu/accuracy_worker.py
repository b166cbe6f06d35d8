"""Worker of `time_to_accuracy`: trains the demo's model with flatpeak or TRL, and measures accuracy every ten steps.

Accuracy is measured on the task's held-out problems, and as `second` on as many other problems that neither library
trains on: their difference shows the noise of 500 questions.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import flatpeak
from benchmarks.harness.worker_process import Meter, ParentPipe
from flatpeak.config.load import load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.tasks.config import build_task
from flatpeak.tasks.prompts import build_prompts
from flatpeak.types import Example, SamplingParams

EVERY = 10
"""Steps between evaluations."""
PROBLEMS = 90 * 90
"""All pairs of two-digit numbers."""


def main() -> None:
    """Load, report, and train in turns."""
    parent, meter = ParentPipe(), Meter()
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    config = parse_config(
        load_recipe(
            "flatpeak:demo",
            [
                f"run.directory={arguments['scratch']}/flatpeak",
                f"run.seed={arguments['seed']}",
                "run.threads=1",
                "run.checkpoint_every=0",
                "sft.steps=0",
                "training.stop_at=null",
                "evaluation.every=0",
                "evaluation.size=1",
                *arguments["settings"],
            ],
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments["start"])
    model = AutoModelForCausalLM.from_pretrained(arguments["start"], dtype=torch.float32)
    task = build_task(config.task)
    sets = {"accuracy": task.test, "second": second_set(task, config)}
    accuracies = held_out_accuracies(model, tokenizer, sets, config)
    reward = WatchedReward(
        parent, meter, accuracies, completions=config.rollout.prompts_per_step * config.rollout.group_size
    )
    meter.loaded()
    parent.send()
    parent.receive()
    TRAIN[arguments["trainer"]](config, model, tokenizer, task, reward, Path(arguments["scratch"]))


class WatchedReward:
    """1 for the right answer. After every EVERY steps it stops the clock, evaluates the policy, and ends the turn."""

    __name__ = "correctness"

    def __init__(
        self, parent: ParentPipe, meter: Meter, accuracies: Callable[[], dict[str, float]], *, completions: int
    ) -> None:
        self.parent, self.meter, self.accuracies, self.completions = parent, meter, accuracies, completions
        self.step = 0
        """Completed steps: a call comes before the update of the next."""
        self.cpu = self.wall = 0.0

    def __call__(self, completions: Sequence[str], gold: Sequence[str], **_: Any) -> list[float]:
        """Score exact matches with 1."""
        if len(completions) == self.completions:  # otherwise it is flatpeak's evaluation before the first step
            if self.step % EVERY == 0:
                spent = self.meter.stop()
                self.cpu, self.wall = self.cpu + spent["cpu"], self.wall + spent["wall"]
                self.parent.send(
                    step=self.step,
                    **self.accuracies(),
                    cpu=self.cpu,
                    wall=self.wall,
                    peak_mib=spent["peak_mib"],
                )
                self.parent.receive()
                self.meter.start()
            self.step += 1
        return [float(text.strip() == answer) for text, answer in zip(completions, gold, strict=True)]


def second_set(task: Any, config: RunConfig) -> tuple[Example, ...]:
    """A second held-out set of the same size, of problems in neither set; twins of either set are allowed."""
    taken = {example.id for example in (*task.train, *task.test)}
    everything = config.task.model_copy(update={"seed": config.task.seed + 1, "train_size": 0, "test_size": PROBLEMS})
    others = [example for example in build_task(everything).test if example.id not in taken]
    return tuple(others[: len(task.test)])


def held_out_accuracies(
    model: Any, tokenizer: Any, sets: Mapping[str, Sequence[Example]], config: RunConfig
) -> Callable[[], dict[str, float]]:
    """Make an evaluator of the current `model`, on a copy, by greedy answers to all questions of each set."""
    twin = copy.deepcopy(model)
    policy = Policy(twin, tokenizer)
    limit = policy.context_length or 64
    prompts = {
        name: build_prompts(examples, tokenizer, config.prompt, max_tokens=limit).prompts
        for name, examples in sets.items()
    }
    engine = NativeEngine(policy, max_rows=max(map(len, prompts.values())))
    greedy = SamplingParams(temperature=0.0, max_new_tokens=config.rollout.max_new_tokens)

    def accuracies() -> dict[str, float]:
        twin.load_state_dict(model.state_dict())
        shares = {}
        for name, questions in prompts.items():
            groups = engine.generate(questions, group_size=1, sampling=greedy, seed=0)
            shares[name] = sum(g.completions[0].text.strip() == g.prompt.example.gold for g in groups) / len(groups)
        return shares

    return accuracies


def train_flatpeak(
    config: RunConfig, model: Any, tokenizer: Any, task: Any, reward: WatchedReward, scratch: Path
) -> None:
    """Train by the shipped recipe, on one thread and without checkpoints."""
    reward.meter.start()
    own = config.model_copy(update={"model": ModelConfig()})
    flatpeak.train(own, model=model, tokenizer=tokenizer, task=task, reward=reward, progress=reward.meter)


def train_trl(config: RunConfig, model: Any, tokenizer: Any, task: Any, reward: WatchedReward, scratch: Path) -> None:
    """Train by the recipe's settings in TRL, whose rates count updates; the recipe's count rollouts."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    updates = config.training.minibatches
    optimizer = config.optimizer
    reward.meter.start()
    trainer = GRPOTrainer(
        model,
        reward_funcs=[reward],
        args=GRPOConfig(
            output_dir=str(scratch / "trl"),
            per_device_train_batch_size=reward.completions // updates,
            steps_per_generation=updates,
            gradient_accumulation_steps=1,
            num_generations=config.rollout.group_size,
            max_completion_length=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            max_steps=config.training.steps * updates,
            learning_rate=optimizer.learning_rate,
            lr_scheduler_type=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps * updates,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_epsilon=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm or 0.0,
            beta=config.kl.coefficient,
            loss_type="grpo",
            scale_rewards="group",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=updates,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            disable_dropout=True,
            seed=config.run.seed,
        ),
        train_dataset=Dataset.from_list([{"prompt": e.question, "gold": e.gold} for e in task.train]),
        processing_class=tokenizer,
    )
    trainer.train()


TRAIN = {"flatpeak": train_flatpeak, "TRL": train_trl}

if __name__ == "__main__":
    main()
