"""flatpeak's attention function, which unmodified transformers modules call in place of their own.

What it attends over travels with each call as the keyword argument `attention_context` of the model, never as a
global: globals break under threads and under activation checkpointing, whose recomputation runs in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from flatpeak.policy.packing import PackedRow
from flatpeak.policy.response_attention import BLOCK, SUMMED, Block, attend_in_blocks, blocks

NAME = "flatpeak"
NO_MASK = torch.empty(0, 0, 0, 0)
"""What the model is given for a mask: transformers hands a 4-dimensional one on as it is, and looks for nothing in
positions, which on a GPU would wait for the device at every token."""
IGNORABLE = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"})
"""Keywords that models hand down to attention although they do not change its result."""


class UnservedAttentionError(RuntimeError):
    """The architecture asks for something this attention function does not do."""


class AttentionContext(Protocol):
    """What one forward pass attends over."""

    calls: list[int]
    """The layer index of every call, for the start-up probe."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """query [B, Hq, L, D], key and value [B, Hkv, L, D] of the new tokens -> [B, L, Hq, D]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRule:
    """How one layer scores keys: softmax(softcap * tanh(scale * q k / softcap)), within a window."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of query [B, Hq, L, D] over key, value [B, Hkv, K, D]; mask bool, or None for plain causal."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=self.dropout,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        repeats = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(repeats, 1).transpose(-1, -2) * self.scale
        scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")).float(), dim=-1).to(value.dtype)
        return F.dropout(weights, self.dropout) @ value.repeat_interleave(repeats, 1)


class PackedContext:
    """Attention within a packed row: prompts to themselves, responses to their prompt and to themselves."""

    def __init__(self, row: PackedRow, *, keep_keys: bool = False) -> None:
        self.row = row
        self.calls: list[int] = []
        self.kept: dict[int, tuple[Tensor, Tensor]] | None = {} if keep_keys else None
        """Per layer the prompts' keys and values, [tokens, Hkv, D] as they stand in the row."""
        self._prompt_masks: dict[tuple[int, int], Tensor] = {}
        self._cuts: dict[tuple[int, int | None], list[Block]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See AttentionContext; B is 1 and L the row's length."""
        self.calls.append(layer)
        states = [each[0].transpose(0, 1) for each in (query, key, value)]  # [S, H, D]
        outputs: list[Tensor] = []
        on_prompts: list[tuple[Tensor, Tensor]] = []
        start = 0
        for segments in self.row.prompts:
            end = start + len(segments.slots)
            q, k, v = (segments.pad(each[start:end]) for each in states)
            outputs.append(segments.unpad(self._on_prompts(rule, q, k, v)))
            on_prompts.append((k, v))
            start = end
        if self.kept is not None:
            self.kept[layer] = (states[1][:start], states[2][:start])
        for index, bundle in enumerate(self.row.responses):
            end = start + len(bundle.segments.slots)
            q, k, v = (bundle.segments.pad(each[start:end]) for each in states)
            cut = self._blocks(index, rule.window)
            attended = attend_in_blocks(rule, q, on_prompts[bundle.group], (k, v), bundle.prompt_N, cut)
            outputs.append(bundle.segments.unpad(attended))
            start = end
        num_filler = query.shape[2] - start
        if num_filler:
            outputs.append(query.new_zeros(num_filler, query.shape[1], value.shape[3]))
        return torch.cat(outputs)[None]

    def _on_prompts(self, rule: AttentionRule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention among the prompts of one group."""
        if self.kept is not None and query.device.type == "cpu":
            return _attend_to_prefixes(rule, query, key, value)
        return rule(query, key, value, self._prompt_mask(query.shape[2], rule.window))

    def _prompt_mask(self, longest: int, window: int | None) -> Tensor | None:
        """None (plain causal: padding stands right of every token) unless a window is shorter than the prompts."""
        if window is None or window >= longest:
            return None
        if (longest, window) not in self._prompt_masks:
            place = torch.arange(longest, device=self.row.token_ids_S.device)
            distance = place[:, None] - place[None, :]
            self._prompt_masks[longest, window] = (distance >= 0) & (distance < window)
        return self._prompt_masks[longest, window]

    def _blocks(self, index: int, window: int | None) -> list[Block]:
        if (index, window) not in self._cuts:
            bundle = self.row.responses[index]
            prompts = self.row.prompts[bundle.group]
            prompt_lengths_N = prompts.lengths.index_select(0, bundle.prompt_N)
            self._cuts[index, window] = blocks(bundle.segments.lengths, prompt_lengths_N, prompts.longest, window)
        return self._cuts[index, window]


def _attend_to_prefixes(rule: AttentionRule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention [P, H, L, D], SUMMED positions and then block by block, each over the keys up to its end.

    What a block sums is then the same whatever the length of the other prompts, and so are the bits of the sum.
    """
    length = query.shape[2]
    if length > SUMMED:
        key, value = (F.pad(states, (0, 0, 0, -length % BLOCK)) for states in (key, value))
    place = torch.arange(key.shape[2], device=query.device)
    pieces = []
    for start, end in pairwise([0, *range(SUMMED, length, BLOCK), min(-(-length // BLOCK) * BLOCK, key.shape[2])]):
        distance = place[start : min(end, length), None] - place[:end]
        mask = distance >= 0 if rule.window is None else (distance >= 0) & (distance < rule.window)
        causal = start == 0 and rule.window is None
        pieces.append(rule(query[:, :, start:end], key[:, :, :end], value[:, :, :end], None if causal else mask))
    return torch.cat(pieces, 2)


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
    """The function registered with transformers. Raises UnservedAttentionError at any keyword it would not honour."""
    if attention_context is None:
        raise UnservedAttentionError(
            "this model is held by a flatpeak policy: use `with policy.plain_attention() as model:` around a forward "
            "pass or generate() of your own; flatpeak.train gives the policy to a sampler that is a factory, "
            "sampler=lambda policy: MySampler(policy)"
        )
    unknown = sorted(name for name, given in others.items() if given is not None and name not in IGNORABLE)
    if unknown or (attention_mask is not None and attention_mask.numel()):
        raise UnservedAttentionError(
            f"attention was given {unknown or ['attention_mask']}, which the native engine ignores"
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


def register() -> None:
    """Make the function known to transformers. Masks are the context's business: the mask function makes none."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
