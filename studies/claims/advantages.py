"""Advantages of groups of eight: their size by pass rate with and without the standard deviation, and of equal rewards.

python studies/claims/advantages.py groups > docs/results/claims/groups.csv
python studies/claims/advantages.py equal > docs/results/claims/equal_rewards.csv
"""

from __future__ import annotations

import csv
import math
import sys

import torch
from torch import Tensor

from flatpeak.functional import group_advantages

GROUP = 8
RATES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


def groups() -> list[dict[str, object]]:
    """A row per pass rate: the expected sum of |A| over a group of rewards 0 and 1, exact over its right answers."""
    rewards_PG = torch.tensor([[1.0] * right + [0.0] * (GROUP - right) for right in range(GROUP + 1)])
    sizes = {scale: group_advantages(rewards_PG, scale=scale).abs().sum(-1).tolist() for scale in ("std", "none")}
    rows: list[dict[str, object]] = []
    for rate in RATES:
        chances = [math.comb(GROUP, k) * rate**k * (1 - rate) ** (GROUP - k) for k in range(GROUP + 1)]
        expected = {scale: sum(map(float.__mul__, chances, values)) for scale, values in sizes.items()}
        rows.append({"pass_rate": rate, "informative": 1 - chances[0] - chances[-1], **expected})
    return rows


def equal() -> list[dict[str, object]]:
    """A row per reward that a group of eight shares: the largest |A| by the formula as written, and by flatpeak."""
    rows = []
    for tenths in range(1, 31):
        rewards_PG = torch.full((1, GROUP), tenths / 10, dtype=torch.float32)
        row: dict[str, object] = {"reward": tenths / 10}
        for eps in (1e-8, 1e-6, 1e-4):
            row[f"formula_{eps:g}"] = as_written(rewards_PG, eps).abs().max().item()
            row[f"flatpeak_{eps:g}"] = group_advantages(rewards_PG, eps=eps).abs().max().item()
        rows.append(row)
    return rows


def as_written(rewards_PG: Tensor, eps: float) -> Tensor:
    """(r - mean) / (std + eps), which rounding makes other than 0 for some equal rewards."""
    return (rewards_PG - rewards_PG.mean(-1, keepdim=True)) / (rewards_PG.std(-1, keepdim=True) + eps)


def main(rows: list[dict[str, object]]) -> None:
    """Write the rows as CSV."""
    writer = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows)


if __name__ == "__main__":
    main({"groups": groups, "equal": equal}[sys.argv[1]]())
