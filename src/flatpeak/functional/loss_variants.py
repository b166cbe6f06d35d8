"""Policy losses of papers since GRPO: other gates, ratios of whole completions, trust regions of probabilities.

Elementwise like those of `losses.py`, with their papers' coefficients as defaults. R is the probability ratio of a
whole completion, r that of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatpeak.functional.losses import sequence_importance_ratio, unclipped_surrogate

__all__ = [
    "beyond_kl",
    "beyond_total_variation",
    "clipped_geometric_ratio",
    "dppo_kl",
    "dppo_tv",
    "gmpo",
    "sapo",
    "topr",
    "vespo",
]


def sapo(
    ratio: Tensor, advantages: Tensor, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with tau by the sign of A. SAPO, Gao et al. 2025, arXiv 2511.20347.

    A soft gate in place of the clip: the gradient is the surrogate's at r = 1 and falls off smoothly on both sides.
    """
    tau = _by_sign(advantages, temperature_positive, temperature_negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages


def _by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """One of two numbers for each token, in the dtype of the advantages; torch.where of two numbers has float32."""
    return torch.where(advantages > 0, advantages.new_tensor(positive), advantages.new_tensor(negative))


def vespo(
    logprobs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    *,
    shape_positive: float = 2.0,
    rate_positive: float = 3.0,
    shape_negative: float = 3.0,
    rate_negative: float = 2.0,
) -> Tensor:
    """-stopgrad(phi(R)) A log p, phi(R) = R^k exp(c (1 - R)). VESPO, Shen et al. 2026, arXiv 2602.10693.

    R is the whole completion's probability ratio, k the shape and c the rate, by the sign of A; phi(1) = 1.
    """
    shape = _by_sign(advantages, shape_positive, shape_negative)
    rate = _by_sign(advantages, rate_positive, rate_negative)
    kernel = torch.exp(shape * ratio.detach().clamp(min=1e-8).log() + rate * (1 - ratio.detach()))
    return -kernel * advantages * logprobs


def topr(logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    """-A log p where A > 0, -stopgrad(min(R, 1)) A log p elsewhere. TOPR, Le Roux et al. 2025, arXiv 2503.14286.

    R is the whole completion's probability ratio: a bad answer that the policy would hardly give is left alone.
    """
    return -torch.where(advantages > 0, 1.0, ratio.clamp(max=1).detach()) * advantages * logprobs


def clipped_geometric_ratio(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    sequence_T: Tensor,
    num: int,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """exp(mean_t l_it) of log-ratios l, at most clip_high where A > 0 and at least -clip_low elsewhere; see `gmpo`."""
    log_ratio_T = logprobs_T - old_logprobs_T
    bounded_T = torch.where(advantages_T > 0, log_ratio_T.clamp(max=clip_high), log_ratio_T.clamp(min=-clip_low))
    return sequence_importance_ratio(bounded_T, torch.zeros_like(bounded_T), sequence_T, num)


def gmpo(ratio: Tensor, advantages: Tensor) -> Tensor:
    """-s A, with s the geometric mean of clipped token ratios. GMPO, Zhao et al. 2025, arXiv 2507.20673, equation 4."""
    return unclipped_surrogate(ratio, advantages)


def dppo_tv(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, threshold_low: float = 0.15, threshold_high: float = 0.15
) -> Tensor:
    """-r A, without a gradient where p - p_old has passed a threshold in the direction of A. DPPO, Qi et al. 2026.

    The change of the token's own probability (arXiv 2602.04879, binary total variation) takes the place of the ratio,
    by which PPO stops rare tokens early and frequent ones late. The ratio is the token's.
    """
    beyond = beyond_total_variation(
        logprobs, ratio, advantages, threshold_low=threshold_low, threshold_high=threshold_high
    )
    return torch.where(beyond, ratio.detach(), ratio) * -advantages


def dppo_kl(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, threshold_low: float = 0.05, threshold_high: float = 0.05
) -> Tensor:
    """The same with the KL of the old to the new policy over "this token" and "any other". DPPO, Qi et al. 2026."""
    beyond = beyond_kl(logprobs, ratio, advantages, threshold_low=threshold_low, threshold_high=threshold_high)
    return torch.where(beyond, ratio.detach(), ratio) * -advantages


@torch.no_grad()
def beyond_total_variation(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, threshold_low: float = 0.15, threshold_high: float = 0.15
) -> Tensor:
    """bool: p - p_old > threshold_high where A > 0, < -threshold_low elsewhere; p_old = p / r."""
    change = logprobs.exp() * (1 - 1 / ratio)
    return torch.where(advantages > 0, change > threshold_high, change < -threshold_low)


@torch.no_grad()
def beyond_kl(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, threshold_low: float = 0.05, threshold_high: float = 0.05
) -> Tensor:
    """bool: q ln(q / p) + (1 - q) ln((1 - q) / (1 - p)) is above a threshold, and p has moved from q = p_old as A
    pushes."""
    new = logprobs.exp()
    old = (new / ratio).clamp(max=1)
    others = torch.xlogy(1 - old, (1 - old) / (1 - new).clamp(min=1e-8))
    divergence = others - old * ratio.log()
    rises = (ratio > 1) & (divergence > threshold_high)
    falls = (ratio < 1) & (divergence > threshold_low)
    return torch.where(advantages > 0, rises, falls)
