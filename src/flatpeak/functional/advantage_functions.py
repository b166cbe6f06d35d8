"""Advantages of papers since GRPO that are more than a baseline and a scale, and what is done with any advantages.

Each function takes a step's rewards [P, G], and by name whatever else it needs: see `ADVANTAGE_INPUTS`. Rewards are 0
where `valid_PG` is False, and so are the advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb
from typing import Final

import torch
from torch import Tensor

from flatpeak.functional.advantages import group_advantages

__all__ = ["gdpo", "limit_spreads", "max_rl", "opo", "pass_at_k_advantages", "remax", "whiten"]

ADVANTAGE_INPUTS: Final = ("lengths_PG", "parts", "part_weights", "old_logprobs_PGL", "greedy_P")
"""Values that an advantage function may ask for by name, beside the rewards.

- `lengths_PG`: the trained tokens of each completion.
- `parts`, `part_weights`: the reward's components [P, G], 0 where missing, and their weights, by name.
- `old_logprobs_PGL`: the sampler's log-probability of each token that the policy sampled, 0 beyond a completion's end.
- `greedy_P`: the reward of a greedy completion of each prompt, NaN where it is missing.
"""


def opo(rewards_PG: Tensor, valid_PG: Tensor, lengths_PG: Tensor) -> Tensor:
    """r_i - sum_j len_j r_j / sum_j len_j. OPO, Hao et al. 2025, arXiv 2505.23585.

    The baseline of least variance where a completion's squared gradient grows with its length.
    """
    lengths_PG = lengths_PG.to(rewards_PG.dtype) * valid_PG
    baseline_P1 = (lengths_PG * rewards_PG).sum(-1, keepdim=True) / lengths_PG.sum(-1, keepdim=True).clamp(min=1)
    return _in_unequal_groups(rewards_PG - baseline_P1, rewards_PG, valid_PG)


def remax(rewards_PG: Tensor, valid_PG: Tensor, greedy_P: Tensor) -> Tensor:
    """r_i - r(greedy completion of the same prompt). ReMax, Li et al. 2023, arXiv 2310.10505."""
    return (rewards_PG - greedy_P[:, None]).masked_fill(~valid_PG | greedy_P[:, None].isnan(), 0.0)


def max_rl(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """(r_i - mean) / mean, 0 where the mean is not above 0, for rewards >= 0. MaxRL, 2026, arXiv 2602.02710."""
    centred_PG = group_advantages(rewards_PG, scale="none", valid_PG=valid_PG)
    mean_P1 = (rewards_PG * valid_PG).sum(-1, keepdim=True) / valid_PG.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mean_P1 > 0, centred_PG / mean_P1.clamp(min=1e-6), 0.0)


def pass_at_k_advantages(rewards_PG: Tensor, valid_PG: Tensor, *, k: int) -> Tensor:
    """(mean over the k-subsets with i of their best reward - that over all k-subsets) / their standard deviation.

    Pass@k training, Chen et al. 2025, arXiv 2508.10751, in closed form; for any rewards, not just 0 and 1. A group with
    fewer than k valid rewards has no advantages. Raises ValueError unless 1 <= k < G.
    """
    if not 1 <= k < rewards_PG.shape[1]:
        raise ValueError(f"k={k} with groups of {rewards_PG.shape[1]}: give at least 1 and less than the group's size")
    advantages_PG = torch.zeros_like(rewards_PG)
    for rewards_G, valid_G, advantages_G in zip(rewards_PG, valid_PG, advantages_PG, strict=True):
        if int(valid_G.sum()) > k:
            advantages_G[valid_G] = _best_of_subsets(rewards_G[valid_G].double(), k).to(rewards_PG.dtype)
    return advantages_PG


def _best_of_subsets(rewards_N: Tensor, k: int) -> Tensor:
    """The advantages of one group's valid rewards, by their order: the best of a subset is the highest rank in it.

    They do not change with a constant in all rewards, which is subtracted for the sake of the variance's digits.
    """
    number = len(rewards_N)
    sorted_N, order_N = rewards_N.sort()
    sorted_N = sorted_N - sorted_N[0]
    best_N = rewards_N.new_tensor([comb(rank, k - 1) / comb(number, k) for rank in range(number)])
    mean, square = (best_N * sorted_N).sum(), (best_N * sorted_N.square()).sum()
    deviation = (square - mean.square()).clamp(min=0).sqrt()
    if bool(sorted_N[0] == sorted_N[-1]) or not deviation > 0:
        return torch.zeros_like(rewards_N)
    others = comb(number - 1, k - 1)
    own_N = rewards_N.new_tensor([comb(rank, k - 1) / others for rank in range(number)])
    above_N = rewards_N.new_tensor(
        [comb(rank - 1, k - 2) / others if rank and k > 1 else 0.0 for rank in range(number)]
    )
    higher_N = (above_N * sorted_N).flip(0).cumsum(0).flip(0) - above_N * sorted_N
    return torch.empty_like(rewards_N).scatter(0, order_N, (own_N * sorted_N + higher_N - mean) / deviation)


def gdpo(
    rewards_PG: Tensor,
    valid_PG: Tensor,
    parts: Mapping[str, Tensor],
    part_weights: Mapping[str, float],
    *,
    eps: float = 1e-6,
) -> Tensor:
    """sum_k w_k (r_k - mean) / (std + eps), each component by itself. GDPO, 2026, arXiv 2601.05242.

    GRPO standardizes the sum, where combinations of components with equal sums look alike. The paper then whitens over
    the batch: `advantage.whiten=completions`. Raises ValueError without a component that has a weight.
    """
    weights = {name: weight for name, weight in part_weights.items() if weight and name in parts}
    if not weights:
        raise ValueError("GDPO needs reward components with weights: name them under rewards")
    return torch.stack(
        [weight * group_advantages(parts[name], eps=eps, valid_PG=valid_PG) for name, weight in weights.items()]
    ).sum(0)


def limit_spreads(advantages_PG: Tensor, valid_PG: Tensor, spreads: float) -> Tensor:
    """Advantages bounded by so many standard deviations of their group's."""
    count_P1 = valid_PG.sum(-1, keepdim=True)
    mean_P1 = advantages_PG.sum(-1, keepdim=True) / count_P1.clamp(min=1)
    squares_P1 = ((advantages_PG - mean_P1) * valid_PG).square().sum(-1, keepdim=True)
    bound_P1 = spreads * (squares_P1 / (count_P1 - 1).clamp(min=1)).sqrt()
    return advantages_PG.clamp(-bound_P1, bound_P1)


