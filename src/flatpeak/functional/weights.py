"""Normalizations of the loss, as one weight per completion."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Normalization = Literal["sequence_mean", "constant", "token_mean", "longest", "sequence_sum"]


def completion_weights(
    lengths_N: Tensor,
    normalization: Normalization,
    *,
    max_tokens: int | None = None,
    valid_N: Tensor | None = None,
) -> Tensor:
    """The float32 [N] weights w_i of loss = sum_i w_i sum_t loss_it, for one whole minibatch of the optimizer.

    N, sum and max are over the valid completions:

    - `sequence_mean`: 1 / (N len_i). GRPO, Shao et al. 2024.
    - `constant`: 1 / (N max_tokens). Dr. GRPO, Liu et al. 2025.
    - `token_mean`: 1 / sum(len). DAPO, Yu et al. 2025.
    - `longest`: 1 / (N max(len)).
    - `sequence_sum`: 1 / N. LUSPO.

    A completion with `valid_N` False has weight 0 and is not counted. One of length 0 has weight 0 and counts in N. All
    weights are 0 without a valid completion. Weights are fixed before the first backward pass, so the gradient does not
    depend on the split into micro-batches. If gradients are averaged over ranks, pass the lengths of all ranks and
    multiply by the number of ranks.

    Raises ValueError for an unknown name, lengths that are not counts, or `constant` without `max_tokens`.
    """
    _check(lengths_N, normalization)
    valid_N = torch.ones_like(lengths_N, dtype=torch.bool) if valid_N is None else valid_N
    if valid_N.dtype != torch.bool or valid_N.shape != lengths_N.shape:
        raise ValueError(f"valid_N is {valid_N.dtype} {list(valid_N.shape)}: give torch.bool {list(lengths_N.shape)}")
    counted_N = torch.where(valid_N, lengths_N, 0).long()
    num = valid_N.sum()
    if normalization == "sequence_mean":
        denominator_N = num * counted_N
    elif normalization == "constant":
        if max_tokens is None or max_tokens < 1:
            raise ValueError(f'max_tokens={max_tokens} with "constant": give the generation limit, at least 1 token')
        denominator_N = num * max_tokens
    elif normalization == "token_mean":
        denominator_N = counted_N.sum()
    elif normalization == "longest":
        denominator_N = num * counted_N.amax() if len(counted_N) else num
    else:
        denominator_N = num
    # If the denominator is 0, so is the numerator.
    return (counted_N > 0).float() / denominator_N.clamp(min=1)


def _check(lengths_N: Tensor, normalization: Normalization) -> None:
    if normalization not in get_args(Normalization):
        raise ValueError(f"normalization={normalization!r}: choose one of {', '.join(get_args(Normalization))}")
    if lengths_N.ndim != 1 or lengths_N.is_floating_point() or lengths_N.dtype == torch.bool:
        raise ValueError(f"lengths_N is {lengths_N.dtype} {list(lengths_N.shape)}: give whole numbers of shape [N]")
    if bool((lengths_N < 0).any()):
        raise ValueError("lengths_N has a negative length: give the number of response tokens of each completion")
