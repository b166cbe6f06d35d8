"""Bounded importance weights for tokens that were drawn by another policy than the one being trained.

With mu the sampler and p_old the trainer's policy before the step's updates, E_mu[w f] = E_p_old[f] for the weight
w = p_old / mu. A sampler that rounds differently (another engine, another dtype) or has older weights is such a mu. The
weights multiply the policy loss as constants, and leave the ratio p / p_old and its clip unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatpeak.functional.losses import LOG_RATIO_LIMIT

__all__ = ["masked_importance_weights", "sequence_probability_ratio", "truncated_importance_weights"]


def sequence_probability_ratio(logprobs_T: Tensor, sampler_logprobs_T: Tensor, sequence_T: Tensor, num: int) -> Tensor:
    """R_i = exp(sum_t (log p_it - log mu_it)), the ratio of the whole completion's probability, on each of its tokens.

    `sequence_T` gives the completion of each token, 0 .. `num` - 1; completions must be whole. The sum is clamped at
    +-20. Unlike GSPO's ratio (`sequence_importance_ratio`) it is not a mean, so its spread grows with the length.
    """
    log_ratios_T = logprobs_T - sampler_logprobs_T
    sums_N = log_ratios_T.new_zeros(num).index_add(0, sequence_T, log_ratios_T)
    return torch.exp(sums_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).index_select(0, sequence_T)


def truncated_importance_weights(ratio: Tensor, *, cap: float) -> Tensor:
    """stopgrad(min(R, cap)): where it truncates, it is biased towards the sampler, but the cap bounds its variance.

    Truncated importance sampling, Ionides 2008; for a sampler that disagrees with the trainer, Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training" (https://fengyao.notion.site/off-policy-rl).
    """
    return ratio.detach().clamp(max=_checked(cap))


def masked_importance_weights(ratio: Tensor, *, cap: float, floor: float = 0.0) -> Tensor:
    """stopgrad(R) where floor <= R <= cap, else 0: excludes tokens or completions on which the policies disagree a lot.

    At token level this is IcePop (Zhao et al. 2025, with floor 0.5 and cap 5), at sequence level the masked importance
    sampling of Liu, Li et al. 2025, "When Speed Kills Stability" (https://richardli.xyz/rl-collapse).
    """
    ratio = ratio.detach()
    return ratio.masked_fill((ratio < floor) | (ratio > _checked(cap)), 0.0)


def _checked(cap: float) -> float:
    if cap < 1:
        raise ValueError(f"cap={cap}: equal policies have ratio 1, give at least that (2 is usual)")
    return cap
