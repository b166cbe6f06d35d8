"""A stand-in tokenizer and a batch of uneven completions for tests of the policy."""

from __future__ import annotations

from typing import Any

import torch

from flatpeak.policy.model import Policy
from flatpeak.types import Batch


class Tokenizer:
    """Names the end-of-sequence token; nothing here decodes."""

    eos_token_id = 1
    chat_template = None


def uneven_batch(vocabulary: int = 40, *, seed: int = 0) -> Batch:
    """Three prompts of 3, 11 and 1 tokens with two, two and one completions of 1 to 14 tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts = tuple(tuple(torch.randint(2, vocabulary, (n,), generator=generator).tolist()) for n in (3, 11, 1))
    lengths_N = torch.tensor([1, 9, 14, 4, 2])
    total = int(lengths_N.sum())
    return Batch(
        prompts=prompts,
        prompt_N=torch.tensor([0, 0, 1, 1, 2]),
        lengths_N=lengths_N,
        tokens_T=torch.randint(2, vocabulary, (total,), generator=generator),
        sequence_T=torch.arange(5).repeat_interleave(lengths_N),
        advantages_T=torch.ones(total),
        weights_N=torch.ones(5),
        old_logprobs_T=torch.zeros(total),
    )


def plain_logprobs(policy: Policy, batch: Batch, temperature: float) -> torch.Tensor:
    """One unpadded plain forward pass per completion: log-probabilities float32 [T], the slow and obvious way."""
    pieces = []
    for prompt, tokens in zip(batch.prompt_N.tolist(), batch.tokens_T.split(batch.lengths_N.tolist()), strict=True):
        ids = torch.cat([torch.tensor(batch.prompts[prompt]), tokens])
        with policy.plain_attention() as model:
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / temperature
        logprobs = torch.log_softmax(logits, dim=-1)[len(batch.prompts[prompt]) - 1 : -1]
        pieces.append(logprobs.gather(1, tokens[:, None])[:, 0])
    return torch.cat(pieces)


def gradients(policy: Policy, loss: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of every parameter, zeros where it has none."""
    policy.model.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.parameters()]


def largest_gap(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """max |ours - theirs| over max |theirs|, over all parameters together."""
    scale = max(float(g.abs().max()) for g in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / scale


def tokens_and_weights(batch: Batch) -> Any:
    """A loss weight per token, so that gradients of different tokens cannot cancel."""
    return torch.linspace(0.5, 1.5, len(batch.tokens_T))
