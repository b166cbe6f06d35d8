"""Models of the GPU benchmark: Qwen2.5's shapes with random weights, and the hardware's limits for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.models import word_tokenizer
from benchmarks.harness.workloads import EOS, PAD
from flatpeak.policy.model import Policy

NEVER = -1e4
"""A bias on the end-of-sequence logit that no random logit can offset."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of the published config.json."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    """Whether the output layer is tied to the embedding."""

    @property
    def head_dim(self) -> int:
        """The dimensions of a head of queries, keys or values."""
        return self.hidden // self.heads

    @property
    def head_parameters(self) -> int:
        """Weights of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Weights in the matrix products of all layers."""
        kv = self.kv_heads * self.head_dim
        return self.layers * self.hidden * (2 * self.hidden + 2 * kv + 3 * self.intermediate)

    @property
    def kv_numbers(self) -> int:
        """Numbers in the keys and values of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "0.5B": Shape(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, vocabulary=151_936, tied=True),
    "1.5B": Shape(hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, vocabulary=151_936, tied=True),
    "7B": Shape(hidden=3584, intermediate=18_944, layers=28, heads=28, kv_heads=4, vocabulary=152_064, tied=False),
    "tiny": Shape(hidden=64, intermediate=96, layers=2, heads=2, kv_heads=1, vocabulary=256, tied=True),
}


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The rates of the device in the part `roofline`."""

    bytes_per_second: float
    flops_per_second: float
    dtype: torch.dtype


def decode_ceiling(shape: Shape, peaks: Peaks, *, batch: int, group: int, prompt: float, own: float) -> float:
    """Tokens per second limited by reading weights, keys and values (a group's prompt once), or by products.

    `own` is the mean number of a completion's tokens while it is decoded.
    """
    parameters = shape.layer_parameters + shape.head_parameters
    matmul_seconds = max(
        parameters * peaks.dtype.itemsize / peaks.bytes_per_second, 2 * parameters * batch / peaks.flops_per_second
    )
    read = shape.kv_numbers * peaks.dtype.itemsize * (batch * own + batch / group * prompt)
    return batch / (matmul_seconds + read / peaks.bytes_per_second)


def training_flops(shape: Shape, *, prompts: list[int], responses: list[list[int]], shared: bool) -> float:
    """Operations of one forward and backward pass without recomputation.

    `responses[p]` are the lengths of the completions of prompt p. Without sharing, a prompt is read once per
    completion. The output layer computes response tokens only.
    """
    tokens = pairs = scored = 0.0
    for prompt, lengths in zip(prompts, responses, strict=True):
        copies = 1 if shared else len(lengths)
        tokens += copies * prompt + sum(lengths)
        pairs += copies * prompt * (prompt + 1) / 2 + sum(n * prompt + n * (n + 1) / 2 for n in lengths)
        scored += sum(lengths)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    return 3 * (2 * tokens * shape.layer_parameters + 2 * scored * shape.head_parameters + attention)


def build_model(size: str, *, device: str, dtype: torch.dtype, mean_length: float | None, longest: int) -> Any:
    """A model with random weights, and a bias on the end-of-sequence logit.

    The bias ends completions with a probability of about 1 / mean_length at each token, so that their lengths are
    skewed like real ones (geometric) and the same for every contender; None: they never end before the limit.
    """
    shape = SHAPES[size]
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=longest,
        tie_word_embeddings=shape.tied,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM._from_config(config, dtype=dtype)
        bias = torch.zeros(shape.vocabulary, dtype=dtype)
    # A logit is the product of a normalized state and a row of weights: normal, with this variance.
    variance = shape.hidden * config.initializer_range**2
    bias[EOS] = NEVER if mean_length is None else math.log(shape.vocabulary / mean_length) + variance / 2
    model.lm_head.bias = nn.Parameter(bias, requires_grad=False)
    return model


def build_policy(size: str, *, device: str, dtype: torch.dtype, mean_length: float | None, longest: int) -> Policy:
    """The model with flatpeak's attention; RuntimeError if flatpeak would use a fallback."""
    model = build_model(size, device=device, dtype=dtype, mean_length=mean_length, longest=longest)
    policy = Policy(model, word_tokenizer(SHAPES[size].vocabulary))
    if not policy.native:
        raise RuntimeError(f"the native engine does not support this model here: {policy.notice}")
    return policy
