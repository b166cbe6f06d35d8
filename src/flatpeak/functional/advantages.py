"""Advantages of completions from the rewards of their groups."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["std", "batch_std", "none"]


def group_advantages(
    rewards_PG: Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    eps: float = 1e-6,
    valid_PG: Tensor | None = None,
) -> Tensor:
    """A_i = (r_i - b_i) / (s + eps) over a group's valid rewards; 0 if `valid_PG` is False. Same dtype, [P, G].

    Baselines: `mean` is b = mean(r) (GRPO, Shao et al. 2024); `leave_one_out` is b_i = the mean of the others (RLOO,
    Ahmadian et al. 2024); `none` is the raw reward (REINFORCE) and needs `scale="none"`.
    Scales, unbiased: `std` of the group; `batch_std` of all valid rewards of the batch; `none` (Dr. GRPO, Liu et al.
    2025). With a group baseline, equal rewards or fewer than two valid rewards give advantages of exactly 0.

    Raises ValueError for G = 1 under a group baseline, a scale without a baseline, or a valid infinite or NaN reward.
    """
    _check(rewards_PG, baseline, scale)
    valid_PG = _validity(rewards_PG, valid_PG)
    rewards_PG = rewards_PG.masked_fill(~valid_PG, 0.0)
    if not bool(rewards_PG.isfinite().all()):
        raise ValueError("a valid reward is infinite or NaN: mark missing rewards False in valid_PG")
    if baseline == "none":
        return rewards_PG

    num_valid_P1 = valid_PG.sum(-1, keepdim=True).to(rewards_PG.dtype)
    centred_PG = _centred(rewards_PG, valid_PG, num_valid_P1)
    advantages_PG = centred_PG
    if baseline == "leave_one_out":
        # r_i - (S - r_i) / (n - 1) = n / (n - 1) * (r_i - S / n).
        advantages_PG = centred_PG * (num_valid_P1 / (num_valid_P1 - 1).clamp(min=1))
    if scale == "std":
        variance_P1 = centred_PG.square().sum(-1, keepdim=True) / (num_valid_P1 - 1).clamp(min=1)
        advantages_PG = advantages_PG / (variance_P1.sqrt() + eps)
    elif scale == "batch_std":
        advantages_PG = advantages_PG / (_batch_std(rewards_PG[valid_PG]) + eps)
    # Test the rewards for equality, not their deviations: the mean of equal floats can differ from them by rounding,
    # and a division by a tiny std would amplify that.
    lowest_P1 = rewards_PG.masked_fill(~valid_PG, torch.inf).amin(-1, keepdim=True)
    highest_P1 = rewards_PG.masked_fill(~valid_PG, -torch.inf).amax(-1, keepdim=True)
    return advantages_PG.masked_fill(~(valid_PG & (highest_P1 > lowest_P1)), 0.0)


def returns_to_go(rewards_PGK: Tensor, rest_PG: Tensor) -> Tensor:
    """R_ik = sum_{j >= k} r_ij + rest_i: the reward of turn k of an episode and of all that follows it, [P, G, K].

    r_ij is the reward of turn j, 0 beyond an episode's last turn, and rest_i what the episode is given at its end. The
    advantage of turn k is `group_advantages` of R_ik over the episodes of the group that have a turn k: the reward to
    come of the policy gradient theorem (Sutton et al. 1999) with a group's baseline. GTPO (Ding et al. 2025, arXiv
    2511.14846) also takes normalized returns of turns, discounted. Rewards are added from the last turn on, so that
    equal rewards to come give equal returns, bit for bit.
    """
    return rewards_PGK.flip(-1).cumsum(-1).flip(-1) + rest_PG[..., None]


def _check(rewards_PG: Tensor, baseline: Baseline, scale: Scale) -> None:
    if baseline not in get_args(Baseline):
        raise ValueError(f"baseline={baseline!r}: choose one of {', '.join(get_args(Baseline))}")
    if scale not in get_args(Scale):
        raise ValueError(f"scale={scale!r}: choose one of {', '.join(get_args(Scale))}")
    if rewards_PG.ndim != 2 or not rewards_PG.is_floating_point():
        raise ValueError(f"rewards_PG is {rewards_PG.dtype} {list(rewards_PG.shape)}: give floats of shape [P, G]")
    if baseline == "none" and scale != "none":
        raise ValueError(f'baseline="none" with scale={scale!r}: raw rewards are not standardized, give scale="none"')
    if baseline != "none" and rewards_PG.shape[1] < 2:
        raise ValueError(
            f"group size {rewards_PG.shape[1]} with baseline={baseline!r}: a group baseline needs at least 2 "
            'completions per prompt; otherwise give baseline="none", scale="none"'
        )


def _validity(rewards_PG: Tensor, valid_PG: Tensor | None) -> Tensor:
    if valid_PG is None:
        return torch.ones_like(rewards_PG, dtype=torch.bool)
    if valid_PG.dtype != torch.bool or valid_PG.shape != rewards_PG.shape:
        raise ValueError(
            f"valid_PG is {valid_PG.dtype} {list(valid_PG.shape)}: give torch.bool {list(rewards_PG.shape)}"
        )
    return valid_PG


def _centred(rewards_PG: Tensor, valid_PG: Tensor, num_valid_P1: Tensor) -> Tensor:
    """Valid rewards minus their group's mean; 0 elsewhere."""
    mean_P1 = rewards_PG.sum(-1, keepdim=True) / num_valid_P1.clamp(min=1)
    return (rewards_PG - mean_P1).masked_fill(~valid_PG, 0.0)


def _batch_std(rewards_N: Tensor) -> Tensor:
    """The unbiased standard deviation; 0 for fewer than two rewards."""
    return rewards_N.std(correction=1) if rewards_N.numel() > 1 else rewards_N.new_zeros(())
