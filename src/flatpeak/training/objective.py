"""The per-token loss that a recipe describes: a policy loss, and KL and entropy terms beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatpeak import functional as F
from flatpeak.training.config import KLConfig, ObjectiveConfig
from flatpeak.types import Batch

KL_ESTIMATORS = {"k1": F.kl_k1, "k2": F.kl_k2, "k3": F.kl_k3}

PolicyLoss = Callable[[Tensor, Tensor, Tensor, ObjectiveConfig], Tensor]
"""(logprobs_T, ratio_T, advantages_T, config) -> loss_T."""

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "policy_gradient": lambda logprobs, ratio, advantages, config: F.policy_gradient(logprobs, advantages),
    "unclipped_surrogate": lambda logprobs, ratio, advantages, config: F.unclipped_surrogate(ratio, advantages),
    "clipped_surrogate": lambda logprobs, ratio, advantages, config: F.clipped_surrogate(
        ratio, advantages, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip
    ),
    "truncated_policy_gradient": lambda logprobs, ratio, advantages, config: F.truncated_policy_gradient(
        logprobs, ratio, advantages, cap=config.cap
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStatistics:
    """Sums over the tokens of a micro-batch, so that a step's figures cover the whole step."""

    tokens: int
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor | None
    max_ratio_gap: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """loss_T = policy_loss_T + kl.coefficient * KL_T - entropy_coefficient * entropy_T."""

    config: ObjectiveConfig
    kl: KLConfig

    @property
    def needs_all_tokens(self) -> bool:
        """Whether tokens without advantage have a gradient too."""
        return self.kl_in_loss or self.config.entropy_coefficient != 0

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl.coefficient > 0 and self.kl.placement == "loss"

    def __call__(self, logprobs_T: Tensor, entropy_T: Tensor, batch: Batch) -> tuple[Tensor, TokenStatistics]:
        """The loss of every token, to be weighted and summed, and what is logged of it."""
        advantages_T = batch.advantages_N.index_select(0, batch.sequence_T)
        token_ratio_T = F.importance_ratio(logprobs_T, batch.old_logprobs_T)
        ratio_T = token_ratio_T if self.config.ratio == "token" else self._sequence_ratio(logprobs_T, batch)
        loss_T = POLICY_LOSSES[self.config.loss](logprobs_T, ratio_T, advantages_T, self.config)
        kl_T = None
        if batch.reference_logprobs_T is not None:
            kl_T = KL_ESTIMATORS[self.kl.estimator](logprobs_T, batch.reference_logprobs_T)
            if self.kl_in_loss:
                loss_T = loss_T + self.kl.coefficient * (ratio_T * kl_T if self.kl.ratio_weighted else kl_T)
        if self.config.entropy_coefficient:
            loss_T = loss_T - self.config.entropy_coefficient * entropy_T
        with torch.no_grad():
            statistics = TokenStatistics(
                tokens=len(logprobs_T),
                entropy=entropy_T.sum(),
                ratio=ratio_T.sum(),
                clipped=self._clipped(ratio_T, advantages_T).sum(),
                kl=None if kl_T is None else kl_T.sum(),
                max_ratio_gap=(token_ratio_T - 1).abs().max() if len(logprobs_T) else torch.zeros(()),
            )
        return loss_T, statistics

    def _sequence_ratio(self, logprobs_T: Tensor, batch: Batch) -> Tensor:
        return F.sequence_importance_ratio(logprobs_T, batch.old_logprobs_T, batch.sequence_T, len(batch.lengths_N))

    def _clipped(self, ratio_T: Tensor, advantages_T: Tensor) -> Tensor:
        """The tokens whose policy gradient the clip takes away (or, for CISPO, caps)."""
        if self.config.loss == "truncated_policy_gradient":
            return ratio_T > self.config.cap
        if self.config.loss != "clipped_surrogate":
            return torch.zeros_like(ratio_T, dtype=torch.bool)
        above = (ratio_T > 1 + self.config.clip_high) & (advantages_T > 0)
        below = (ratio_T < 1 - self.config.clip_low) & (advantages_T < 0)
        if self.config.dual_clip is not None:
            below |= (ratio_T > self.config.dual_clip) & (advantages_T < 0)
        return above | below
