"""The cost of gradient regularization: updates and whole GRPO steps, with and without it, in one process.

    python -m benchmarks.cpu.gradreg [--rounds 7] [--sft-steps 600] [--recipe flatpeak:demo] [--json FILE] [KEY=VALUE]

Every variant updates the same policy at learning rate 0, from the same rollouts of the recipe's task, in the recipe's
minibatches. A round times each variant once, in turns: an update is the mean over UPDATE_EPOCHS passes through all
minibatches, and a step is `train_step` with sampling, scoring and all updates. Times are medians over the rounds;
ratios are within a round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.pipeline.build import Components, build_components
from flatpeak.pipeline.progress import SilentProgress
from flatpeak.pipeline.request import CallerObjects
from flatpeak.runs.manifest import describe_start
from flatpeak.training.learner import Learner, seeded
from flatpeak.training.regularized import build_learner
from flatpeak.training.sft import LIKELIHOOD, demonstration_batch
from flatpeak.training.trainer import Trainer, TrainerConfig
from flatpeak.types import Batch

PLAIN = "no regularization"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "regularized, all groups": {"strength": "ratio:0.3"},
    "regularized, half the groups": {"strength": "ratio:0.3", "group_fraction": 0.5},
    "regularized, a quarter of the groups": {"strength": "ratio:0.3", "group_fraction": 0.25},
    "regularized, every 5th update": {"strength": "ratio:0.3", "every": 5},
    "central difference": {"strength": "ratio:0.3", "difference": "central"},
}


UPDATE_EPOCHS = 5
"""Passes through the minibatches: five, so that "every 5th update" is exactly a fifth of the updates."""


class NoRecorder:
    """A recorder that writes nothing."""

    def rollouts(self, *_: Any) -> None:
        """Discard the rollouts of a step."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The times of one variant."""

    name: str
    update_seconds: list[float]
    step_seconds: list[float]


def main() -> None:
    """Measure the variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="flatpeak:demo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sft-steps", type=int, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = parse_config(load_recipe(arguments.recipe, ["optimizer.learning_rate=0", *arguments.overrides]))
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    components = build_components(config, CallerObjects(), checkpoint=None, progress=SilentProgress())
    imitate(components, config, steps=arguments.sft_steps)
    trainers = {}
    for name, fields in VARIANTS.items():
        regularized = config.model_copy(update={"gradient_regularization": GradientRegularizationConfig(**fields)})
        trainers[name] = build_trainer(components, regularized, NoRecorder())
    updates = minibatches_of_a_step(trainers[PLAIN])
    rows = measure(trainers, updates, repeats=arguments.rounds)
    print(table(rows, updates, components))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(rows), indent=1) + "\n")


def imitate(components: Components, config: RunConfig, *, steps: int) -> None:
    """Run supervised steps first, so that the completions of a group differ."""
    learner = Learner(components.policy, LIKELIHOOD, config.sft.optimizer, temperature=1.0, micro_batch_tokens=16384)
    size = config.sft.batch_size
    for step in range(steps):
        drawn = [item for _, item in components.data.demonstrations.take(step * size, size)]
        learner.update(
            demonstration_batch(drawn, config.sft, device=components.policy.device),
            rate=config.sft.optimizer.learning_rate,
        )


def build_trainer(components: Components, config: RunConfig, recorder: Any, *, ranks: Ranks = ALONE) -> Trainer:
    """The trainer of this recipe's run."""
    learner = build_learner(
        components.policy,
        components.algorithm.objective,
        config.optimizer,
        config.gradient_regularization,
        temperature=config.rollout.temperature,
        micro_batch_tokens=config.training.micro_batch_tokens,
        notice=print,
        ranks=ranks,
    )
    return Trainer(
        learner,
        advantages=components.algorithm.advantages,
        sampler=components.sampler,
        phases=components.phases,
        reference=None,
        config=TrainerConfig(seed=config.run.seed, rollout=config.rollout, training=config.training),
        recorder=recorder,
    )


def minibatches_of_a_step(trainer: Trainer) -> list[Batch]:
    """One step's completions as batches of its updates."""
    rollouts = trainer.collect(1)
    rewards = trainer.reward_tensors(rollouts.groups, rollouts.scores)
    completions = trainer.pack(rollouts.groups, rewards)
    _, advantages_T = trainer.advantages(rewards, completions)
    return [batch for (batch,) in trainer.minibatches(1, completions, rewards, advantages_T)]


def measure(trainers: dict[str, Trainer], updates: Sequence[Batch], *, repeats: int) -> list[Row]:
    """Time updates and whole steps in turns, after a warm-up round."""
    rows = [Row(name=name, update_seconds=[], step_seconds=[]) for name in trainers]
    for counted in range(-1, repeats):
        for row, trainer in zip(rows, trainers.values(), strict=True):
            update = seconds(lambda learner=trainer.learner: run_updates(learner, updates))
            step = seconds(lambda trainer=trainer, number=counted + 2: trainer.train_step(number))
            if counted >= 0:
                row.update_seconds.append(update / (UPDATE_EPOCHS * len(updates)))
                row.step_seconds.append(step)
    return rows


def run_updates(learner: Learner, updates: Sequence[Batch]) -> None:
    """Run all updates as in training, at learning rate 0."""
    for _ in range(UPDATE_EPOCHS):
        for minibatch in updates:
            with seeded(0):
                learner.update(*learner.divide(minibatch), rate=0.0)


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def ratios(rows: list[Row], name: str, what: str) -> list[float]:
    """A variant's time divided by the plain variant's, by round."""
    chosen = next(row for row in rows if row.name == name)
    return [a / b for a, b in zip(getattr(chosen, what), getattr(rows[0], what), strict=True)]


def table(rows: list[Row], updates: Sequence[Batch], components: Components) -> str:
    """Write the table in Markdown."""
    start = describe_start(None)
    size = sum(parameter.numel() for parameter in components.policy.model.parameters())
    lines = [
        f"{size:,} parameters; {len(updates)} updates a step, with {mean(len(u.prompts) for u in updates):.0f} "
        f"informative groups, {mean(len(u.lengths_N) for u in updates):.0f} completions and "
        f"{mean(len(u.tokens_T) for u in updates):.0f} response tokens each. {start['hardware']['cpu']}, "
        f"{torch.get_num_threads()} threads, {', '.join(start['hardware']['cuda']) or 'no GPU'}; "
        f"torch {start['versions']['torch']}, commit {start['commit']['flatpeak']}.",
        "",
        "| Variant | Update, s | Update, ratio | Whole step, s | Whole step, ratio |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.name]
        for what in ("update_seconds", "step_seconds"):
            cells.append(f"{median(getattr(row, what)):.3f}")
            relative = ratios(rows, row.name, what)
            cells.append(f"{median(relative):.2f} ({min(relative):.2f} to {max(relative):.2f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_json(rows: list[Row]) -> dict[str, Any]:
    """The raw times and the machine and versions."""
    return {"start": describe_start(None), "rows": [vars(row) for row in rows]}


if __name__ == "__main__":
    main()
