"""The share of bfloat16 weights that a step of AdamW changes, by learning rate, with and without float32 masters.

    python studies/claims/rounding.py > docs/results/claims/rounding.csv

Weights are Gaussian with a standard deviation of 0.02. In 20 updates each has the gradient 1 or -1, the same one
throughout, so that Adam moves it by the learning rate each time. A master in float32 is rounded once, for the model.
"""

from __future__ import annotations

import csv
import sys

import torch

WEIGHTS, UPDATES, SEEDS = 200_000, 20, range(10)
RATES = (1e-6, 3e-6, 1e-5, 3e-5)


def moved(seed: int, rate: float, *, masters: bool) -> tuple[float, float]:
    """The share of weights that the first update changes, and how much of 20 updates' way the model's weights went."""
    generator = torch.Generator().manual_seed(seed)
    start = (0.02 * torch.randn(WEIGHTS, generator=generator)).bfloat16()
    sign = torch.where(torch.rand(WEIGHTS, generator=generator) < 0.5, -1.0, 1.0)
    weights = torch.nn.Parameter(start.float() if masters else start.clone())
    optimizer = torch.optim.AdamW([weights], lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    weights.grad = sign.to(weights.dtype)
    changed = 0.0
    for update in range(UPDATES):
        optimizer.step()
        if update == 0:
            changed = (weights.detach().bfloat16() != start).float().mean().item()
    way = ((weights.detach().bfloat16().float() - start.float()) * -sign).mean().item()
    return changed, way / (UPDATES * rate)


def main() -> None:
    """Write a row per learning rate, kind of weights and seed."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["rate", "masters", "seed", "changed_by_first", "share_of_way"])
    for rate in RATES:
        for masters in (False, True):
            for seed in SEEDS:
                changed, way = moved(seed, rate, masters=masters)
                writer.writerow([rate, masters, seed, f"{changed:.6g}", f"{way:.6g}"])


if __name__ == "__main__":
    main()
