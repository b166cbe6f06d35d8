"""The per-token loss that a recipe describes: a policy loss, and KL and entropy terms beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flatpeak import functional as F
from flatpeak.functional.policy_losses import POLICY_LOSSES, PolicyLoss
from flatpeak.functional.token_weights import TokenWeights
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.types import Batch

KL_ESTIMATORS = {"k1": F.kl_k1, "k2": F.kl_k2, "k3": F.kl_k3}
CORRECTIONS = {"truncate": F.truncated_importance_weights, "mask": F.masked_importance_weights}


WeightFunction = Callable[[Mapping[str, Any]], TokenWeights]
"""The weights of a minibatch's trained tokens, of `TOKEN_WEIGHT_INPUTS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerStatistics:
    """Distance of the sampler's log-probabilities log mu from the trainer's log p, over the tokens of a micro-batch."""

    gap: Tensor
    """Sum of |log p - log mu|."""
    max_gap: Tensor
    kl: Tensor
    """Sum of the KL of the sampler to the trainer, by k3."""
    weight: Tensor | None
    """Sum of the importance weights; None where the sampler is not corrected."""
    squares: Tensor | None
    """Sum of their squares; likewise."""
    capped: Tensor | None
    """Tokens whose importance weight was above the cap; likewise."""
    by_depth: Tensor | None
    """[2, 4]: tokens of each quarter of their completions, and the sums of their gaps; likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStatistics:
    """Sums over the tokens of a micro-batch, so that a step's metrics cover the whole step."""

    tokens: int
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor | None
    max_ratio_gap: Tensor
    weight: Tensor | None = None
    """Sum of the minibatch's token weights; None where there are none."""
    sampler: SamplerStatistics | None = None
    """None where nothing was sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """loss_T = policy_loss_T + kl.coefficient * KL_T - entropy_coefficient * entropy_T."""

    config: ObjectiveConfig
    kl: KLConfig
    own_loss: PolicyLoss | None = None
    """The loss of the user's that `config.loss` names, where it is none of flatpeak's; see `user_functions`."""
    token_weights: WeightFunction | None = None
    """Weights of a minibatch's tokens; see `user_functions`."""

    @property
    def loss(self) -> PolicyLoss:
        """The policy loss that the recipe names."""
        return self.own_loss or POLICY_LOSSES[self.config.loss]

    @property
    def needs_all_tokens(self) -> bool:
        """Whether tokens without advantage have a gradient too."""
        beside = self.config.has_entropy or self.weighs_minibatches or self.loss.all_tokens
        return beside or (self.kl_in_loss and self.kl.groups == "all")

    @property
    def has_other_terms(self) -> bool:
        """Whether the loss has a KL or an entropy term beside the policy loss."""
        return self.kl_in_loss or self.config.has_entropy or self.token_weights is not None

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL penalty is subtracted from rewards or advantages."""
        return self.kl.coefficient > 0 and self.kl.placement != "loss"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl.coefficient > 0 and self.kl.placement == "loss"

    def without_regularizers(self) -> Objective:
        """The same without KL and entropy terms; itself where it has none."""
        if not self.has_other_terms:
            return self
        plain = self.config.model_copy(update={"entropy_coefficient": 0.0, "adaptive_entropy": None})
        return replace(self, config=plain, kl=self.kl.model_copy(update={"coefficient": 0.0}), token_weights=None)

    @property
    def weighs_minibatches(self) -> bool:
        """Whether the weights of tokens depend on a whole minibatch."""
        return self.token_weights is not None or self.config.sampler_correction.normalize

    def minibatch_weights(
        self, parts: Sequence[tuple[Batch, Tensor, Tensor]], *, seed: Callable[[], int]
    ) -> TokenWeights:
        """The weights of a minibatch's trained tokens; see `token_weight_inputs`. `seed` draws one."""
        weights = TokenWeights(policy_T=torch.cat([torch.ones_like(logprobs_T) for _, logprobs_T, _ in parts]))
        if self.token_weights is not None:
            weights = self.token_weights({**token_weight_inputs(parts, self.config), "seed": seed()})
        if not self.config.sampler_correction.normalize:
            return weights
        batches = [with_old_logprobs(batch, logprobs_T) for batch, logprobs_T, _ in parts]
        mean = torch.cat([self.correction(batch) for batch in batches]).double().mean()
        return replace(weights, policy_T=weights.policy_T / mean.clamp(min=1e-6).to(weights.policy_T.dtype))

    def adapted(self, metrics: Mapping[str, float], completions: int) -> Objective:
        """The objective of the next step: adaptive coefficients follow what a step of so many completions measured."""
        kl, config = self.kl, self.config
        if kl.adaptive is not None:
            # Before the updates and over all tokens, where that is known: k1 after them is of either sign.
            distance = metrics.get("rollout/kl_reference", metrics.get("policy/kl_reference", kl.adaptive.target))
            kl = kl.model_copy(update={"coefficient": kl.adaptive.next(kl.coefficient, distance, completions)})
        if config.adaptive_entropy is not None and "policy/entropy" in metrics:
            rule, entropy = config.adaptive_entropy, metrics["policy/entropy"]
            rule = rule.model_copy(update={"start": rule.next(entropy)})
            given = rule.start if entropy <= rule.target else 0.0
            config = config.model_copy(update={"adaptive_entropy": rule, "entropy_coefficient": given})
        return replace(self, kl=kl, config=config)

    def metrics(self) -> dict[str, float]:
        """The coefficients of this step, where they are adaptive."""
        kl = {} if self.kl.adaptive is None else {"kl/coefficient": self.kl.coefficient}
        if self.config.adaptive_entropy is None:
            return kl
        return kl | {"policy/entropy_coefficient": self.config.entropy_coefficient}

    def state(self) -> dict[str, Any]:
        """The adaptive coefficients, for a checkpoint; empty where there are none."""
        kl = {} if self.kl.adaptive is None else {"kl_coefficient": self.kl.coefficient}
        rule = self.config.adaptive_entropy
        return kl if rule is None else kl | {"entropy_coefficient": [self.config.entropy_coefficient, rule.start]}

    def loaded(self, state: Mapping[str, Any]) -> Objective:
        """The objective with the coefficients of such a `state`, where it adapts them; a fork may begin to."""
        kl, config, rule = self.kl, self.config, self.config.adaptive_entropy
        if kl.adaptive is not None and "kl_coefficient" in state:
            kl = kl.model_copy(update={"coefficient": state["kl_coefficient"]})
        if rule is not None and "entropy_coefficient" in state:
            given, own = state["entropy_coefficient"]
            rule = rule.model_copy(update={"start": own})
            config = config.model_copy(update={"entropy_coefficient": given, "adaptive_entropy": rule})
        return replace(self, kl=kl, config=config)

    def __call__(self, logprobs_T: Tensor, entropy_T: Tensor, batch: Batch) -> tuple[Tensor, TokenStatistics]:
        """The loss of every token, to be weighted and summed, and the statistics that are logged of it.

        Like all of the methods below it needs `batch` to have old log-probabilities; see `with_old_logprobs`.
        """
        loss_T = self.policy_loss(logprobs_T, batch)
        others_T = self.other_terms(logprobs_T, entropy_T, batch)
        if others_T is not None:
            loss_T = loss_T + others_T
        return loss_T, self.statistics(logprobs_T, entropy_T, batch)

    @property
    def corrects_sampler(self) -> bool:
        """Whether the policy loss has importance weights for what the sampler drew."""
        return self.config.sampler_correction.enabled

    def policy_loss(self, logprobs_T: Tensor, batch: Batch, *, curvature: bool = False) -> Tensor:
        """The term of the loss that the advantages drive, the sampler corrected.

        With `curvature` the same gradient, from a loss whose second derivative is the curvature that belongs to it.
        """
        function = self.loss.value
        if curvature and self.loss.with_curvature is not None:
            function = self.loss.with_curvature
        loss_T = function(logprobs_T, self.ratio(logprobs_T, batch), batch.advantages_T, self.config)
        if batch.policy_weights_T is not None:
            loss_T = batch.policy_weights_T * loss_T
        return self.corrected(loss_T, batch)

    def clipped(self, logprobs_T: Tensor, batch: Batch) -> Tensor:
        """The tokens whose policy gradient the clip takes away (or, for CISPO, caps)."""
        couples = self.loss.couples_tokens
        ratio_T = F.importance_ratio(logprobs_T, _old(batch)) if couples else self.ratio(logprobs_T, batch)
        return self.loss.clipped(logprobs_T, ratio_T, batch.advantages_T, self.config)

    def corrected(self, loss_T: Tensor, batch: Batch) -> Tensor:
        """w_T * loss_T with the importance weights of what the sampler drew; loss_T itself without a correction.

        The old log-probabilities are constants, the same in every pass of an update, and so are the weights.
        """
        return self.correction(batch) * loss_T if self.corrects_sampler else loss_T

    def correction(self, batch: Batch) -> Tensor:
        """The importance weight of every token for what the sampler drew, before it is normalized."""
        config, old_T, sampled_T = self.config.sampler_correction, _old(batch), batch.sampler_logprobs_T
        assert sampled_T is not None  # demonstrations alone have none, and SFT has no correction
        weights_T = torch.ones_like(old_T)
        if config.type != "none":
            weights_T = CORRECTIONS[config.type](self.sampler_ratio(batch), cap=config.cap, floor=config.floor)
        if config.reject is None:
            return weights_T
        distance_T = KL_ESTIMATORS[config.reject.estimator](sampled_T, old_T)
        if config.reject.over == "max":
            distance_T = distance_T.abs()
        if config.reject.over != "token":
            completions = (batch.sequence_T, len(batch.lengths_N))
            distance_T = F.over_completions(distance_T, *completions, by=config.reject.over)
        return weights_T.masked_fill(distance_T.abs() > config.reject.above, 0.0)

    def sampler_ratio(self, batch: Batch) -> Tensor:
        """p_old / mu of every token, before a bound, by the correction's level."""
        old_T, sampled_T = _old(batch), batch.sampler_logprobs_T
        assert sampled_T is not None  # demonstrations alone have none, and SFT has no correction
        if self.config.sampler_correction.level == "token":
            return F.importance_ratio(old_T, sampled_T)
        completions = (batch.sequence_T, len(batch.lengths_N))
        if self.config.sampler_correction.level == "sequence_mean":
            return F.sequence_importance_ratio(old_T, sampled_T, *completions)
        return F.sequence_probability_ratio(old_T, sampled_T, *completions)

    def other_terms(self, logprobs_T: Tensor, entropy_T: Tensor, batch: Batch) -> Tensor | None:
        """The KL and entropy terms; None where the loss has neither."""
        terms = []
        if self.kl_in_loss:
            kl_T = self._kl(logprobs_T, batch)
            weighted_T = self.importance_ratio(logprobs_T, batch) * kl_T if self.kl.ratio_weighted else kl_T
            terms.append(self.kl.coefficient * weighted_T)
        if self.config.entropy_coefficient:
            terms.append(-self.config.entropy_coefficient * entropy_T)
        if self.token_weights is not None and batch.penalty_weights_T is not None:
            terms.append(batch.penalty_weights_T * (logprobs_T - _old(batch)).abs())
        return sum(terms[1:], terms[0]) if terms else None

    @torch.no_grad()
    def statistics(self, logprobs_T: Tensor, entropy_T: Tensor, batch: Batch) -> TokenStatistics:
        """Sums over the tokens of a micro-batch, for the metrics."""
        ratio_T = self.ratio(logprobs_T, batch)
        token_ratio_T = F.importance_ratio(logprobs_T, _old(batch))
        return TokenStatistics(
            tokens=len(logprobs_T),
            entropy=entropy_T.sum(),
            ratio=ratio_T.sum(),
            clipped=self.clipped(logprobs_T, batch).sum(),
            kl=self._kl(logprobs_T, batch).sum() if _has_reference(batch) else None,
            max_ratio_gap=(token_ratio_T - 1).abs().max() if len(logprobs_T) else torch.zeros(()),
            weight=None if batch.policy_weights_T is None else batch.policy_weights_T.sum(),
            sampler=self._sampler_statistics(logprobs_T, batch),
        )

    def _sampler_statistics(self, logprobs_T: Tensor, batch: Batch) -> SamplerStatistics | None:
        sampled_T = batch.sampler_logprobs_T
        if sampled_T is None:
            return None
        # With a correction the old ones are the trainer's own, whatever the step's updates have changed since.
        trainer_T = _old(batch) if self.corrects_sampler else logprobs_T
        gap_T = (trainer_T - sampled_T).abs()
        weights_T = self.correction(batch) if self.corrects_sampler else None
        return SamplerStatistics(
            gap=gap_T.sum(),
            max_gap=gap_T.max() if len(gap_T) else torch.zeros(()),
            kl=F.kl_k3(sampled_T, trainer_T).sum(),
            weight=None if weights_T is None else weights_T.sum(),
            squares=None if weights_T is None else weights_T.square().sum(),
            capped=None if weights_T is None else self._capped(batch).sum(),
            by_depth=_by_depth(gap_T, batch) if self.corrects_sampler else None,
        )

    def _capped(self, batch: Batch) -> Tensor:
        """bool [T]: tokens whose importance weight is above the cap."""
        config = self.config.sampler_correction
        return (self.sampler_ratio(batch) > config.cap) & (config.type != "none")

    def ratio(self, logprobs_T: Tensor, batch: Batch) -> Tensor:
        """The importance ratio that the loss uses, of every token."""
        if self.loss.ratio is None:
            return self.importance_ratio(logprobs_T, batch)
        completions = (batch.advantages_T, batch.sequence_T, len(batch.lengths_N))
        return self.loss.ratio(logprobs_T, _old(batch), *completions, self.config)

    def importance_ratio(self, logprobs_T: Tensor, batch: Batch) -> Tensor:
        """The importance ratio of `objective.ratio`, of every token."""
        if self.config.ratio == "token":
            return F.importance_ratio(logprobs_T, _old(batch))
        return F.sequence_importance_ratio(logprobs_T, _old(batch), batch.sequence_T, len(batch.lengths_N))

    def _kl(self, logprobs_T: Tensor, batch: Batch) -> Tensor:
        """The KL of every token to the reference."""
        if batch.kl_T is not None:
            return batch.kl_T
        assert batch.reference_logprobs_T is not None  # a recipe with KL keeps a reference
        return KL_ESTIMATORS[self.kl.estimator](logprobs_T, batch.reference_logprobs_T)


