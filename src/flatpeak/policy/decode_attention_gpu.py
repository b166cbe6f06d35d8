"""Attention of one new token per slot on a GPU: one kernel over the slot's own keys and its prompt's.

A decoding step is captured as a CUDA graph and replayed, so nothing here may depend on a value on the host that changes
from token to token: the kernel reads lengths, prompts and tiles on the device, and only moves of slots or prompts,
which happen between steps, rewrite its tables.
"""

from __future__ import annotations

from torch import Tensor

from flatpeak.kernels.decode_attention import decode_attention
from flatpeak.kernels.prompt_tiles import PromptTiles
from flatpeak.policy.kv_cache import KeyValueCache
from flatpeak.policy.training_attention import AttentionRule


class GpuDecodeAttention:
    """Implements kv_cache.DecodeAttention by `kernels.decode_attention`: Triton's kernel, or torch where it fails."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[int, int], PromptTiles] = {}
        self._num_rows = 0

    def rearranged(self, cache: KeyValueCache) -> None:
        """Slots or prompts were moved: the tables are brought up to date in place, as captured graphs read them."""
        for (rows, _), tiles in self._tiles.items():
            tiles.refresh_(cache.prompt_S[:rows])

    def begin(self, cache: KeyValueCache, num_rows: int, width: int) -> None:
        """Prepare a step over the first slots; the width is the kernel's business."""
        self._num_rows = num_rows

    def columns(self, cache: KeyValueCache, kv_heads: int) -> Tensor:
        """int64 [R * Hkv]: where each head's new token goes in a layer's memory, seen as rows of D."""
        return cache.next_columns(self._num_rows, kv_heads)

    def attend(self, cache: KeyValueCache, layer: int, query: Tensor, rule: AttentionRule) -> Tensor:
        """query [R, Hq, 1, D] -> [R, 1, Hq, D]."""
        keys, values = cache.layers[layer]
        rows, heads = query.shape[:2]
        repeats = heads // keys.shape[1]
        if (rows, repeats) not in self._tiles:
            self._tiles[rows, repeats] = PromptTiles.build(
                cache.prompt_S[:rows], arena_rows=cache.prompts.places, repeats=repeats
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
            tiles=self._tiles[rows, repeats],
        )
        return attended[:, None]
