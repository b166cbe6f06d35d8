"""Bias, variance, sign and gradient of k1, k2 and k3, computed exactly over a vocabulary of 50 tokens.

    python studies/claims/kl_estimators.py > docs/results/claims/kl_estimators.csv

The policy is a softmax of Gaussian logits, the reference the same with Gaussian noise of some size added. Expectations
are sums over the vocabulary, so that no row has a sampling error; each has ten pairs of its own seeds.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from flatpeak.functional import kl_k1, kl_k2, kl_k3

TOKENS, SEEDS = 50, range(10)
NOISES = (0.01, 0.1, 0.3, 1.0, 2.0, 3.0)
ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def logits(seed: int, noise: float) -> tuple[Tensor, Tensor]:
    """The logits of a policy, to be differentiated, and of its reference."""
    generator = torch.Generator().manual_seed(seed)
    policy_V, noise_V = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    return policy_V.clone().requires_grad_(), policy_V + noise * noise_V


def measure(estimator: Callable[[Tensor, Tensor], Tensor], seed: int, noise: float) -> dict[str, float]:
    """Mean and standard deviation of an estimator over the policy's tokens, and of its expected gradient as a loss."""
    policy_V, reference_V = logits(seed, noise)
    logprobs_V, ref_logprobs_V = policy_V.log_softmax(0), reference_V.log_softmax(0)
    kl = (logprobs_V.exp() * (logprobs_V - ref_logprobs_V)).sum()
    (gradient_V,) = torch.autograd.grad(kl, policy_V, retain_graph=True)
    values_V = estimator(logprobs_V, ref_logprobs_V)
    # Sampled tokens are constants of a loss: the probabilities by which they occur have no gradient.
    weights_V = logprobs_V.exp().detach()
    mean = (weights_V * values_V).sum()
    (loss_gradient_V,) = torch.autograd.grad(mean, policy_V)
    variance = (weights_V * (values_V.detach() - mean.detach()).square()).sum()
    return {
        "kl": kl.item(),
        "relative_bias": (mean / kl - 1).item(),
        "relative_sd": (variance.sqrt() / kl).item(),
        "negative": (weights_V * (values_V < 0)).sum().item(),
        "gradient_length": (loss_gradient_V.norm() / gradient_V.norm()).item(),
        "gradient_cosine": torch.cosine_similarity(loss_gradient_V, gradient_V, dim=0).item(),
    }


def main() -> None:
    """Write a row per noise, estimator and seed."""
    rows = [
        {"noise": noise, "estimator": name, "seed": seed, **measure(estimator, seed, noise)}
        for noise in NOISES
        for name, estimator in ESTIMATORS.items()
        for seed in SEEDS
    ]
    writer = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows)


if __name__ == "__main__":
    main()
