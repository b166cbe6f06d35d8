"""The attention function that replaces that of transformers modules, and attention over packed rows.

Modules run unmodified: `attention_forward` is registered with transformers by name, reads the layer's settings into an
`AttentionRule`, and passes the rest to the context of the forward pass: `PackedContext` for packed rows (training,
scoring, and the prefill of prompts), or `kv_cache.KeyValueCache` for decoding. Each call gets its context as the
model's keyword argument `attention_context`, not from a global variable, which would fail with threads and with
activation checkpointing, because it recomputes layers in the backward pass.

In a packed row, prompts attend to themselves, and responses to their prompt and themselves, in blocks of query
positions (kernels.block_attention). Two kinds of kernels need neither padding nor blocks: native ones on a CPU
(policy.native_training), for layers without window, soft cap and dropout; and FlashAttention on a GPU
(kernels.flash_attention), for layers in half precision without soft cap and dropout.

Shape letters: B rows, L positions, Hq query heads, Hkv key heads, D head dimension, P prompts, N responses, Lp columns
of prompts, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from flatpeak.kernels.block_attention import (
    AttentionRule,
    Block,
    alike,
    attend_in_blocks,
    attend_to_prefixes,
    cut_blocks,
)
from flatpeak.kernels.flash_attention import FlashSegments, flash_attention, serves
from flatpeak.kernels.native.training_pass import attention
from flatpeak.policy.packing import PackedRow, attention_groups, flash_segments

ATTENTION_NAME = "flatpeak"
"""The name of the function among transformers' implementations of attention."""
NO_MASK = torch.empty(0, 0, 0, 0)
"""The mask argument of the model: transformers passes a 4-dimensional mask on unchanged. Without a mask it would derive
one from positions, which waits for a GPU at every token."""
IGNORABLE = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"})
"""Keywords that models pass to attention although they do not change its result."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_context: AttentionContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers. Raises UnservedAttentionError for keywords that it does not
    support."""
    if attention_context is None:
        raise UnservedAttentionError(
            "a flatpeak policy holds this model: use `with policy.plain_attention() as model:` around your forward "
            "pass or generate(); flatpeak.train gives the policy to a sampler that is a factory, "
            "sampler=lambda policy: MySampler(policy)"
        )
    unknown = sorted(name for name, given in others.items() if given is not None and name not in IGNORABLE)
    if unknown or (attention_mask is not None and attention_mask.numel()):
        raise UnservedAttentionError(
            f"attention was called with {unknown or ['attention_mask']}, which the native engine does not support"
        )
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnservedAttentionError("attention modules have no layer_idx")
    rule = AttentionRule(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        dropout=dropout,
    )
    return attention_context.attend(layer, query, key, value, rule), None


def register_attention() -> None:
    """Register the function with transformers, with an empty mask function, because contexts make their masks."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)


class UnservedAttentionError(RuntimeError):
    """Raised if the architecture needs something that this attention function does not support."""


class AttentionContext(Protocol):
    """The keys and values that one forward pass attends over, with its masks."""

    calls: list[int]
    """The layer index of every call, for the start-up probe."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Attend with query [B, Hq, L, D]; key and value [B, Hkv, L, D] are the new tokens': [B, L, Hq, D]."""
        ...


class PackedContext:
    """Attention within a packed row: prompts to themselves, responses to their prompt and to themselves."""

    def __init__(self, row: PackedRow, *, keep_prompts: bool = False, native: bool = False) -> None:
        """`native`: use native kernels for the layers they support."""
        self.row = row
        self._groups = attention_groups(row) if native else None
        self.calls: list[int] = []
        self.kept: dict[int, tuple[Tensor, Tensor]] | None = {} if keep_prompts else None
        """Per layer the keys and values of the prompts, [tokens, Hkv, D] in the order of the row, for a prefill."""
        self._prompt_masks: dict[tuple[int, int], Tensor] = {}
        self._blocks: dict[tuple[int, int | None], list[Block]] = {}
        self._segments: FlashSegments | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Attend within the row; see AttentionContext, here with B = 1 and L the row's length."""
        self.calls.append(layer)
        states = [each[0].transpose(0, 1) for each in (query, key, value)]  # [S, H, D]
        if self.kept is not None:
            prompts = sum(len(segments.padded_index) for segments in self.row.prompts)
            self.kept[layer] = (states[1][:prompts], states[2][:prompts])
        if self._groups is not None and rule.plain and rule.window is None and alike(*states, dtype=torch.float32):
            return attention(states, self._groups, rule.scale)[None]
        flash = self._flash_segments(rule, states)
        if flash is not None:
            query, key, value = states
            return flash_attention(query, key, value, flash, scale=rule.scale, window=rule.window)[None]
        outputs: list[Tensor] = []
        on_prompts: list[tuple[Tensor, Tensor]] = []
        start = 0
        for segments in self.row.prompts:
            end = start + len(segments.padded_index)
            q, k, v = (segments.pad(each[start:end]) for each in states)
            outputs.append(segments.unpad(self._on_prompts(rule, q, k, v)))
            on_prompts.append((k, v))
            start = end
        for index, bundle in enumerate(self.row.responses):
            end = start + len(bundle.segments.padded_index)
            q, k, v = (bundle.segments.pad(each[start:end]) for each in states)
            blocks = self._blocks_of(index, rule.window)
            attended = attend_in_blocks(rule, q, on_prompts[bundle.group], (k, v), bundle.prompt_N, blocks)
            outputs.append(bundle.segments.unpad(attended))
            start = end
        num_filler = query.shape[2] - start
        if num_filler:
            outputs.append(query.new_zeros(num_filler, query.shape[1], value.shape[3]))
        return torch.cat(outputs)[None]

    def _flash_segments(self, rule: AttentionRule, states: Sequence[Tensor]) -> FlashSegments | None:
        """The segments for FlashAttention; None if it does not support the call."""
        if rule.softcap is not None or rule.dropout or not serves(*states):
            return None
        self._segments = self._segments or flash_segments(self.row)
        return self._segments

    def _on_prompts(self, rule: AttentionRule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention among the prompts of one group."""
        if self.kept is not None and query.device.type == "cpu":
            return attend_to_prefixes(rule, query, key, value)
        return rule(query, key, value, self._prompt_mask(query.shape[2], rule.window))

    def _prompt_mask(self, longest: int, window: int | None) -> Tensor | None:
        """The mask; None (plain causal, since padding is on the right) unless a window is shorter than the prompts."""
        if window is None or window >= longest:
            return None
        if (longest, window) not in self._prompt_masks:
            position = torch.arange(longest, device=self.row.token_ids_S.device)
            distance = position[:, None] - position[None, :]
            self._prompt_masks[longest, window] = (distance >= 0) & (distance < window)
        return self._prompt_masks[longest, window]

    def _blocks_of(self, index: int, window: int | None) -> list[Block]:
        # The same in every layer with this window.
        if (index, window) not in self._blocks:
            bundle = self.row.responses[index]
            prompts = self.row.prompts[bundle.group]
            prompt_lengths_N = prompts.lengths.index_select(0, bundle.prompt_N)
            self._blocks[index, window] = cut_blocks(bundle.segments.lengths, prompt_lengths_N, prompts.longest, window)
        return self._blocks[index, window]


def last_hidden(trunk: nn.Module, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
    """The last hidden states [B, L, D] of tokens at positions [B, L], by a model without its output layer."""
    hidden: Tensor = trunk(
        input_ids=tokens,
        attention_mask=NO_MASK,
        position_ids=positions,
        use_cache=False,
        attention_context=context,
    ).last_hidden_state
    return hidden
