"""The gradient of one minibatch, normalized as a whole and in each micro-batch by itself.

    python studies/claims/splits.py > docs/results/claims/splits.csv

32 completions of random lengths (mean 120, at most 1,024) with standardized advantages, of a bigram model over 32
tokens. "Each by itself" normalizes over a micro-batch and averages the micro-batches' losses, as accumulated gradients
are in most trainers; flatpeak fixes the weights over the minibatch before the first backward pass. The last column is
the distance of the split gradient from that of the sequence mean.
"""

from __future__ import annotations

import csv
import sys
from typing import get_args

import torch
from torch import Tensor

from flatpeak.functional import completion_weights, policy_gradient
from flatpeak.training.config import Normalization

COMPLETIONS, TOKENS, LONGEST, SEEDS = 32, 32, 1024, range(10)


def gradient(weights_N: Tensor, seed: int) -> Tensor:
    """The gradient of sum_i w_i sum_t -A_i log p_it with respect to the bigram logits."""
    generator = torch.Generator().manual_seed(seed)
    advantages_N = torch.randn(COMPLETIONS, generator=generator, dtype=torch.float64)
    sizes_N = lengths(seed)
    logits_VV = torch.randn(TOKENS, TOKENS, generator=generator, dtype=torch.float64).requires_grad_()
    sequence_T = torch.arange(COMPLETIONS).repeat_interleave(sizes_N)
    before_T, after_T = torch.randint(TOKENS, (2, len(sequence_T)), generator=generator)
    logprobs_T = logits_VV.log_softmax(-1)[before_T, after_T]
    loss_T = policy_gradient(logprobs_T, advantages_N[sequence_T])
    (gradient_VV,) = torch.autograd.grad((loss_T * weights_N.double()[sequence_T]).sum(), logits_VV)
    return gradient_VV


def lengths(seed: int) -> Tensor:
    """Geometric lengths of completions."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return (torch.empty(COMPLETIONS).exponential_(1 / 120, generator=generator).long() + 1).clamp(max=LONGEST)


def by_micro_batch(sizes_N: Tensor, normalization: Normalization, size: int) -> Tensor:
    """Weights that each micro-batch of `size` completions takes from itself alone."""
    batches = torch.split(sizes_N, size)
    own = [completion_weights(batch, normalization, max_tokens=LONGEST) for batch in batches]
    return torch.cat(own) / len(batches)


def main() -> None:
    """Write a row per normalization, micro-batch and seed."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["normalization", "micro_batch", "seed", "relative_difference", "from_sequence_mean"])
    for normalization in get_args(Normalization):
        for size in (1, 4, 16):
            for seed in SEEDS:
                sizes_N = lengths(seed)
                weights_N = completion_weights(sizes_N, normalization, max_tokens=LONGEST)
                split = gradient(by_micro_batch(sizes_N, normalization, size), seed)
                by_length = gradient(completion_weights(sizes_N, "sequence_mean"), seed)
                gaps = (relative_gap(split, other) for other in (gradient(weights_N, seed), by_length))
                writer.writerow([normalization, size, seed, *(f"{gap:.6g}" for gap in gaps)])


def relative_gap(ours: Tensor, theirs: Tensor) -> float:
    """|ours - theirs| / |theirs|."""
    return float((ours - theirs).norm() / theirs.norm())


if __name__ == "__main__":
    main()