def _by_depth(gap_T: Tensor, batch: Batch) -> Tensor:
    """[2, 4]: the tokens in each quarter of their completions, and the sums of their gaps."""
    lengths_T = batch.lengths_N.index_select(0, batch.sequence_T)
    first_T = (batch.lengths_N.cumsum(0) - batch.lengths_N).index_select(0, batch.sequence_T)
    place_T = torch.arange(len(gap_T), device=gap_T.device) - first_T
    quarter_T = place_T * 4 // lengths_T.clamp(min=1)
    zeros = gap_T.new_zeros(4)
    return torch.stack([zeros.index_add(0, quarter_T, values) for values in (torch.ones_like(gap_T), gap_T)])


def token_weight_inputs(parts: Sequence[tuple[Batch, Tensor, Tensor]], config: ObjectiveConfig) -> dict[str, Any]:
    """The values that functions of token weights ask for, of a minibatch in parts; see `TOKEN_WEIGHT_INPUTS`.

    Each part is a batch of trained tokens with the policy's log-probabilities and entropies as the minibatch begins.
    """
    batches = [with_old_logprobs(batch, logprobs_T) for batch, logprobs_T, _ in parts]
    sampled = [batch.sampler_logprobs_T for batch in batches if batch.sampler_logprobs_T is not None]
    counts = [len(batch.lengths_N) for batch in batches]
    starts = accumulate(counts, initial=0)
    return {
        "logprobs_T": torch.cat([logprobs_T for _, logprobs_T, _ in parts]),
        "old_logprobs_T": torch.cat([_old(batch) for batch in batches]),
        "sampler_logprobs_T": torch.cat(sampled) if len(sampled) == len(batches) else None,
        "entropy_T": torch.cat([entropy_T for _, _, entropy_T in parts]),
        "advantages_T": torch.cat([batch.advantages_T for batch in batches]),
        "sequence_T": torch.cat([batch.sequence_T + start for batch, start in zip(batches, starts, strict=False)]),
        "num": sum(counts),
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
    }


def with_old_logprobs(batch: Batch, logprobs_T: Tensor) -> Batch:
    """The batch with these as old log-probabilities, detached, where it has none."""
    return batch if batch.old_logprobs_T is not None else replace(batch, old_logprobs_T=logprobs_T.detach())


def _has_reference(batch: Batch) -> bool:
    return batch.reference_logprobs_T is not None or batch.kl_T is not None


def _old(batch: Batch) -> Tensor:
    assert batch.old_logprobs_T is not None
    return batch.old_logprobs_T
