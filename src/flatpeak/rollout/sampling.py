"""From logits to tokens: one softmax, at most one filter, and inverse-CDF sampling by a number in [0, 1).

Pure functions of tensors; each row's result depends only on that row. Weights are unnormalized probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

BLOCK = 128
"""A token is found among blocks of this size, then within one: 50 times faster at V = 32k than one long cumsum."""
CANDIDATES = 128
"""top-p first sorts this many of the largest weights; rows that need more sort 16 times as many."""
ROUNDING = 1e-6
"""The error of sums of float32 probabilities: a set that misses top_p by at most this has reached it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One token for each of R rows."""

    tokens_R: Tensor
    """int64 [R]."""
    logprobs_R: Tensor
    """float32 [R]: full-vocabulary log-softmax at the temperature, or at 1 if the temperature is 0."""
    filtered_logprobs_R: Tensor | None
    """float32 [R]: under the filtered, renormalized distribution; None without a filter or forbidden tokens."""
    kept_RV: Tensor | None
    """bool [R, V]: the tokens of that distribution; likewise."""


def draw(
    logits_RV: Tensor,
    uniforms_R: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    forbidden: Tensor | None = None,
) -> Draw:
    """Sample a token per row from softmax(logits / temperature), after min-p, top-k and then top-p; 0 is argmax.

    `forbidden` (bool [R, V]) marks tokens that must not be sampled. The stored log-prob includes them, because the
    trainer recomputes it over the full vocabulary, before any filter. Ties go to the lower token id.
    """
    allowed_RV = logits_RV if forbidden is None else logits_RV.masked_fill(forbidden, -torch.inf)
    if temperature == 0:
        tokens_R = allowed_RV.argmax(-1)
        logprobs_R = _at(scaled_logprobs(logits_RV, 1.0), tokens_R)
        return Draw(tokens_R=tokens_R, logprobs_R=logprobs_R, filtered_logprobs_R=None, kept_RV=None)
    probs_RV = scaled_probs(allowed_RV, temperature)
    filtered = top_p < 1 or top_k > 0 or min_p > 0
    weights_RV = filter_weights(probs_RV, top_k=top_k, top_p=top_p, min_p=min_p) if filtered else probs_RV
    tokens_R, totals_R = choose_tokens(weights_RV, uniforms_R)
    if forbidden is None:
        logprobs_R = _at(probs_RV, tokens_R).log()
    else:
        logprobs_R = _at(scaled_logprobs(logits_RV, temperature), tokens_R)
    if not filtered and forbidden is None:
        return Draw(tokens_R=tokens_R, logprobs_R=logprobs_R, filtered_logprobs_R=None, kept_RV=None)
    return Draw(
        tokens_R=tokens_R,
        logprobs_R=logprobs_R,
        filtered_logprobs_R=(_at(weights_RV, tokens_R) / totals_R).log().float(),
        kept_RV=weights_RV > 0 if filtered else ~cast(Tensor, forbidden),
    )


def scaled_probs(logits_RV: Tensor, temperature: float) -> Tensor:
    """float32 [R, V]: softmax(logits / temperature). The log of an entry is its log-prob to about 2e-7."""
    return torch.softmax(_scaled(logits_RV, temperature), dim=-1)


def scaled_logprobs(logits_RV: Tensor, temperature: float) -> Tensor:
    """float32 [R, V]: log-softmax(logits / temperature)."""
    return torch.log_softmax(_scaled(logits_RV, temperature), dim=-1)


def filter_weights(weights_RV: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Set weights outside the filters to 0: keep those of at least min_p times the largest (Nguyen et al. 2024), of
    these the k largest, and of these the smallest set whose share reaches top_p.

    The token that crosses top_p is kept (Holtzman et al. 2020); among equal weights, lower token ids come first.
    """
    vocabulary = weights_RV.shape[-1]
    if min_p > 0:
        weights_RV = weights_RV.masked_fill(weights_RV < min_p * weights_RV.amax(-1, keepdim=True), 0.0)
    if 0 < top_k < vocabulary:
        counts_R = torch.full((len(weights_RV),), top_k, device=weights_RV.device)
        weights_RV = _keep_largest(weights_RV, counts_R, weights_RV.topk(top_k + 1).values)
    if top_p < 1:
        totals_R = _block_sums(weights_RV).sum(-1, dtype=torch.float64)
        weights_RV = _smallest_set(weights_RV, totals_R * (top_p - ROUNDING), CANDIDATES)
    return weights_RV


