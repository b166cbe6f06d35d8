"""Weights and groups of the runs of arms.yaml, which its table lacks.

    python studies/claims/read_runs.py weights > docs/results/claims/weights.csv
    python studies/claims/read_runs.py groups > docs/results/claims/informative.csv

weights: whether arms without a clip end with the weights of those with one. groups: the share of groups whose rewards
differ, by the digits of the question, in early and in late steps of GRPO.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Final

from safetensors.torch import load_file

RUNS: Final = Path("runs/claims/arms/runs")
PAIRS: Final = {"grpo": "no_clip", "four_updates": "four_updates_no_clip"}
PERIODS: Final = {"early": range(1, 11), "late": range(31, 41)}
"""Steps of training whose logged rollouts are counted together."""


def weights() -> Iterable[list[object]]:
    """A row per pair of arms and seed: weights, those that differ in any bit, and the largest difference."""
    yield ["arm", "without", "seed", "weights", "different", "largest_difference"]
    for arm, without in PAIRS.items():
        for run in sorted((RUNS / arm).iterdir()):
            ends = [load_file(RUNS / name / run.name / "checkpoints/last/model.safetensors") for name in (arm, without)]
            gaps = [(one - ends[1][name]).abs() for name, one in ends[0].items()]
            different = sum(int((gap != 0).sum()) for gap in gaps)
            largest = max(float(gap.max()) for gap in gaps)
            yield [arm, without, seed_of(run), sum(gap.numel() for gap in gaps), different, f"{largest:.3g}"]


def groups() -> Iterable[list[object]]:
    """A row per seed, period and digits: groups, those that are informative, and the mean reward."""
    yield ["seed", "period", "digits", "groups", "informative", "reward"]
    for run in sorted((RUNS / "grpo").iterdir()):
        rewards: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
        for period, steps in PERIODS.items():
            files = (run / "rollouts" / f"step_{step:06d}.jsonl" for step in steps)
            for digits, own in chain.from_iterable(map(rewards_of_groups, filter(Path.is_file, files))):
                rewards[period, digits].append(own)
        for (period, digits), all_rewards in sorted(rewards.items()):
            informative = sum(len(set(own)) > 1 for own in all_rewards)
            mean = fmean(chain.from_iterable(all_rewards))
            yield [seed_of(run), period, digits, len(all_rewards), informative, f"{mean:.6g}"]


def rewards_of_groups(file: Path) -> Iterable[tuple[int, list[float]]]:
    """The digits of the question and the rewards of each group of a step."""
    by_group: dict[int, list[dict[str, object]]] = defaultdict(list)
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_group[row["group"]].append(row)
    for rows in by_group.values():
        yield len(str(rows[0]["gold"])), [float(str(row["reward"])) for row in rows]


def seed_of(run: Path) -> int:
    """The seed in the name of a run's directory."""
    return int(run.name.removeprefix("seed-"))


if __name__ == "__main__":
    csv.writer(sys.stdout, lineterminator="\n").writerows({"weights": weights, "groups": groups}[sys.argv[1]]())
