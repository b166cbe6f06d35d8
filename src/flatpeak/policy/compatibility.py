"""The models that flatpeak's attention supports: types proven by tests, and a probe of each loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flatpeak.errors import UserError
from flatpeak.policy.kv_cache import KeyValueCache
from flatpeak.policy.linears import Head
from flatpeak.policy.packing import PackedRow, pack_prompts
from flatpeak.policy.training_attention import PackedContext, UnservedAttentionError
from flatpeak.types import PackedCompletions


class PolicyParts(Protocol):
    """The parts of a policy that the probe, self-tests and native kernels use."""

    model: Any
    causal: Any
    head: Head
    context_length: int | None
    gathered: Any

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        ...

    @property
    def below_float32(self) -> bool:
        """Whether any computation in the model rounds more coarsely than float32."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the model."""
        ...

    def use_kernels(self, native: bool) -> None:
        """Use native kernels for packed passes if `native`, else torch."""
        ...

    def packed_logprobs(self, batch: PackedCompletions, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability of, and entropy at, each response token."""
        ...

    def hidden(self, row: PackedRow, context: PackedContext) -> Tensor:
        """The hidden states of a packed row."""
        ...

    def open(self, *, slots: int, entries: int, prompt_lengths: Sequence[int], new_tokens: int) -> Any:
        """Memory for a request; see protocols.Decoder."""
        ...

    def prefill(self, state: KeyValueCache, prompts: Sequence[Sequence[int]], entries: Sequence[int]) -> Tensor:
        """Read prompts into these entries; see protocols.Decoder."""
        ...

    def decode(self, state: KeyValueCache, tokens_R: Tensor) -> Tensor:
        """Append a token to each slot; see protocols.Decoder."""
        ...

    def plain_attention(self) -> AbstractContextManager[Any]:
        """A context with the model under its own attention."""
        ...


PROVEN = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
        "starcoder2",
    }
)
"""Model types that tests/policy proves equal to the plain forward pass, packed and decoded."""
SHARED_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary scalings by which the longest sequence of a batch changes all other sequences."""
PROBE_TOLERANCE, COARSE_TOLERANCE = 1e-3, 5e-2
"""The tolerance for logits, relative to the largest, in float32 and where something rounds more coarsely: weights in
bfloat16, autocast, products in TF32. The latter is wide because a resumed run probes the trained weights and must
decide as before (the largest gap of 14 model types in bfloat16 was 2.4%)."""


def unsupported(model: Any) -> str | None:
    """The reason why a model's configuration requires the fallback; None if there is none."""
    config = model.config
    if config.model_type not in PROVEN:
        return f"model type {config.model_type!r} is not tested with the native engine"
    if SHARED_ROPE & _rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        return "its rotary embedding rescales with the longest sequence of a batch (dynamic or longrope)"
    if not hasattr(model, "set_attn_implementation"):
        return "its attention cannot be replaced"
    return None


def _rope_types(settings: Any) -> set[str]:
    if not isinstance(settings, dict):
        return set()
    nested = [_rope_types(value) for value in settings.values()]
    return {str(settings.get(key)) for key in ("rope_type", "type") if key in settings}.union(*nested)


@torch.no_grad()
def probe(policy: PolicyParts) -> str | None:
    """Compare packed and decoded logits with the plain forward pass on two short prompts; None if they agree.

    The prompts have 8 and 4 tokens, or fewer if the context is shorter.
    """
    layers = policy.causal.config.num_hidden_layers
    vocabulary = policy.head.linear.weight.shape[0]
    longest = min(8, policy.context_length or 8)
    lengths = (longest, max(2, longest // 2))
    long, short = [
        [(7 * step + 3 * shift) % vocabulary for step in range(1, length + 1)] for shift, length in enumerate(lengths)
    ]
    try:
        row = pack_prompts([long[:-1], short[:-1]], device=policy.device, multiple=1)
        context = PackedContext(row)
        policy.model.eval()
        packed = policy.head.logits_of_weights(policy.hidden(row, context))
        if sorted(context.calls) != list(range(layers)):
            return f"its attention ran on layers {sorted(context.calls)} instead of once on each of {layers}"
        prompts = [long[:-1], short[:-1]]
        state = policy.open(slots=4, entries=2, prompt_lengths=[len(prompt) for prompt in prompts], new_tokens=1)
        policy.prefill(state, prompts, [0, 1])
        state.admit([0, 1, 2, 3], [0, 1, 0, 1])
        decoded = policy.decode(state, torch.tensor([long[-1], short[-1]] * 2, device=policy.device))
        if sorted(state.calls) != list(range(layers)):
            return f"decoding ran attention on layers {sorted(state.calls)} instead of once on each of {layers}"
    except (UnservedAttentionError, TypeError, ValueError, IndexError, RuntimeError) as error:
        return str(error)  # an unknown model may fail in any way without a usual mask
    start = 0
    for index, tokens in enumerate((long, short)):
        with policy.plain_attention() as model:
            ids = torch.tensor([tokens], device=policy.device)
            plain = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()
        if bool(plain.isnan().any()):
            raise UserError(
                "the model's logits are NaN before any step: its weights are damaged, or had diverged before they were "
                "saved; download them again, or choose another model"
            )
        ours = torch.cat([packed[start : start + len(tokens) - 1], decoded[index : index + 1]])
        start += len(tokens) - 1
        gap = (ours - plain).abs().max().item()
        tolerance = COARSE_TOLERANCE if policy.below_float32 else PROBE_TOLERANCE
        if not gap <= tolerance * max(1.0, plain.abs().max().item()):
            return f"native logits differ from the plain forward pass by {gap:.2g}"
    return None
