"""The policy losses that a recipe can choose, by name: a row each, of functions of a token's values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flatpeak.functional import loss_variants, losses
from flatpeak.functional.losses import importance_ratio
from flatpeak.functional.sampler_correction import sequence_probability_ratio


class Coefficients(Protocol):
    """The coefficients of all losses; the section `objective` of a recipe has them."""

    @property
    def clip_low(self) -> float:
        """Clip bound of the ratio, as a distance below 1."""

    @property
    def clip_high(self) -> float:
        """Clip bound of the ratio, as a distance above 1."""

    @property
    def dual_clip(self) -> float | None:
        """Bound of the ratio for negative advantages; None leaves it unbounded."""

    @property
    def cap(self) -> float:
        """Upper bound of the ratio itself, for CISPO."""

    @property
    def floor(self) -> float:
        """Lower bound of the ratio itself, for CISPO."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The coefficients of a single loss, by name; those that are left out have the defaults of its function."""


TokenFunction = Callable[[Tensor, Tensor, Tensor, Coefficients], Tensor]
"""(logprobs, ratio, advantages, coefficients) -> one value per token."""
RatioFunction = Callable[[Tensor, Tensor, Tensor, Tensor, int, Coefficients], Tensor]
"""(logprobs_T, old_logprobs_T, advantages_T, sequence_T, num, coefficients) -> ratio_T, of whole completions."""


def _with_coefficients(function: Callable[..., Tensor], *given: str) -> Callable[..., Tensor]:
    """A function of `given` and the coefficients: it passes on what the function asks for by name."""
    parameters = inspect.signature(function).parameters.values()

    def called(*values_and_coefficients: Any) -> Tensor:
        *values, coefficients = values_and_coefficients
        known = dict(zip(given, values, strict=True)) | coefficients.arguments
        own = {p.name: known[name] for p in parameters if (name := p.name.removesuffix("_T")) in known}
        shared = {
            p.name: getattr(coefficients, p.name)
            for p in parameters
            if p.name not in own and hasattr(coefficients, p.name)
        }
        return function(**own, **shared)

    return called


def _per_token(function: Callable[..., Tensor]) -> TokenFunction:
    return _with_coefficients(function, "logprobs", "ratio", "advantages")


def _ratio(function: Callable[..., Tensor]) -> RatioFunction:
    return _with_coefficients(function, "logprobs", "old_logprobs", "advantages", "sequence", "num")


def _never_clipped(logprobs: Tensor, ratio: Tensor, advantages: Tensor, coefficients: Coefficients) -> Tensor:
    """False for every token, for losses without a clip."""
    return torch.zeros_like(ratio, dtype=torch.bool)


def _by_ppo(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None) -> Tensor:
    """Whether PPO's clip removes a token's gradient: r is beyond the bound towards which the advantage pushes it."""
    above = (ratio > 1 + clip_high) & (advantages > 0)
    below = (ratio < 1 - clip_low) & (advantages < 0)
    if dual_clip is not None:
        below |= (ratio > dual_clip) & (advantages < 0)
    return above | below


def _of_completion(logprobs_T: Tensor, old_logprobs_T: Tensor, sequence_T: Tensor, num: int) -> Tensor:
    """The probability ratio of each token's whole completion."""
    return sequence_probability_ratio(logprobs_T, old_logprobs_T, sequence_T, num)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A loss that a recipe can choose; all losses have the same signature."""

    value: TokenFunction
    """The loss of each token from that token's values alone, so that batches may be split between any completions."""
    clipped: TokenFunction = _never_clipped
    """bool: tokens whose gradient the clip removes, or caps in the case of CISPO."""
    with_curvature: TokenFunction | None = None
    """A loss with the same gradient and a meaningful second derivative, if `value` detaches the ratio."""
    ratio: RatioFunction | None = None
    """The ratio that `value` is given, if the loss has one of its own; None: that of `objective.ratio`."""
    all_tokens: bool = False
    """Whether a token of advantage 0 can have a gradient; if so, no pass may skip it."""


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "policy_gradient": PolicyLoss(value=_per_token(losses.policy_gradient)),
    "unclipped_surrogate": PolicyLoss(value=_per_token(losses.unclipped_surrogate)),
    "clipped_surrogate": PolicyLoss(value=_per_token(losses.clipped_surrogate), clipped=_per_token(_by_ppo)),
    "truncated_policy_gradient": PolicyLoss(
        value=_per_token(losses.truncated_policy_gradient),
        clipped=_per_token(lambda ratio, *, cap, floor: (ratio > cap) | (ratio < floor)),
        with_curvature=_per_token(losses.capped_policy_loss),
    ),
    "sapo": PolicyLoss(value=_per_token(loss_variants.sapo)),
    "vespo": PolicyLoss(value=_per_token(loss_variants.vespo), ratio=_ratio(_of_completion)),
    "topr": PolicyLoss(
        value=_per_token(loss_variants.topr),
        clipped=_per_token(lambda ratio, advantages: (ratio > 1) & (advantages < 0)),
        ratio=_ratio(_of_completion),
    ),
    "gmpo": PolicyLoss(value=_per_token(loss_variants.gmpo), ratio=_ratio(loss_variants.clipped_geometric_ratio)),
    "dppo_tv": PolicyLoss(
        value=_per_token(loss_variants.dppo_tv),
        clipped=_per_token(loss_variants.beyond_total_variation),
        ratio=_ratio(importance_ratio),
    ),
    "dppo_kl": PolicyLoss(
        value=_per_token(loss_variants.dppo_kl),
        clipped=_per_token(loss_variants.beyond_kl),
        ratio=_ratio(importance_ratio),
    ),
}
"""The values of `objective.loss`, by name."""
