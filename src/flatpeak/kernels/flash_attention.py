"""Attention within a packed row on a GPU, by the FlashAttention-2 kernels that torch contains.

One call serves all prompts and responses: the queries are the row as it is, and the keys are gathered so that each
response follows its own copy of its prompt's keys. The causal mask is aligned at the ends of queries and keys, so a
response's first token sees the whole prompt.

Shape letters: S tokens of prompts and responses, K gathered keys, H heads, D head dimension, N prompts and responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_HEAD = 256
"""The largest head dimension of the kernels."""
OLDEST_GPU = (8, 0)
"""The first compute capability that the kernels run on."""

_kernel = torch.ops.aten._flash_attention_forward


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashSegments:
    """Prompts and responses in the order of the row, and the keys that each of them sees."""

    index_K: Tensor
    """int64: the token of each gathered key."""
    query_ends_N: Tensor
    """int32 [N + 1]: 0, then the end of each segment in the row."""
    key_ends_N: Tensor
    """int32 [N + 1]: 0, then the end of each segment's gathered keys."""
    longest_query: int
    longest_keys: int
    num_tokens: int
    """The tokens of all segments."""

    @classmethod
    def build(cls, starts_N: Tensor, lengths_N: Tensor, prompt_N: Tensor) -> FlashSegments:
        """Segments [starts, starts + lengths) of the row, in any order; `prompt_N`: the index of each one's prompt,
        which for a prompt is its own."""
        order_N = starts_N.argsort()
        prompt_N = prompt_N.index_select(0, order_N)
        is_prompt_N = prompt_N == order_N
        prompt_starts_N, prompt_lengths_N = (each.index_select(0, prompt_N) for each in (starts_N, lengths_N))
        starts_N, lengths_N = (each.index_select(0, order_N) for each in (starts_N, lengths_N))
        before_N = prompt_lengths_N.masked_fill(is_prompt_N, 0)
        keys_N = before_N + lengths_N
        ends_N = keys_N.cumsum(0)
        segment_K = torch.repeat_interleave(keys_N)
        within_K = torch.arange(len(segment_K), device=keys_N.device) - (ends_N - keys_N)[segment_K]
        own_K = within_K - before_N[segment_K]
        return cls(
            index_K=torch.where(own_K < 0, prompt_starts_N[segment_K] + within_K, starts_N[segment_K] + own_K),
            query_ends_N=F.pad(lengths_N.cumsum(0), (1, 0)).int(),
            key_ends_N=F.pad(ends_N, (1, 0)).int(),
            longest_query=int(lengths_N.max()),
            longest_keys=int(keys_N.max()),
            num_tokens=int(lengths_N.sum()),
        )


def serves(*states_SHD: Tensor) -> bool:
    """Whether the kernels support queries, keys and values of this kind on their device."""
    query = states_SHD[0]
    dim = query.shape[-1]
    return (
        query.device.type == "cuda"
        and {(each.dtype, each.shape[-1]) for each in states_SHD} == {(query.dtype, dim)}
        and query.dtype in (torch.bfloat16, torch.float16)
        and dim <= LARGEST_HEAD
        and dim % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= OLDEST_GPU
    )


def flash_attention(
    query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, segments: FlashSegments, *, scale: float, window: int | None
) -> Tensor:
    """softmax(scale * q k) v of each token over its prompt and its own segment up to itself: [S, Hq, D].

    With a window, only the last `window` of these keys. Heads of queries are a multiple of those of keys. The tokens
    after the last segment get zeros.
    """
    used, filler = segments.num_tokens, len(query_SHD) - segments.num_tokens
    keys, values = (_Gathered.apply(each[:used], segments.index_K) for each in (key_SHD, value_SHD))
    output: Tensor = _kernel(
        query_SHD[:used],
        keys,
        values,
        segments.query_ends_N,
        segments.key_ends_N,
        segments.longest_query,
        segments.longest_keys,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )[0]
    return F.pad(output, (0, 0, 0, 0, 0, filler)) if filler else output


class _Gathered(torch.autograd.Function):
    """index_select along the first dimension; gradients of the copies of a key are summed in float32."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(states)
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        summed = torch.zeros(ctx.rows, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return summed.index_add_(0, index, grad.float()).to(grad.dtype), None
