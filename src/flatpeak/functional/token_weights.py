"""Weights of tokens in the policy loss that depend on a whole minibatch: its quantiles, covariances and distances.

They are computed once per optimizer minibatch, from a pass with the weights at its beginning, so that neither
micro-batches nor ranks change them. Each function takes by name what it needs of `TOKEN_WEIGHT_INPUTS`, over the
minibatch's trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from flatpeak.functional.losses import importance_ratio

__all__ = ["TokenWeights", "clip_cov", "damp_rare", "kl_cov", "m2po", "off_policy_mask", "stapo", "top_entropy"]

TOKEN_WEIGHT_INPUTS: Final = (
    "logprobs_T",
    "old_logprobs_T",
    "sampler_logprobs_T",
    "entropy_T",
    "advantages_T",
    "sequence_T",
    "num",
    "seed",
    "clip_low",
    "clip_high",
)
"""Values that a function of token weights may ask for by name.

The log-probabilities are those of the policy as the minibatch begins, of the ratio's denominator, and of the sampler;
`sequence_T` is each token's completion, of 0 .. `num` - 1; `seed` is another one for each minibatch; the clip is the
recipe's.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """Weights of the policy loss, and coefficients of a penalty beside it."""

    policy_T: Tensor
    """float32 [T]: the factor of each token's policy loss."""
    penalty_T: Tensor | None = None
    """float32 [T]: the coefficient of |log p - log p_old|; None: no penalty."""


def top_entropy(entropy_T: Tensor, *, fraction: float = 0.2) -> Tensor:
    """1 for tokens of an entropy at or above the 1 - fraction quantile, else 0. Wang et al. 2025, arXiv 2506.01939."""
    if not len(entropy_T):
        return entropy_T.float()
    sorted_T = entropy_T.sort().values
    place = (1 - fraction) * (len(sorted_T) - 1)
    below, above = sorted_T[int(place)], sorted_T[min(int(place) + 1, len(sorted_T) - 1)]
    return (entropy_T >= below + (above - below) * (place - int(place))).float()


def clip_cov(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
    seed: int,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Tensor:
    """0 for max(1, fraction T) random tokens of covariance between low and high, else 1. Cui et al. 2025.

    The covariance of arXiv 2505.22617 is (A_t - mean A)(log p_t - mean log p); tokens that PPO clips anyway are not
    drawn.
    """
    covariance_T = _covariance(logprobs_T, advantages_T)
    ratio_T = importance_ratio(logprobs_T, old_logprobs_T)
    clipped_T = torch.where(advantages_T > 0, ratio_T > 1 + clip_high, ratio_T < 1 - clip_low)
    candidates = ((covariance_T > low) & (covariance_T < high) & ~clipped_T).nonzero()[:, 0].cpu()
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    weights_T = torch.ones_like(logprobs_T, dtype=torch.float32)
    weights_T[candidates[order[: max(1, int(fraction * len(logprobs_T)))]].to(weights_T.device)] = 0.0
    return weights_T


def kl_cov(
    logprobs_T: Tensor, advantages_T: Tensor, *, fraction: float = 2e-4, coefficient: float = 1.0
) -> TokenWeights:
    """A penalty coefficient |log p - log p_old| for the max(1, fraction T) tokens of the largest covariance.

    Cui et al. 2025, arXiv 2505.22617. Of equal covariances the earlier tokens come first.
    """
    covariance_T = _covariance(logprobs_T, advantages_T)
    chosen = covariance_T.sort(descending=True, stable=True).indices[: max(1, int(fraction * len(logprobs_T)))]
    penalty_T = torch.zeros_like(logprobs_T, dtype=torch.float32)
    penalty_T[chosen] = coefficient
    return TokenWeights(policy_T=torch.ones_like(penalty_T), penalty_T=penalty_T)


def m2po(logprobs_T: Tensor, sampler_logprobs_T: Tensor, *, threshold: float = 0.04) -> Tensor:
    """0 for the tokens of largest (log mu - log p)^2, as few as leave the others a mean of at most `threshold`.

    M2PO, Zheng et al. 2025, arXiv 2510.01161: a trust region of the second moment, for stale samplers.
    """
    squares_T = (sampler_logprobs_T - logprobs_T).double().square()
    sorted_T, order_T = squares_T.sort(stable=True)
    means_T = sorted_T.cumsum(0) / torch.arange(1, len(sorted_T) + 1, device=sorted_T.device)
    weights_T = torch.zeros_like(logprobs_T, dtype=torch.float32)
    weights_T[order_T[means_T <= threshold]] = 1.0  # means of a sorted list rise: a prefix
    return weights_T


def off_policy_mask(
    logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    sequence_T: Tensor,
    num: int,
    *,
    threshold: float = 0.1,
) -> Tensor:
    """0 for completions of negative advantage whose mean log mu - log p is above `threshold`, else 1.

    DeepSeek-V3.2's off-policy sequence mask, arXiv 2512.02556.
    """
    distances_T = (sampler_logprobs_T - logprobs_T).double()
    sums_N = distances_T.new_zeros(num).index_add(0, sequence_T, distances_T)
    lengths_N = distances_T.new_zeros(num).index_add(0, sequence_T, torch.ones_like(distances_T))
    far_T = (sums_N / lengths_N.clamp(min=1) > threshold)[sequence_T]
    return (~(far_T & (advantages_T < 0))).float()


def stapo(
    logprobs_T: Tensor,
    entropy_T: Tensor,
    advantages_T: Tensor,
    *,
    probability: float = 0.002,
    entropy: float = 0.5,
) -> Tensor:
    """0 for tokens that are improbable where the policy is sure, and rewarded; the others' weights sum to T.

    STAPO, 2026, arXiv 2602.15620, whose abstract names the three conditions and about 0.01% of tokens; the thresholds
    are flatpeak's.
    """
    silenced_T = (logprobs_T.exp() < probability) & (entropy_T < entropy) & (advantages_T > 0)
    kept_T = (~silenced_T).float()
    return kept_T * (len(kept_T) / kept_T.sum().clamp(min=1))


def damp_rare(logprobs_T: Tensor, *, alpha: float = 0.3) -> Tensor:
    """alpha p_t + 1 - alpha: rare tokens move the weights most. Advantage reweighting, Yang et al. 2025, 2505.12929."""
    return (alpha * logprobs_T.exp() + (1 - alpha)).float()


def _covariance(logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """(A_t - mean A)(log p_t - mean log p), in float64: means over a minibatch in another order must not differ."""
    logprobs_T, advantages_T = logprobs_T.double(), advantages_T.double()
    return (advantages_T - advantages_T.mean()) * (logprobs_T - logprobs_T.mean())


TOKEN_WEIGHTS: dict[str, Callable[..., Tensor | TokenWeights]] = {
    "top_entropy": top_entropy,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "m2po": m2po,
    "off_policy_mask": off_policy_mask,
    "stapo": stapo,
    "damp_rare": damp_rare,
}
"""The values of `objective.token_weights`, by name."""
