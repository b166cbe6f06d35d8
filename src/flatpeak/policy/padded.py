"""The plain forward pass, padded on the right: for architectures that flatpeak's attention does not serve."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatpeak.policy.packing import offsets
from flatpeak.types import Batch


def padded_token_logprobs(model: Any, batch: Batch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of, and entropy at, each response token, float32 [T], by the model's own logits [N, L, V]."""
    device = batch.tokens_T.device
    responses = batch.tokens_T.split(batch.lengths_N.tolist())
    rows = [
        torch.cat([torch.tensor(batch.prompts[prompt], device=device), response])
        for prompt, response in zip(batch.prompt_N.tolist(), responses, strict=True)
    ]
    lengths_N = torch.tensor([len(row) for row in rows], device=device)
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attention_mask = (torch.arange(input_ids.shape[1], device=device) < lengths_N[:, None]).long()
    logits_NLV = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    first_N = torch.arange(len(rows), device=device) * input_ids.shape[1] + lengths_N - batch.lengths_N - 1
    source_T = first_N.index_select(0, batch.sequence_T) + offsets(batch.lengths_N)
    logits_TV = logits_NLV.flatten(0, 1).index_select(0, source_T)
    logits_TV = (logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()) / temperature
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    chosen_T = logprobs_TV.gather(1, batch.tokens_T[:, None])[:, 0]
    return chosen_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)