def whiten(values: Tensor, counted: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(x - mean) / (std + eps) over what is `counted` (bool); 0 elsewhere, and everywhere if those are equal."""
    chosen = values[counted]
    if len(chosen) < 2 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(values)
    return ((values - chosen.mean()) / (chosen.std() + eps)).masked_fill(~counted, 0.0)


def _in_unequal_groups(advantages_PG: Tensor, rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """Exactly 0 where a reward is missing and in groups of equal rewards, whatever a mean rounds to."""
    lowest_P1 = rewards_PG.masked_fill(~valid_PG, torch.inf).amin(-1, keepdim=True)
    highest_P1 = rewards_PG.masked_fill(~valid_PG, -torch.inf).amax(-1, keepdim=True)
    return advantages_PG.masked_fill(~(valid_PG & (highest_P1 > lowest_P1)), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageFunction:
    """A function that a recipe can choose by name."""

    value: Callable[..., Tensor]
    compares: bool = True
    """Whether it compares the completions of a group: one of equal rewards then teaches nothing."""


ADVANTAGES: dict[str, AdvantageFunction] = {
    "opo": AdvantageFunction(value=opo),
    "remax": AdvantageFunction(value=remax, compares=False),
    "max_rl": AdvantageFunction(value=max_rl),
    "pass_at_k": AdvantageFunction(value=pass_at_k_advantages),
    "gdpo": AdvantageFunction(value=gdpo),
}
"""The values of `advantage.function`, by name."""
