"""Training from a sampler that is not quite the trainer, with and without importance weights for it.

    python docs/results/sampler_correction.py [--seeds 5] [--learning-rate 3e-4] [--steps 60]

Sums of numbers below 40 by a model of 100 thousand parameters: per seed one SFT, and from its checkpoint a GRPO run for
every sampler and every way to treat its log-probabilities. Prints a Markdown table: means over the seeds, and the
difference from the run whose sampler is the trainer itself, with its 95% interval (Student's t over the paired seeds).
Held-out accuracy is measured with the trainer's own weights throughout. Takes a few minutes of one core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import flatpeak
from flatpeak.experiments.statistics import paired_t
from flatpeak.policy.loading import cast_weights
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import snapshot
from flatpeak.rollout.engine import NativeEngine
from flatpeak.runs.metrics import read_metrics
from flatpeak.training.batch import collate
from flatpeak.training.learner import score
from flatpeak.types import Group, Prompt, SamplingParams

RECIPE: dict[str, Any] = {
    "model": {
        "new": {
            "architecture": "gpt2",
            "config": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32},
            "tokenizer": {"type": "characters"},
        }
    },
    "task": {"type": "arithmetic", "max_value": 39, "train_size": 1200, "test_size": 200},
    "rollout": {"prompts_per_step": 32, "group_size": 8, "max_new_tokens": 4},
    "optimizer": {"warmup_steps": 5},
    "training": {},
    "sft": {"steps": 1000, "stop_at": 0.3, "optimizer": {"learning_rate": 1e-3}},
    "evaluation": {},
}
TREATMENTS: dict[str, dict[str, Any]] = {
    "taken for the trainer's": {},
    "in the ratio": {},
    "truncate, token": {"type": "truncate", "level": "token"},
    "mask, sequence": {"type": "mask", "level": "sequence"},
}


class Perturbed:
    """Rollouts by other weights than the trainer's; greedy completions, which evaluations ask for, by the trainer's."""

    def __init__(self, policy: Policy, kind: str, *, unnoticed: bool) -> None:
        self.policy = policy
        self.copy = snapshot(policy)
        if kind == "bfloat16":
            cast_weights(self.copy.model, torch.bfloat16)
        self.stale = kind == "one version old"
        self.unnoticed = unnoticed
        """Whether log-probabilities are replaced by the trainer's, so that nothing is corrected."""
        self.own, self.other = NativeEngine(policy), NativeEngine(self.copy)

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt."""
        if sampling.temperature == 0:
            return self.own.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
        if not self.stale:
            self.copy.follow(self.policy)
        groups = self.other.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
        if self.stale:  # these weights draw the next step's, after this step has changed the policy's
            self.copy.follow(self.policy)
        return self.rescored(groups) if self.unnoticed else groups

    def rescored(self, groups: list[Group]) -> list[Group]:
        """The same tokens with the trainer's log-probabilities."""
        valid_PG = torch.ones(len(groups), len(groups[0].completions), dtype=torch.bool)
        batch = collate(groups, valid_PG, device=self.policy.device)
        values = iter(score(self.policy, batch, temperature=1.0, micro_batch_tokens=4096).tolist())
        return [
            replace(
                group,
                completions=tuple(
                    replace(c, logprobs=tuple(next(values) for _ in c.token_ids)) for c in group.completions
                ),
            )
            for group in groups
        ]


def settings(directory: Path, name: str, seed: int) -> dict[str, Any]:
    """The settings that all runs share."""
    files = {"checkpoint_every": 10_000, "log_rollouts_every": 0}
    return {"run": {"name": name, "directory": str(directory), "seed": seed, "threads": 1, **files}}


def outcome(result: Any) -> dict[str, float]:
    """The figures of one run."""
    rows = read_metrics(result.path / "metrics.jsonl")
    steps = [row for row in rows if row["stage"] == "train"]
    evaluations = [row for row in rows if row["stage"] == "eval"]
    (accuracy,) = (name for name in evaluations[-1] if name.endswith("/accuracy"))
    return {
        "accuracy": evaluations[-1][accuracy],
        "reward": statistics.mean(row["reward/mean"] for row in steps),
        "gap": statistics.mean(row.get("rollout/logprob_gap_mean", 0.0) for row in steps),
        "largest": max(row.get("rollout/logprob_gap_max", 0.0) for row in steps),
        "capped": statistics.mean(row.get("rollout/correction_capped", 0.0) for row in steps),
    }


def sampler(kind: str, treatment: str) -> Callable[[Policy], Any]:
    """The factory that `train` calls."""
    unnoticed = treatment == "taken for the trainer's"
    return lambda policy: Perturbed(policy, kind, unnoticed=unnoticed)


def runs_of_seed(directory: Path, seed: int) -> dict[tuple[str, str], dict[str, float]]:
    """Every run of a seed, from one checkpoint of SFT."""
    begun = flatpeak.sft(RECIPE, settings=settings(directory, f"sft-{seed}", seed), progress=False)
    recipe = {**RECIPE, "model": {"path": str(begun.path / "checkpoints" / "sft" / "last")}, "sft": {"steps": 0}}
    arms = [("the trainer itself", "")]
    arms += [(kind, treatment) for kind in ("bfloat16", "one version old") for treatment in TREATMENTS]
    results = {}
    for index, (kind, treatment) in enumerate(arms):
        shared = settings(directory, f"{seed}-{index}", seed)
        shared["objective.sampler_correction"] = TREATMENTS.get(treatment, {})
        own = None if not treatment else sampler(kind, treatment)
        results[kind, treatment] = outcome(flatpeak.train(recipe, settings=shared, sampler=own, progress=False))
    return results


def difference(ours: Sequence[float], base: Sequence[float]) -> str:
    """The mean of the paired differences with its interval."""
    gap = paired_t(ours, base)
    return f"{gap.estimate:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    RECIPE["optimizer"]["learning_rate"] = arguments.learning_rate
    RECIPE["training"]["steps"] = RECIPE["evaluation"]["every"] = arguments.steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        results = [runs_of_seed(Path(directory), seed) for seed in seeds]
    base = next(iter(results[0]))
    print(
        "| sampler | its log-probabilities | gap, nats: mean, largest | capped | final accuracy | difference [95%] | "
        "mean reward | difference [95%] |\n|---|---|---|---|---|---|---|---|"
    )
    for arm in results[0]:
        columns = {name: [result[arm][name] for result in results] for name in results[0][arm]}
        mean = {name: statistics.mean(values) for name, values in columns.items()}
        text = f"| {arm[0]} | {arm[1]} | {mean['gap']:.1e}, {max(columns['largest']):.2g} | {mean['capped']:.3f} |"
        for name in ("accuracy", "reward"):
            text += f" {mean[name]:.3f} | {difference(columns[name], [r[base][name] for r in results])} |"
        print(text)


if __name__ == "__main__":
    main()
