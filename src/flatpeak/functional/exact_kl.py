"""The KL to a reference at every token, summed over the vocabulary in place of estimated from the sampled token.

Unlike the estimators of `functional.kl` it has no noise of sampling: at a context it is the KL itself, and so is its
gradient. Logits of policy and reference are computed in chunks, as in `functional.logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatpeak.functional.kept_tokens import KeptTokens
from flatpeak.functional.logprobs import Head, cast_by_autocast, head_gradients

Scores = Callable[[slice], Tensor]
"""A frozen model's z [C, V], logits by temperature, of a slice of the tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactKL:
    """The other side of a KL, and how much of it is summed."""

    reference: Scores
    top_k: int | None = None
    """Sum over the policy's k most probable tokens alone; None: over all. The rest is estimated by the sampled token
    where it is none of these (arXiv 2602.04417)."""


def exact_kl(scores_TV: Tensor, targets_T: Tensor, kl: ExactKL, *, kept_T: KeptTokens | None = None) -> Tensor:
    """KL_T = sum_v p_v (log p_v - log ref_v) of softmax over the vocabulary, or over `kept_T`, in nats.

    With `top_k` = k: sum over the k largest p_v, plus log p_y - log ref_y where the sampled token y is not among them.
    Value and gradient have the mean of the whole sum, for y drawn from p.
    """
    rows = slice(0, len(targets_T))
    kept_TV = None if kept_T is None else kept_T.mask(rows, scores_TV.shape[-1])
    logprobs_TV, differences_TV, summed_TV = _terms(scores_TV, kl.reference(rows), targets_T, kept_TV, kl.top_k)
    terms_TV = logprobs_TV.exp() * differences_TV
    if summed_TV is None:
        return terms_TV.sum(-1)
    chosen_T1 = targets_T[:, None]
    logprobs_T1, differences_T1 = logprobs_TV.gather(1, chosen_T1), differences_TV.gather(1, chosen_T1)
    # A factor of 1 whose gradient is that of log p.
    rest_T1 = (logprobs_T1 - logprobs_T1.detach()).exp() * differences_T1
    return torch.where(summed_TV, terms_TV, 0).sum(-1) + torch.where(summed_TV.gather(1, chosen_T1), 0, rest_T1)[:, 0]


def chunked_exact_kl(
    hidden_TD: Tensor, output_weight_VD: Tensor, targets_T: Tensor, kl: ExactKL, *, bias_V: Tensor | None, head: Head
) -> Tensor:
    """`exact_kl` from hidden states, as in `token_logprobs`: no [T, V] tensor is allocated.

    Can be differentiated once, with respect to hidden, weight and bias.
    """
    hidden_TD, output_weight_VD, bias_V = cast_by_autocast(hidden_TD, output_weight_VD, bias_V)
    kl_T: Tensor = _ExactKL.apply(hidden_TD, output_weight_VD, targets_T, bias_V, head, kl)
    return kl_T


class _ExactKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        bias_V: Tensor | None,
        head: Head,
        kl: ExactKL,
    ) -> Tensor:
        chunks = []
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for rows in head.chunks(len(hidden_TD)):
                weights_CV, differences_CV, _ = _weights(
                    head.scores(hidden_TD[rows], weight_VD, bias_V), targets_T, kl, head, rows
                )
                chunks.append(weights_CV.mul_(differences_CV).sum(-1))
                del weights_CV, differences_CV
        ctx.head, ctx.kl = head, kl
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, bias_V)
        none = hidden_TD.new_zeros(0, dtype=torch.promote_types(hidden_TD.dtype, torch.float32))
        return torch.cat([none, *chunks])

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, targets_T, bias_V = ctx.saved_tensors

        def score_gradient(rows: slice, scores_CV: Tensor) -> Tensor:
            """d KL / d z = g - p sum_v g_v, g = w (log p - log ref + 1) for weights w of the terms, w' = w (log p)'."""
            weights_CV, differences_CV, probabilities_CV = _weights(scores_CV, targets_T, ctx.kl, ctx.head, rows)
            grad_CV = weights_CV.mul_(differences_CV.add_(1))
            grad_CV.sub_(probabilities_CV.mul_(grad_CV.sum(-1, keepdim=True)))
            return grad_CV.mul_(grad_T[rows, None])

        needs_hidden, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
        needs = (needs_hidden, needs_weight, needs_bias)
        grad_hidden_TD, grad_weight_VD, grad_bias_V = head_gradients(
            ctx.head, hidden_TD, weight_VD, bias_V, needs=needs, score_gradient=score_gradient
        )
        return grad_hidden_TD, grad_weight_VD, None, grad_bias_V, None, None


def _weights(
    scores_CV: Tensor, targets_T: Tensor, kl: ExactKL, head: Head, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's weights of the terms, the terms log p - log ref, and p, each [C, V] and newly allocated."""
    kept_CV = head.mask(rows, scores_CV.shape[-1])
    targets_C = targets_T[rows]
    logprobs_CV, differences_CV, summed_CV = _terms(scores_CV, kl.reference(rows), targets_C, kept_CV, kl.top_k)
    probabilities_CV = logprobs_CV.exp_()
    if summed_CV is None:
        return probabilities_CV.clone(), differences_CV, probabilities_CV
    sampled_CV = torch.zeros_like(summed_CV).scatter_(1, targets_C[:, None], True) & ~summed_CV
    weights_CV = probabilities_CV.masked_fill(~summed_CV, 0).masked_fill_(sampled_CV, 1)
    return weights_CV, differences_CV, probabilities_CV


def _terms(
    scores_CV: Tensor, reference_CV: Tensor, targets_C: Tensor, kept_CV: Tensor | None, top_k: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """log p, log p - log ref (0 outside of the kept tokens), and bool: the tokens that are summed; None: all."""
    if kept_CV is not None:
        scores_CV = scores_CV.masked_fill(~kept_CV, -torch.inf)
        reference_CV = reference_CV.masked_fill(~kept_CV, -torch.inf)
    logprobs_CV = torch.log_softmax(scores_CV, -1)
    reference_CV = torch.log_softmax(reference_CV, -1)
    if kept_CV is None:
        differences_CV = logprobs_CV - reference_CV
    else:  # without the difference of two infinities, whose gradient would be NaN
        differences_CV = logprobs_CV.masked_fill(~kept_CV, 0) - reference_CV.masked_fill(~kept_CV, 0)
    if top_k is None or top_k >= scores_CV.shape[-1]:
        return logprobs_CV, differences_CV, None
    largest_CK = logprobs_CV.detach().topk(top_k, -1).indices
    return logprobs_CV, differences_CV, torch.zeros_like(scores_CV, dtype=torch.bool).scatter_(1, largest_CK, True)
