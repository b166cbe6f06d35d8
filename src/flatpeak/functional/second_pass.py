"""What a second pass differentiates in place of the policy loss, so that its gradient at theta is the first pass's.

Both are given by each token's coefficient c_t = d loss / d log p_t of the first pass. Tokens that were clipped there
have c_t = 0, so the clip mask is frozen by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatpeak.functional.losses import importance_ratio, sequence_importance_ratio


def frozen_policy_loss(logprobs_T: Tensor, coefficients_T: Tensor) -> Tensor:
    """c_t log p_t: the same actions with the same weights, as if drawn from the perturbed policy ("reuse").

    Its Hessian leaves out sum_t c_t grad log p_t grad log p_t^T; on a softmax bandit with centred advantages what
    remains is 0.
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
    """c_t p_t / p_t^first: the importance-weighted loss with the first pass's clip mask ("importance").

    For a surrogate -r A with r = p / p_old it is that surrogate, wherever the first pass did not clip. With
    `sequence_T` (int64 [T], completions 0 .. num_sequences - 1) the ratio is each completion's geometric mean (GSPO).
    """
    if sequence_T is None:
        return coefficients_T * importance_ratio(logprobs_T, first_logprobs_T)
    return coefficients_T * sequence_importance_ratio(logprobs_T, first_logprobs_T, sequence_T, num_sequences)


def capped_policy_loss(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, *, cap: float) -> Tensor:
    """-A r up to the cap, -A cap log p above it: the gradient of CISPO's loss, and the curvature that belongs to it.

    `truncated_policy_gradient` detaches the ratio, so that its own second derivative says nothing about it.
    """
    return torch.where(ratio_T.detach() > cap, -cap * advantages_T * logprobs_T, -ratio_T * advantages_T)
