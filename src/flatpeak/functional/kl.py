"""Per-token estimators of KL(policy || reference) from tokens sampled by the policy (Schulman 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from flatpeak.functional.losses import LOG_RATIO_LIMIT


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log ref. Unbiased, of either sign; as an unweighted loss its expected on-policy gradient is 0."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log ref)^2 / 2. Biased; as a loss its on-policy gradient is the gradient of the KL."""
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log ref - log p. Unbiased and never negative.

    Like every log-ratio, d is clamped at +-20 against overflow; beyond the clamp the gradient is 0.
    """
    d = (ref_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1: for d near 0, exp(d) - d - 1 would be rounding error only.
    return torch.expm1(d) - d
