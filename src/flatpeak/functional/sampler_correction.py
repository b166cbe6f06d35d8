"""Bounded importance weights for tokens that a policy other than the trained one has sampled.

Let mu be the sampler and p_old the trainer's policy before the step's updates. The weight w = p_old / mu gives
E_mu[w f] = E_p_old[f]. mu differs from p_old if the sampler rounds differently (another engine or dtype) or has older
weights. The weights multiply the policy loss as constants; the ratio p / p_old and its clip do not change.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flatpeak.functional.losses import LOG_RATIO_LIMIT

__all__ = [
    "effective_sample_size",
    "masked_importance_weights",
    "over_completions",
    "sequence_probability_ratio",
    "truncated_importance_weights",
]


def sequence_probability_ratio(logprobs_T: Tensor, sampler_logprobs_T: Tensor, sequence_T: Tensor, num: int) -> Tensor:
    """R_i = exp(sum_t (log p_it - log mu_it)): the whole completion's probability ratio, for each of its tokens.

    `sequence_T` is the completion of each token, 0 .. `num` - 1; completions must be whole. The sum is clamped at +-20.
    Unlike GSPO's ratio (`sequence_importance_ratio`) it is not a mean, so its variance grows with the length.
    """
    log_ratios_T = logprobs_T - sampler_logprobs_T
    sums_N = log_ratios_T.new_zeros(num).index_add(0, sequence_T, log_ratios_T)
    return torch.exp(sums_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).index_select(0, sequence_T)


def truncated_importance_weights(ratio: Tensor, *, cap: float, floor: float = 0.0) -> Tensor:
    """stopgrad(clamp(R, floor, cap)): the cap bounds the variance, at the price of a bias towards the sampler.

    Truncated importance sampling, Ionides 2008; for a sampler that disagrees with the trainer, Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training" (https://fengyao.notion.site/off-policy-rl).
    """
    return ratio.detach().clamp(floor, _checked(cap))


def masked_importance_weights(ratio: Tensor, *, cap: float, floor: float = 0.0) -> Tensor:
    """stopgrad(R) if floor <= R <= cap, else 0: drops tokens or completions on which the two policies disagree a lot.

    At token level this is IcePop (Zhao et al. 2025, floor 0.5 and cap 5); at sequence level it is the masked importance
    sampling of Liu, Li et al. 2025, "When Speed Kills Stability" (https://richardli.xyz/rl-collapse).
    """
    ratio = ratio.detach()
    return ratio.masked_fill((ratio < floor) | (ratio > _checked(cap)), 0.0)


def over_completions(values_T: Tensor, sequence_T: Tensor, num: int, *, by: Literal["sum", "mean", "max"]) -> Tensor:
    """The sum, mean or maximum of each completion's values, for each of its tokens."""
    zeros_N = values_T.new_zeros(num)
    if by == "max":
        lowest_N = torch.full_like(zeros_N, -torch.inf)
        return lowest_N.scatter_reduce(0, sequence_T, values_T, "amax").index_select(0, sequence_T)
    sums_N = zeros_N.index_add(0, sequence_T, values_T)
    lengths_N = zeros_N.index_add(0, sequence_T, torch.ones_like(values_T)).clamp(min=1)
    return (sums_N if by == "sum" else sums_N / lengths_N).index_select(0, sequence_T)


def effective_sample_size(total: float, squares: float, count: int) -> float:
    """(sum w)^2 / (count sum w^2), the share of samples that as many weights of 1 would be worth. Kish 1965."""
    return total**2 / (count * squares) if squares else 0.0


def _checked(cap: float) -> float:
    if cap < 1:
        raise ValueError(f"cap={cap}: equal policies have ratio 1, so give at least 1 (2 is usual)")
    return cap
