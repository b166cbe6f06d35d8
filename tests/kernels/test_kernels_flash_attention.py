"""FlashAttention over packed rows: its segments with a slow stand-in on a CPU, and the kernels where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.kernels import flash_attention as module
from flatpeak.kernels.flash_attention import FlashSegments, flash_attention, serves
from flatpeak.policy import training_attention
from flatpeak.policy.model import Policy
from flatpeak.types import Batch
from support.architectures import ARCHITECTURES
from support.models import tiny_model
from support.policies import Tokenizer, gradients, largest_gap, tokens_and_weights, uneven_batch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def one_segment_at_a_time(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_keys: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor]:
    """What torch's kernel computes, in plain operations: causal, with queries aligned to the end of their keys."""
    assert (dropout, causal, debug, window_size_right) == (0.0, True, False, 0)
    outputs = []
    queries_N, keys_N = query_ends.diff().tolist(), key_ends.diff().tolist()
    assert (max(queries_N), max(keys_N)) == (longest_query, longest_keys)
    for q, k, v in zip(query.split(queries_N), key.split(keys_N), value.split(keys_N), strict=True):
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        distance = (
            torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q) - torch.arange(len(k), device=q.device)
        )
        hidden = distance < 0 if window_size_left < 0 else (distance < 0) | (distance > window_size_left)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return (torch.cat(outputs),)


def use_stand_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the stand-in serve all tensors, on any device; the list gets the number of keys of each of its calls."""
    calls: list[int] = []

    def kernel(query: Tensor, key: Tensor, *others: Any, **settings: Any) -> tuple[Tensor]:
        calls.append(len(key))
        return one_segment_at_a_time(query, key, *others, **settings)

    monkeypatch.setattr(module, "_kernel", kernel)
    monkeypatch.setattr(training_attention, "serves", lambda *states: True)
    return calls


@pytest.mark.parametrize("layout", ["llama", "mistral", "qwen2 windowed"])
@pytest.mark.parametrize("batch", [uneven_batch(), uneven_batch(seed=1)], ids=["one", "two"])
def test_packed_passes_by_flash_attention_are_those_in_blocks(
    layout: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, settings = ARCHITECTURES[layout]
    policy = Policy(tiny_model(kind, scale=5.0, **settings).eval(), Tokenizer())
    policy.kernels.choose("torch", unserved=None)
    weights_T = tokens_and_weights(batch)
    expected_T, _ = policy.token_logprobs(batch, temperature=0.8)
    expected = gradients(policy, (weights_T * expected_T).sum())
    calls = use_stand_in(monkeypatch)
    result_T, _ = policy.token_logprobs(batch, temperature=0.8)
    result = gradients(policy, (weights_T * result_T).sum())
    torch.testing.assert_close(result_T, expected_T, atol=2e-5, rtol=1e-5)
    assert largest_gap(result, expected) < 2e-5
    keys = sum(map(len, batch.prompts)) + sum(
        len(batch.prompts[p]) + length
        for p, length in zip(batch.prompt_N.tolist(), batch.lengths_N.tolist(), strict=True)
    )
    assert calls == [keys] * policy.causal.config.num_hidden_layers


def test_segments_are_in_the_order_of_the_row_and_gather_prompts_before_responses() -> None:
    # The row: prompt 0 at 0..1, prompt 1 at 2..4, a response to prompt 1 at 5..6, a response to prompt 0 at 7.
    segments = FlashSegments.build(torch.tensor([2, 0, 7, 5]), torch.tensor([3, 2, 1, 2]), torch.tensor([0, 1, 1, 0]))
    assert segments.query_ends_N.tolist() == [0, 2, 5, 7, 8]
    assert segments.key_ends_N.tolist() == [0, 2, 5, 10, 13]
    assert segments.index_K.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 0, 1, 7]
    assert (segments.longest_query, segments.longest_keys, segments.num_tokens) == (3, 5, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_on_a_cpu_are_not_served(dtype: torch.dtype) -> None:
    assert not serves(*(torch.zeros(3, 2, 8, dtype=dtype),) * 3)


@needs_gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (12, 2, 128), (14, 2, 64), (8, 1, 256), (3, 3, 80)])
@pytest.mark.parametrize("window", [None, 1, 37, 300])
def test_on_a_gpu_the_kernels_are_the_softmax_of_one_segment_at_a_time(
    heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    lengths = [5, 130, 1, 64, 700, 3, 257, 1]
    prompt_N = torch.tensor([0, 1, 2, 0, 1, 1, 2, 0])
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    segments = FlashSegments.build(starts.cuda(), torch.tensor(lengths).cuda(), prompt_N.cuda())
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), count, dim) for count in (heads, kv_heads, kv_heads)]
    exact = [torch.randn(shape, generator=generator).bfloat16().double().requires_grad_() for shape in shapes]
    states = [each.detach().cuda().bfloat16().requires_grad_() for each in exact]
    assert serves(*states)
    settings: dict[str, Any] = {"scale": dim**-0.5, "window": window}
    result = flash_attention(*states, segments, **settings)
    index, ends = segments.index_K.cpu(), (segments.query_ends_N.cpu(), segments.key_ends_N.cpu())
    (expected,) = one_segment_at_a_time(
        exact[0],
        exact[1][index],
        exact[2][index],
        *ends,
        segments.longest_query,
        segments.longest_keys,
        0.0,
        True,
        False,
        scale=dim**-0.5,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    gradient = torch.randn(result.shape, generator=generator)
    result.backward(gradient.cuda().bfloat16())
    expected.backward(gradient.bfloat16().double())
    assert float((result.detach().cpu().double() - expected).abs().max()) < 0.03
    for ours, theirs in zip(states, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        # With a window of one, the gradient of queries and keys is zero.
        assert float((ours.grad.cpu().double() - theirs.grad).norm()) < 0.01 * float(theirs.grad.norm()) + 0.1
