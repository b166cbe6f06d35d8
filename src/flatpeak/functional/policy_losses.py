"""The losses of papers since GRPO (other gates, ratios of whole completions, trust regions of probabilities), and the
table of all losses that a recipe can choose.

The functions are elementwise like those of `losses.py`, with their papers' coefficients as defaults. R is the
probability ratio of a whole completion, r that of a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flatpeak.functional import losses
from flatpeak.functional.losses import importance_ratio, sequence_importance_ratio, unclipped_surrogate
from flatpeak.functional.sampler_correction import sequence_probability_ratio

__all__ = [
    "PolicyLoss",
    "beyond_kl",
    "beyond_total_variation",
    "clipped_geometric_ratio",
    "dppo_kl",
    "dppo_tv",
    "gmpo",
    "sapo",
    "topr",
    "vespo",
]


def sapo(
    ratio: Tensor, advantages: Tensor, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with tau by the sign of A. SAPO, Gao et al. 2025, arXiv 2511.20347.

    A soft gate in place of the clip: the gradient is the surrogate's at r = 1 and falls off smoothly on both sides.
    """
    tau = _by_sign(advantages, temperature_positive, temperature_negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages


def _by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """One of two numbers for each token, in the dtype of the advantages; torch.where of two numbers has float32."""
    return torch.where(advantages > 0, advantages.new_tensor(positive), advantages.new_tensor(negative))


def vespo(
    logprobs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    *,
    shape_positive: float = 2.0,
    rate_positive: float = 3.0,
    shape_negative: float = 3.0,
    rate_negative: float = 2.0,
) -> Tensor:
    """-stopgrad(phi(R)) A log p, phi(R) = R^k exp(c (1 - R)). VESPO, Shen et al. 2026, arXiv 2602.10693.

    R is the whole completion's probability ratio, k the shape and c the rate, by the sign of A; phi(1) = 1.
    """
    shape = _by_sign(advantages, shape_positive, shape_negative)
    rate = _by_sign(advantages, rate_positive, rate_negative)
    kernel = torch.exp(shape * ratio.detach().clamp(min=1e-8).log() + rate * (1 - ratio.detach()))
    return -kernel * advantages * logprobs


def topr(logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    """-A log p where A > 0, -stopgrad(min(R, 1)) A log p elsewhere. TOPR, Le Roux et al. 2025, arXiv 2503.14286.

    R is the whole completion's probability ratio: a bad answer that the policy would hardly give is left alone.
    """
    return -torch.where(advantages > 0, 1.0, ratio.clamp(max=1).detach()) * advantages * logprobs


def clipped_geometric_ratio(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    sequence_T: Tensor,
    num: int,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """exp(mean_t l_it) of log-ratios l, at most clip_high where A > 0 and at least -clip_low elsewhere; see `gmpo`."""
    log_ratio_T = logprobs_T - old_logprobs_T
    bounded_T = torch.where(advantages_T > 0, log_ratio_T.clamp(max=clip_high), log_ratio_T.clamp(min=-clip_low))
    return sequence_importance_ratio(bounded_T, torch.zeros_like(bounded_T), sequence_T, num)


def gmpo(ratio: Tensor, advantages: Tensor) -> Tensor:
    """-s A, with s the geometric mean of clipped token ratios. GMPO, Zhao et al. 2025, arXiv 2507.20673, equation 4."""
    return unclipped_surrogate(ratio, advantages)


def dppo_tv(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, threshold_low: float = 0.15, threshold_high: float = 0.15
) -> Tensor:
    """-r A, without a gradient where p - p_old has passed a threshold in the direction of A. DPPO, Qi et al. 2026.

    The change of the token's own probability (arXiv 2602.04879, binary total variation) takes the place of the ratio,
    by which PPO stops rare tokens early and frequent ones late. The ratio is the token's.
    """
    beyond = beyond_total_variation(
        logprobs, ratio, advantages, threshold_low=threshold_low, threshold_high=threshold_high
    )
    return torch.where(beyond, ratio.detach(), ratio) * -advantages


def dppo_kl(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, threshold_low: float = 0.05, threshold_high: float = 0.05
) -> Tensor:
    """The same with the KL of the old to the new policy over "this token" and "any other". DPPO, Qi et al. 2026."""
    beyond = beyond_kl(logprobs, ratio, advantages, threshold_low=threshold_low, threshold_high=threshold_high)
    return torch.where(beyond, ratio.detach(), ratio) * -advantages


@torch.no_grad()
def beyond_total_variation(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, threshold_low: float = 0.15, threshold_high: float = 0.15
) -> Tensor:
    """bool: p - p_old > threshold_high where A > 0, < -threshold_low where A < 0; p_old = p / r."""
    change = logprobs.exp() * (1 - 1 / ratio)
    return torch.where(advantages > 0, change > threshold_high, (change < -threshold_low) & (advantages < 0))


@torch.no_grad()
def beyond_kl(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, threshold_low: float = 0.05, threshold_high: float = 0.05
) -> Tensor:
    """bool: q ln(q / p) + (1 - q) ln((1 - q) / (1 - p)) is above a threshold, and p has moved from q = p_old as A
    pushes."""
    new = logprobs.exp()
    old = (new / ratio).clamp(max=1)
    others = torch.xlogy(1 - old, (1 - old) / (1 - new).clamp(min=1e-8))
    divergence = others - old * ratio.log()
    rises = (ratio > 1) & (divergence > threshold_high)
    falls = (ratio < 1) & (divergence > threshold_low)
    return torch.where(advantages > 0, rises, falls & (advantages < 0))


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


def _by_log_ratio(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Whether gmpo's clip removes a token's gradient: its log-ratio is beyond the bound."""
    above = (ratio.log() > clip_high) & (advantages > 0)
    return above | ((ratio.log() < -clip_low) & (advantages < 0))


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
    couples_tokens: bool = False
    """Whether a token's log-probability changes the loss of the others, as through gmpo's ratio. `clipped` is then
    given each token's own ratio."""
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
    "sapo": PolicyLoss(value=_per_token(sapo)),
    "vespo": PolicyLoss(value=_per_token(vespo), ratio=_ratio(_of_completion)),
    "topr": PolicyLoss(
        value=_per_token(topr),
        clipped=_per_token(lambda ratio, advantages: (ratio > 1) & (advantages < 0)),
        ratio=_ratio(_of_completion),
    ),
    "gmpo": PolicyLoss(
        value=_per_token(gmpo),
        clipped=_per_token(_by_log_ratio),
        ratio=_ratio(clipped_geometric_ratio),
        couples_tokens=True,
    ),
    "dppo_tv": PolicyLoss(
        value=_per_token(dppo_tv),
        clipped=_per_token(beyond_total_variation),
        ratio=_ratio(importance_ratio),
    ),
    "dppo_kl": PolicyLoss(
        value=_per_token(dppo_kl),
        clipped=_per_token(beyond_kl),
        ratio=_ratio(importance_ratio),
    ),
}
"""The values of `objective.loss`, by name."""
