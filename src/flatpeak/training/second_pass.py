"""The objective of an update's second pass, by ratio mode: what the first pass freezes, and what is made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatpeak import functional as F
from flatpeak.gradreg.config import RatioMode
from flatpeak.training.objective import Objective
from flatpeak.types import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """What a micro-batch's first pass leaves for its second."""

    logprobs_T: Tensor
    coefficients_T: Tensor
    """d policy loss / d log-probability of each token, before weights."""
    capped_T: Tensor
    """Where CISPO's cap had taken the ratio's place."""


def freeze(objective: Objective, logprobs_T: Tensor, batch: Batch) -> Frozen:
    """Record a first pass; costs no pass through the model."""
    leaf_T = logprobs_T.detach().requires_grad_()
    with torch.enable_grad():
        (coefficients_T,) = torch.autograd.grad(objective.policy_loss(leaf_T, batch).sum(), leaf_T)
    capped = objective.config.loss == "truncated_policy_gradient"
    return Frozen(
        logprobs_T=leaf_T.detach(),
        coefficients_T=coefficients_T,
        capped_T=objective.clipped(leaf_T.detach(), batch) if capped else torch.zeros_like(leaf_T, dtype=torch.bool),
    )


def second_pass_loss(
    objective: Objective, frozen: Frozen, logprobs_T: Tensor, entropy_T: Tensor, batch: Batch, *, mode: RatioMode
) -> Tensor:
    """The loss of every token in the second pass. KL and entropy terms are evaluated as they are written."""
    if mode == "importance_clipped":
        loss_T = _evaluated_again(objective, logprobs_T, batch)
    else:
        loss_T = F.frozen_policy_loss(logprobs_T, frozen.coefficients_T)
        if mode == "importance":
            loss_T = torch.where(frozen.capped_T, loss_T, _reweighted(objective, frozen, logprobs_T, batch))
    others_T = objective.other_terms(logprobs_T, entropy_T, batch)
    return loss_T if others_T is None else loss_T + others_T


def _evaluated_again(objective: Objective, logprobs_T: Tensor, batch: Batch) -> Tensor:
    if objective.config.loss != "truncated_policy_gradient":
        return objective.policy_loss(logprobs_T, batch)
    advantages_T = batch.advantages_N.index_select(0, batch.sequence_T)
    ratio_T = objective.ratio(logprobs_T, batch)
    return F.capped_policy_loss(logprobs_T, ratio_T, advantages_T, cap=objective.config.cap)


def _reweighted(objective: Objective, frozen: Frozen, logprobs_T: Tensor, batch: Batch) -> Tensor:
    if objective.config.ratio == "token":
        return F.reweighted_policy_loss(logprobs_T, frozen.logprobs_T, frozen.coefficients_T)
    return F.reweighted_policy_loss(
        logprobs_T,
        frozen.logprobs_T,
        frozen.coefficients_T,
        sequence_T=batch.sequence_T,
        num_sequences=len(batch.lengths_N),
    )
