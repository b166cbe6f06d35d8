"""The outputs of a model at response tokens: hidden states of a packed pass, logits of a padded one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatpeak.functional.exact_kl import ExactKL, Scores, chunked_exact_kl, exact_kl
from flatpeak.functional.logprobs import Head as ChunkedHead
from flatpeak.functional.logprobs import cast_by_autocast, chunk_tokens, token_logprobs
from flatpeak.policy.linears import Head
from flatpeak.policy.packing import padded_logits
from flatpeak.types import PackedCompletions


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedOutputs:
    """Hidden states, which the output layer reads in chunks: no [T, V] tensor is allocated."""

    hidden_TD: Tensor
    head: Head
    batch: PackedCompletions
    temperature: float

    @property
    def chunked(self) -> ChunkedHead:
        """The way from hidden states to logits / temperature, a chunk of tokens at a time."""
        weight_VD = self.head.linear.weight
        return ChunkedHead(
            softcap=self.head.softcap,
            logit_scale=self.head.logit_scale,
            temperature=self.temperature,
            chunk_size=chunk_tokens(len(weight_VD), on_cpu=weight_VD.device.type == "cpu"),
            kept_T=self.batch.kept_T,
        )

    def logprobs(self) -> tuple[Tensor, Tensor]:
        """Log-probability of, and entropy at, each response token, as of Policy.token_logprobs."""
        return token_logprobs(
            self.hidden_TD,
            self.head.linear.weight,
            self.batch.tokens_T,
            bias_V=self.head.linear.bias,
            softcap=self.head.softcap,
            logit_scale=self.head.logit_scale,
            temperature=self.temperature,
            kept_T=self.batch.kept_T,
        )

    def kl(self, kl: ExactKL) -> Tensor:
        """The exact KL at each response token, float32 [T]."""
        layer = self.head.linear
        return chunked_exact_kl(
            self.hidden_TD, layer.weight, self.batch.tokens_T, kl, bias_V=layer.bias, head=self.chunked
        )

    def scores(self) -> Scores:
        """logits / temperature at response tokens, without a gradient.

        They keep the output layer's weights on their device, also where those of an offloaded model move on.
        """
        bias, head = self.head.linear.bias, self.chunked
        hidden_TD, weight_VD, bias_V = cast_by_autocast(
            self.hidden_TD.detach(), self.head.linear.weight.detach(), None if bias is None else bias.detach()
        )
        return lambda rows: head.scores(hidden_TD[rows], weight_VD, bias_V)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedOutputs:
    """logits / temperature [T, V], of a model that is not packed, or whose passes are differentiated twice."""

    scores_TV: Tensor
    batch: PackedCompletions

    def logprobs(self) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, as of `PackedOutputs.logprobs`."""
        logprobs_TV = torch.log_softmax(self.scores_TV, dim=-1)
        chosen_T = logprobs_TV.gather(1, self.batch.tokens_T[:, None])[:, 0]
        if self.batch.kept_T is not None:
            kept_TV = self.batch.kept_T.mask(slice(None), logprobs_TV.shape[-1])
            chosen_T = chosen_T - logprobs_TV.masked_fill(~kept_TV, -torch.inf).logsumexp(-1)
        return chosen_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)

    def kl(self, kl: ExactKL) -> Tensor:
        """The exact KL, as of `PackedOutputs.kl`."""
        return exact_kl(self.scores_TV, self.batch.tokens_T, kl, kept_T=self.batch.kept_T)

    def scores(self) -> Scores:
        """The logits, as of `PackedOutputs.scores`."""
        scores_TV = self.scores_TV.detach()
        return lambda rows: scores_TV[rows]


def padded_outputs(model: Any, batch: PackedCompletions, *, temperature: float) -> PaddedOutputs:
    """The outputs of the model's own padded forward pass."""
    return PaddedOutputs(scores_TV=padded_logits(model, batch) / temperature, batch=batch)
