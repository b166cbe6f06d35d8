"""A custom policy loss and a custom advantage: two functions of tensors, named by a recipe.

Run it to compare the loss and its gradient with PPO's, without a model:

    python examples/custom_loss.py

In a recipe, name the functions by their file (or module):

    extends: flatpeak:demo
    objective: {loss: examples/custom_loss.py:simple_policy_optimization, arguments: {epsilon: 0.2}}
    advantage: {function: examples/custom_loss.py:max_rl}

In Python, pass the functions themselves:

    flatpeak.train(config, loss=simple_policy_optimization, advantage=max_rl)

Both are tested on small tensors before a run begins; an error names the function and the fix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatpeak.functional import PolicyLoss, clipped_surrogate


def simple_policy_optimization(
    logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any, *, epsilon: float = 0.2
) -> Tensor:
    """-r A + |A| (r - 1)^2 / (2 epsilon), lowest at r = 1 +- epsilon. SPO, Xie et al. 2025 (2401.16025).

    It returns one loss per token. `config` is the recipe's section `objective`; `epsilon` is one of its `arguments`.
    """
    return advantages_T.abs() * (ratio_T - 1).square() / (2 * epsilon) - ratio_T * advantages_T


def is_beyond(
    logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any, *, epsilon: float = 0.2
) -> Tensor:
    """Whether a token's ratio has passed the minimum, so that its gradient points back."""
    return (ratio_T - 1) * advantages_T.sign() > epsilon


spo_with_statistics = PolicyLoss(value=simple_policy_optimization, clipped=is_beyond)
"""The same loss, with `policy/clip_fraction` counted: objective.loss=examples/custom_loss.py:spo_with_statistics."""


def max_rl(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """(r - mean) / mean within each group, for rewards of 0 and 1. MaxRL, Tajwar et al. 2026 (2602.02710).

    A missing reward is False in `valid_PG` and 0 in `rewards_PG`; it must not count in the mean.
    """
    count_P1 = valid_PG.sum(-1, keepdim=True).clamp(min=1)
    mean_P1 = (rewards_PG * valid_PG).sum(-1, keepdim=True) / count_P1
    return (rewards_PG - mean_P1) / mean_P1.clamp(min=1e-6)


def main() -> None:
    """Print both losses and their gradients by the ratio, for a token with advantage 1."""
    ratio_T = torch.tensor([0.6, 0.8, 1.0, 1.1, 1.2, 1.4], requires_grad=True)
    advantages_T = torch.ones(6)
    losses = {
        "PPO": clipped_surrogate(ratio_T, advantages_T, clip_low=0.2, clip_high=0.2),
        "SPO": simple_policy_optimization(ratio_T.log(), ratio_T, advantages_T, None),
    }
    for name, loss_T in losses.items():
        (gradient_T,) = torch.autograd.grad(loss_T.sum(), ratio_T)
        print(
            f"{name}: "
            + ", ".join(f"r={r:.1f} {g:+.2f}" for r, g in zip(ratio_T.tolist(), gradient_T.tolist(), strict=True))
        )


if __name__ == "__main__":
    main()
