"""The plain forward pass, padded on the right: for architectures that flatpeak's attention does not serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatpeak.policy.packing import offsets
from flatpeak.types import Batch


def padded_token_logprobs(model: Any, batch: Batch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of, and entropy at, each response token, float32 [T], by the model's own logits there."""
    device = batch.tokens_T.device
    responses = batch.tokens_T.split(batch.lengths_N.tolist())
    rows = [
        torch.cat([torch.tensor(batch.prompts[prompt], device=device), response])
        for prompt, response in zip(batch.prompt_N.tolist(), responses, strict=True)
    ]
    lengths_N = torch.tensor([len(row) for row in rows], device=device)
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attention_mask = (torch.arange(input_ids.shape[1], device=device) < lengths_N[:, None]).long()
    first_N = torch.arange(len(rows), device=device) * input_ids.shape[1] + lengths_N - batch.lengths_N - 1
    source_T = first_N.index_select(0, batch.sequence_T) + offsets(batch.lengths_N)
    with _projecting_only(model, source_T, input_ids.shape):
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    # All positions' logits where the output layer was not to be had.
    logits_TV = logits[0] if logits.shape[:2] != input_ids.shape else logits.flatten(0, 1).index_select(0, source_T)
    logits_TV = (logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()) / temperature
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    chosen_T = logprobs_TV.gather(1, batch.tokens_T[:, None])[:, 0]
    return chosen_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)


@contextmanager
def _projecting_only(model: Any, source_T: Tensor, shape: torch.Size) -> Iterator[None]:
    """The output layer reads these positions of hidden states [N, L, D] only, as one row [1, T, D].

    Logits of whole prompts would take more memory than all else. What models do to logits, they do to each alone.
    """

    def choose(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(arguments) != 1 or arguments[0].shape[:-1] != shape:
            return None
        return (arguments[0].flatten(0, 1).index_select(0, source_T)[None],)

    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()
