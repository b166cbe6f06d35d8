"""Importance ratios and per-token policy losses to minimize, elementwise: the caller weights and sums.

Ratios compare full-vocabulary log-probabilities at the sampling temperature. On-policy every ratio is 1: a surrogate
has the value -A and the gradient of -A log p, so a loss near 0 does not mean a gradient near 0. A recipe chooses from
the table in `policy_losses.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "capped_policy_loss",
    "clipped_surrogate",
    "frozen_policy_loss",
    "importance_ratio",
    "policy_gradient",
    "reweighted_policy_loss",
    "sequence_importance_ratio",
    "truncated_policy_gradient",
    "unclipped_surrogate",
]

LOG_RATIO_LIMIT = 20.0
"""Limit of log-ratios: exp of a larger one could overflow, and a ratio above 4.9e8 is useless as an estimate."""


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """r = exp(log p - log p_old), with the log-ratio clamped at +-20; beyond the clamp the gradient is 0."""
    return torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def sequence_importance_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, sequence_T: Tensor, num: int) -> Tensor:
    """s_i = exp(mean_t (log p_it - log p_old,it)), assigned to each token of completion i. GSPO, Zheng et al. 2025.

    `sequence_T` is the completion of each token, 0 .. `num` - 1; completions must be whole. The mean log-ratio is
    clamped at +-20. Differentiable: d s_i / d log p_it = s_i / len_i.
    """
    log_ratios_T = logprobs_T - old_logprobs_T
    sums_N = log_ratios_T.new_zeros(num).index_add(0, sequence_T, log_ratios_T)
    lengths_N = log_ratios_T.new_zeros(num).index_add(0, sequence_T, torch.ones_like(log_ratios_T))
    means_N = sums_N / lengths_N.clamp(min=1)
    # Not means_N[sequence_T]: its backward pass sums repeated rows in an undefined order.
    return torch.exp(means_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).index_select(0, sequence_T)


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p. REINFORCE, Williams 1992."""
    return -advantages * logprobs


def unclipped_surrogate(ratio: Tensor, advantages: Tensor) -> Tensor:
    """-r A: the importance-weighted policy gradient without a clip."""
    return -ratio * advantages


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """-min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A). PPO, Schulman et al. 2017; unequal sides, Yu et al. 2025.

    With `dual_clip` c > 1 the loss is at most -c A if A < 0 (Ye et al. 2020); PPO leaves r unbounded there.
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}: give distances from 1, at least 0")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip}: it bounds ratios above 1, so give more than 1 (3 is usual)")
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def truncated_policy_gradient(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, cap: float, floor: float = 0.0
) -> Tensor:
    """-stopgrad(clamp(r, floor, cap)) A log p. CISPO, MiniMax 2025: every token keeps a gradient.

    `cap` and `floor` are values of the ratio, not distances from 1: a cap below 1 scales down even the on-policy
    gradient.
    """
    if not 0 <= floor < cap:
        raise ValueError(
            f"cap={cap}, floor={floor}: each bounds the ratio itself, so give 0 <= floor < cap (5 is usual)"
        )
    return -ratio.clamp(floor, cap).detach() * advantages * logprobs


def frozen_policy_loss(logprobs_T: Tensor, coefficients_T: Tensor) -> Tensor:
    """c_t log p_t, with weights c_t as if the perturbed policy had drawn the same actions ("reuse").

    Its Hessian omits sum_t c_t grad log p_t grad log p_t^T. On a softmax bandit with centred advantages the remaining
    Hessian is 0.
    """
    return coefficients_T * logprobs_T


def reweighted_policy_loss(
    logprobs_T: Tensor,
    first_logprobs_T: Tensor,
    coefficients_T: Tensor,
    *,
    sequence_T: Tensor | None = None,
    num_sequences: int = 0,
) -> Tensor:
    """c_t p_t / p_t^first: the importance-weighted loss with the clip mask of the first pass ("importance").

    It equals the surrogate -r A with r = p / p_old for all tokens that the first pass did not clip. With `sequence_T`
    (int64 [T], completions 0 .. num_sequences - 1) the ratio is each completion's geometric mean (GSPO).
    """
    if sequence_T is None:
        return coefficients_T * importance_ratio(logprobs_T, first_logprobs_T)
    return coefficients_T * sequence_importance_ratio(logprobs_T, first_logprobs_T, sequence_T, num_sequences)


def capped_policy_loss(
    logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, *, cap: float, floor: float = 0.0
) -> Tensor:
    """-A r between floor and cap, -A cap log p above: the gradient of CISPO's loss, with the matching curvature.

    `truncated_policy_gradient` detaches the ratio, so its second derivative omits the derivative of the ratio.
    """
    bounded_T = ratio_T.detach().clamp(floor, cap)
    return torch.where(bounded_T == ratio_T, -ratio_T * advantages_T, -bounded_T * advantages_T * logprobs_T)
