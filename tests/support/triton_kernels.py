"""Triton kernels beside plain torch, by Triton's interpreter on a CPU or on a GPU.

Run as a script it prints the largest difference of every comparison as JSON, relative to the largest value where that
is above 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatpeak.functional import logprobs
from flatpeak.kernels import decode_layer_triton as layer_kernels
from flatpeak.kernels import gpu_kernels
from flatpeak.policy.decoding_attention import GpuDecodeAttention
from flatpeak.policy.gpu_decoding import FusedDecoding
from flatpeak.policy.kv_cache import KeyValueCache, graded_buckets
from flatpeak.policy.model import Policy
from support.models import letter_tokenizer, tiny_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama with a window that it ignores": ("llama", {"sliding_window": 5}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "qwen3 with norms of heads": ("qwen3", {}),
}
HEADS = {
    "plain": {},
    "temperature and scale": {"temperature": 0.7, "logit_scale": 1.7},
    "soft cap": {"temperature": 0.7, "logit_scale": 1.7, "softcap": 3.0},
}


def differences(device: str) -> Iterator[tuple[str, float]]:
    """(name of the comparison, largest difference)."""
    torch.manual_seed(0)
    for name, dtype in DTYPES.items():
        for what, ours, theirs in [*norms(dtype, device), *rotations(dtype, device), *gates(dtype, device)]:
            yield f"{name} {what}", gap(ours, theirs)
        for head, settings in HEADS.items():
            for entropy in (0.0, 0.3):
                for what, ours, theirs in token_logprobs(dtype, device, entropy, settings):
                    yield f"{name} {what}, {head}, entropy {entropy}", gap(ours, theirs)
        for kernels, (_, check) in gpu_kernels._CHECKS.items():
            yield f"{name} check of {kernels}", check(torch.device(device), dtype)
    for model in MODELS:
        yield f"float32 decoding {model}", gap(*decoded(model, device))


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value if that is above 1; infinite for NaN."""
    difference = float((ours.double() - theirs.double()).abs().max())
    return difference / max(1.0, float(theirs.abs().max())) if difference == difference else float("inf")


def norm(states: Tensor, weight: Tensor) -> Tensor:
    """transformers' RMS norm."""
    wide = states.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(states.dtype)


def norms(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    update, residual, weight = (torch.randn(*shape).to(device, dtype) for shape in ((5, 96), (5, 96), (96,)))
    changed = residual.clone()
    yield (
        "norm of a sum",
        layer_kernels.add_and_normalize(update, changed, weight, 1e-6),
        norm(update + residual, weight),
    )
    yield "sum", changed, update + residual
    unchanged = residual.clone()
    yield "norm", layer_kernels.add_and_normalize(None, unchanged, weight, 1e-6), norm(residual, weight)
    yield "residual", unchanged, residual


def rotations(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    rows, heads, kv_heads, dim, columns = 5, 6, 2, 80, 7
    lengths = torch.tensor([0, 3, 6, 2, 1, 0], device=device)
    for normed in (False, True):
        states = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(device, dtype)
        cosines, sines = torch.randn(2, rows, dim).to(device, dtype).unbind()
        weights = torch.randn(2, dim).to(device, dtype).unbind()
        keys, values = torch.zeros(2, rows + 1, kv_heads, columns, dim).to(device, dtype).unbind()
        query = layer_kernels.rotate_and_store(
            states, cosines, sines, keys, values, lengths, (*weights, 1e-6) if normed else None, heads=heads
        )
        split = states.view(rows, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
        rotated = []
        for part, weight in zip(split[:2], weights, strict=True):
            part = norm(part, weight) if normed else part
            turned = torch.cat([-part[..., dim // 2 :], part[..., : dim // 2]], -1)
            rotated.append(
                (part.float() * cosines[:, None].float() + turned.float() * sines[:, None].float()).to(dtype)
            )
        name = "normed " if normed else ""
        yield f"{name}rotated queries", query, rotated[0]
        for kind, memory, expected in (("keys", keys, rotated[1]), ("values", values, split[2])):
            whole = torch.zeros_like(memory)
            for row in range(rows):
                whole[row, :, lengths[row]] = expected[row]
            yield f"{name}stored {kind}", memory, whole


def gates(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    states = torch.randn(5, 2 * 1500).to(device, dtype)
    gate, up = states.chunk(2, 1)
    yield "gate", layer_kernels.gated(states), F.silu(gate) * up


def token_logprobs(
    dtype: torch.dtype, device: str, entropy: float, settings: dict[str, Any]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    tokens, dim, vocabulary = 37, 16, 5000
    draw = [torch.randn(*shape).to(device, dtype) for shape in ((tokens, dim), (vocabulary, dim), (vocabulary,))]
    # A column of a matrix: the kernels read targets that lie next to each other.
    targets, weights = torch.randint(vocabulary, (tokens, 2), device=device)[:, 0], torch.randn(tokens, device=device)
    targets[0] = vocabulary - 1
    results = []
    works = logprobs.works
    for fused in (True, False):
        hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in draw)
        logprobs.works = lambda *_, fused=fused, **kind: fused  # type: ignore[assignment,misc]
        given: dict[str, Any] = {"bias_V": bias, "chunk_size": 10, **settings}
        of_targets, entropies = logprobs.token_logprobs(hidden, weight, targets, **given)
        ((of_targets * weights).sum() + entropy * entropies.sum()).backward()
        results.append([of_targets.detach(), entropies.detach(), *(each.grad for each in (hidden, weight, bias))])
    logprobs.works = works
    names = ("log-probabilities", "entropy", "gradient of states", "gradient of the weight", "gradient of the bias")
    yield from zip(names, *results, strict=True)  # type: ignore[misc]


def decoded(name: str, device: str) -> tuple[Tensor, Tensor]:
    """The logits of six steps of three slots, by the fused step and by the model's modules."""
    kind, settings = MODELS[name]
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    model = tiny_model(kind, scale=4.0, **sizes, **settings)
    policy = Policy(model.to(device).eval(), letter_tokenizer())
    assert policy.native, policy.notice
    policy.kernels.choose("torch", unserved=None)
    results = []
    with torch.no_grad():
        for fused in (FusedDecoding(policy.causal), None):
            policy._fused = None
            cache = KeyValueCache(
                slots=3,
                entries=2,
                buckets=graded_buckets([7, 2], 2),
                new_tokens=10,
                key_multiple=64,
                attention=GpuDecodeAttention(),
                device=torch.device(device),
            )
            policy.prefill(cache, [[3, 4, 5, 6, 7, 8, 9], [5, 3]], [0, 1])
            cache.admit([0, 1, 2], [0, 1, 0])
            policy._fused = fused
            steps = (torch.tensor([3 + step, 9 - step, 4], device=device) for step in range(6))
            results.append(torch.stack([policy.decode(cache, tokens) for tokens in steps]))
    return results[0], results[1]


if __name__ == "__main__":
    print(json.dumps(dict(differences("cpu"))))
