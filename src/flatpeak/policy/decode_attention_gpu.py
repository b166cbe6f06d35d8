"""Attention of one new token per slot on a GPU: one kernel over the keys of the slot and its prompt.

A decoding step is captured as a CUDA graph and replayed, so nothing here may depend on a host value that changes from
token to token. The kernel reads lengths, prompts and tiles on the device; only moves of slots or prompts, which happen
between steps, rewrite its tables.
"""

from __future__ import annotations

from torch import Tensor

from flatpeak.kernels.decode_attention import decode_attention
from flatpeak.kernels.prompt_tiles import PromptTiles
from flatpeak.policy.kv_cache import KeyValueCache
from flatpeak.policy.training_attention import AttentionRule


class GpuDecodeAttention:
    """Implements kv_cache.DecodeAttention by `kernels.decode_attention`: Triton's kernel, or torch if that fails."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[int, int], PromptTiles] = {}
        self._batch_size = 0

    def rearranged(self, cache: KeyValueCache) -> None:
        """Update the tables in place, because captured graphs read them."""
        for (slots, _), tiles in self._tiles.items():
            tiles.refresh_(cache.prompt_S[:slots])

    def begin(self, cache: KeyValueCache, batch_size: int, width: int) -> None:
        """Prepare a step over the first slots; the kernel reads lengths itself."""
        self._batch_size = batch_size

    def columns(self, cache: KeyValueCache, kv_heads: int) -> Tensor:
        """The result of KeyValueCache.next_columns for the slots of this step."""
        return cache.next_columns(self._batch_size, kv_heads)

    def attend(self, cache: KeyValueCache, layer: int, query: Tensor, rule: AttentionRule) -> Tensor:
        """Attend with query [R, Hq, 1, D] over keys of prompts and completions: [R, 1, Hq, D]."""
        keys, values = cache.layers[layer]
        slots, heads = query.shape[:2]
        repeats = heads // keys.shape[1]
        if (slots, repeats) not in self._tiles:
            self._tiles[slots, repeats] = PromptTiles.build(
                cache.prompt_S[:slots], num_entries=cache.prompts.num_entries, repeats=repeats
            )
        attended = decode_attention(
            query[:, :, 0],
            keys,
            values,
            cache.lengths_S + 1,
            *cache.prompts.layers[layer],
            cache.prompt_S,
            *cache.prompts.tables,
            prompt_columns=cache.prompts.longest,
            scale=rule.scale,
            window=rule.window,
            softcap=rule.softcap,
            tiles=self._tiles[slots, repeats],
        )
        return attended[:, None]