def choose_tokens(weights_RV: Tensor, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
    """The first token at which the cumulative weight exceeds u times the total: (tokens int64 [R], totals float64 [R]).

    Sums are float64; a token of weight 0 is never chosen, for any u in [0, 1) and any rounding of sums.
    """
    blocks_RB = _block_sums(weights_RV)
    totals_R = blocks_RB.sum(-1, dtype=torch.float64)
    block_R, rest_R = _locate(blocks_RB, uniforms_R * totals_R)
    if blocks_RB.shape[-1] == weights_RV.shape[-1]:
        return block_R, totals_R
    last = weights_RV.shape[-1] - 1
    index_RK = block_R[:, None] * BLOCK + torch.arange(BLOCK, device=weights_RV.device)
    # Past the end of a short last block, its last token repeats, so an index there means that token.
    inner_R, _ = _locate(weights_RV.gather(1, index_RK.clamp(max=last)), rest_R)
    return (block_R * BLOCK + inner_R).clamp(max=last), totals_R


def _block_sums(weights_RV: Tensor) -> Tensor:
    """Sums over blocks of BLOCK tokens, with a short last block; for a small vocabulary, the weights themselves."""
    vocabulary = weights_RV.shape[-1]
    if vocabulary <= 4 * BLOCK:
        return weights_RV
    whole = vocabulary // BLOCK * BLOCK
    sums_RB: Tensor = weights_RV[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    if whole == vocabulary:
        return sums_RB
    return torch.cat([sums_RB, weights_RV[:, whole:].sum(-1, keepdim=True)], dim=1)


def _locate(weights_RK: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cumulative weight exceeds the target, and the distance of the target into it.

    A target that rounding puts at or above the total is set just below it: then cumulative[i - 1] <= target <
    cumulative[i] holds for some i, whose weight is positive. NaN weights give some valid index, so that a diverged
    model ends in an error about its log-probs instead of an illegal memory access.
    """
    cumulative_RK = weights_RK.cumsum(-1, dtype=torch.float64)
    total_R = cumulative_RK[:, -1]
    targets_R = torch.minimum(targets_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    index_R1 = torch.searchsorted(cumulative_RK, targets_R[:, None], right=True).clamp(max=weights_RK.shape[-1] - 1)
    before_R1 = cumulative_RK.gather(1, (index_R1 - 1).clamp(min=0)).masked_fill(index_R1 == 0, 0.0)
    return index_R1[:, 0], targets_R - before_R1[:, 0]


def _smallest_set(weights_RV: Tensor, needed_R: Tensor, candidates: int) -> Tensor:
    """Zero all weights except the fewest largest that together reach `needed_R` (float64)."""
    if candidates < weights_RV.shape[-1]:
        sorted_RK = weights_RV.topk(candidates).values
    else:
        sorted_RK = weights_RV.sort(dim=-1, descending=True).values
    crossing_R1 = torch.searchsorted(sorted_RK.cumsum(-1, dtype=torch.float64), needed_R[:, None])
    counts_R = (crossing_R1[:, 0] + 1).clamp(max=sorted_RK.shape[-1])
    kept_RV = _keep_largest(weights_RV, counts_R, sorted_RK)
    if candidates < weights_RV.shape[-1]:
        short = (counts_R == candidates).nonzero()[:, 0]
        if len(short):
            kept_RV = kept_RV.index_copy(0, short, _smallest_set(weights_RV[short], needed_R[short], 16 * candidates))
    return kept_RV


def _keep_largest(weights_RV: Tensor, counts_R: Tensor, sorted_RK: Tensor) -> Tensor:
    """Zero all weights except each row's `counts_R` largest; ties go to lower ids.

    `sorted_RK` has the largest in descending order, including one more than is kept if there is one. Selection by value
    and then by counting ties makes the set depend only on the weights; topk's choice among ties would not.
    """
    threshold_R1 = sorted_RK.gather(1, counts_R[:, None] - 1)
    kept_RV = weights_RV.masked_fill(weights_RV < threshold_R1, 0.0)
    next_R1 = sorted_RK.gather(1, counts_R[:, None].clamp(max=sorted_RK.shape[-1] - 1))
    is_tied_R = ((next_R1 == threshold_R1) & (threshold_R1 > 0))[:, 0] & (counts_R < sorted_RK.shape[-1])
    tied = is_tied_R.nonzero()[:, 0]
    if len(tied):
        at_threshold = kept_RV[tied] == threshold_R1[tied]
        wanted = counts_R[tied, None] - (kept_RV[tied] > threshold_R1[tied]).sum(-1, keepdim=True)
        surplus = at_threshold & (at_threshold.cumsum(-1) > wanted)
        kept_RV = kept_RV.index_copy(0, tied, kept_RV[tied].masked_fill(surplus, 0.0))
    return kept_RV


def _scaled(logits_RV: Tensor, temperature: float) -> Tensor:
    logits_RV = logits_RV.float()
    return logits_RV if temperature == 1 else logits_RV / temperature


def _at(values_RV: Tensor, tokens_R: Tensor) -> Tensor:
    return values_RV.gather(1, tokens_R[:, None])[:, 0]
