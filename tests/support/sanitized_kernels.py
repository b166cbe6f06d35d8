"""Random models, rows, draws and training passes through native kernels, for sanitizers; no result is checked.

    python tests/support/sanitized_kernels.py LIBRARY

Nothing but torch is loaded: under the address sanitizer an import of transformers takes longer than all of this.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch
from torch import Tensor

from flatpeak.kernels.native import build
from flatpeak.kernels.native.decode import Affine, ModelWeights, NativeCache, PackedModel
from flatpeak.kernels.native.training_pass import Groups, attention, gelu, rms_norm, swiglu

MODELS = 8
VOCABULARIES = (23, 64, 97)
STEPS = 10


def main() -> None:
    """Decode by the library that the command line names."""
    torch.set_num_threads(2)
    build._load = lambda level: ctypes.CDLL(sys.argv[1])
    rng = random.Random(7)
    for number in range(MODELS):
        dim = (4, 18, 64, 128)[number % 4]
        decode(rng, random_weights(rng, gelu=number % 3 == 0, dim=dim))
        train(rng, dim=dim)
    print("clean")


def random_weights(rng: random.Random, *, gelu: bool, dim: int) -> ModelWeights:
    """Weights of any sizes, of gpt2's kind (`gelu`) or llama's."""
    kv_heads = rng.choice((1, 2, 3))
    heads, inner, vocabulary = kv_heads * rng.choice((1, 3, 5)), rng.choice((17, 48, 130)), rng.choice(VOCABULARIES)
    hidden = rng.choice((5, 21, 64))
    bias = gelu or rng.random() < 0.5
    norm = lambda size: Affine(weight=torch.randn(size), bias=torch.randn(size) if gelu else None)  # noqa: E731
    product = lambda n, k: Affine(weight=torch.randn(n, k), bias=torch.randn(n) if bias else None)  # noqa: E731
    normed = {} if gelu or rng.random() < 0.5 else dict.fromkeys(("q_norm", "k_norm"), Affine(torch.randn(dim)))
    layers = [
        {
            "before": norm(hidden),
            "between": norm(hidden),
            "qkv": product((heads + 2 * kv_heads) * dim, hidden),
            "out": product(hidden, heads * dim),
            "up": product(inner if gelu else 2 * inner, hidden),
            "down": product(hidden, inner),
            **normed,
        }
        for _ in range(2)
    ]
    return ModelWeights(
        embedding=torch.randn(vocabulary, hidden),
        positions=torch.randn(200, hidden) if gelu else None,
        rope=None if gelu else lambda positions: (torch.rand(positions, dim // 2), torch.rand(positions, dim // 2)),
        last=norm(hidden),
        head=Affine(weight=torch.randn(vocabulary, hidden)),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        epsilon=1e-6,
        scale=dim**-0.5,
    )


class Buffer:
    """What a CompletionBuffer offers to native draws, one completion per slot and a dummy."""

    def __init__(self, slots: int) -> None:
        long = lambda *sizes: torch.zeros(*sizes, dtype=torch.int64)  # noqa: E731
        self.plain_draws: dict[str, Any] = {
            "temperature": 0.7,
            "keys": torch.randint(-(1 << 62), 1 << 62, (slots + 1,)),
            "ends": torch.tensor([1, 2]),
            "tokens": long(slots + 1, STEPS),
            "lengths": long(slots + 1),
            "logprobs": torch.zeros(slots + 1, STEPS),
            "ended": torch.zeros(slots + 1, dtype=torch.bool),
            "stopped": torch.zeros(slots + 1, dtype=torch.bool),
        }


def decode(rng: random.Random, weights: ModelWeights) -> None:
    """Let completions begin, move and end in slots, some of which stand empty."""
    vocabulary, slots, lengths = len(weights.embedding), rng.choice((1, 3, 9)), [1, rng.choice((16, 17)), 131]
    cache = NativeCache(PackedModel(weights), slots=slots, longest_prompt=131, new_tokens=STEPS)
    tokens = lambda count: [rng.randrange(vocabulary) for _ in range(count)]  # noqa: E731
    logits: Tensor = cache.prefill([tokens(length) for length in lengths], range(3))
    cache.admit(range(max(1, slots - 1)), [rng.randrange(3) for _ in range(max(1, slots - 1))])
    draw = cache.drawing(Buffer(slots))
    dummy = torch.full((slots,), slots)
    drawn = torch.tensor(tokens(slots))
    for step in range(STEPS):
        if step == 4 and slots > 2:
            cache.compact(([1], [0]), ([], []), [])
        if step == 6:
            cache.prefill([tokens(40)], [0])
            cache.admit([0], [0])
        logits = cache.decode(drawn)
        drawn = draw(logits, torch.arange(slots) if step % 4 else dummy)


def train(rng: random.Random, *, dim: int) -> None:
    """Differentiate attention in groups that fill their tensors to the last row, a norm and SwiGLU."""
    kv_heads, lengths = rng.choice((1, 2, 3)), torch.tensor([rng.choice((1, 15, 16, 17, 49, 100)) for _ in range(7)])
    segments = torch.stack([lengths.cumsum(0) - lengths, lengths], 1)
    groups = Groups(bounds=torch.tensor([0, 1, 4, 7]), segments=segments)
    heads = (kv_heads * rng.choice((1, 3)), kv_heads, kv_heads)
    states = [torch.randn(int(lengths.sum()), count, dim, requires_grad=True) for count in heads]
    attention(states, groups, dim**-0.5).square().sum().backward()
    rows, weight = torch.randn(rng.choice((1, 130)), 48, requires_grad=True), torch.randn(48, requires_grad=True)
    gelu(swiglu(rms_norm(rows, weight, 1e-6), rows)).square().sum().backward()


if __name__ == "__main__":
    main()
