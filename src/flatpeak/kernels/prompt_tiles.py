"""Tiles of decoding slots that share a prompt, so that a kernel reads each prompt's keys once per tile.

Shape letters: R slots being decoded, A entries of prompts, W tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS = 64
"""Query rows that the kernel multiplies with a prompt's keys at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTiles:
    """Slots that share a prompt, cut into tiles that fit TILE_ROWS query rows of a key head.

    The shapes depend only on the numbers of slots and entries, so captured graphs stay valid. Call `refresh_` after
    slots have moved or their prompts have changed.
    """

    order_R: Tensor
    """int64: the slots, sorted by prompt."""
    starts_W: Tensor
    """int64: the index in order_R of each tile's first slot; the last element is scratch."""
    counts_W: Tensor
    """int64: the number of slots of each tile, 0 for unused tiles; the last element is scratch."""
    slots_per_tile: int

    @classmethod
    def build(cls, prompt_R: Tensor, *, num_entries: int, repeats: int) -> PromptTiles:
        """Build the tiles of slots with these prompts; `repeats` is the number of query heads per key head."""
        slots = len(prompt_R)
        slots_per_tile = TILE_ROWS // repeats
        # Every prompt has at most one partly filled tile.
        tiles = min(slots, num_entries + slots // slots_per_tile)
        table = cls(
            order_R=torch.zeros_like(prompt_R),
            starts_W=prompt_R.new_zeros(tiles + 1),
            counts_W=prompt_R.new_zeros(tiles + 1),
            slots_per_tile=slots_per_tile,
        )
        table.refresh_(prompt_R)
        return table

    def refresh_(self, prompt_R: Tensor) -> None:
        """Write the tiles for these prompts in place."""
        order_R = torch.argsort(prompt_R, stable=True)
        sorted_R = prompt_R.index_select(0, order_R)
        index_R = torch.arange(len(order_R), device=order_R.device)
        is_new_R = F.pad(sorted_R[1:] != sorted_R[:-1], (1, 0), value=True)
        first_R = torch.where(is_new_R, index_R, 0).cummax(0).values
        begins_R = (index_R - first_R) % self.slots_per_tile == 0
        tile_R = begins_R.cumsum(0) - 1
        scratch = len(self.starts_W) - 1
        self.order_R.copy_(order_R)
        self.starts_W.zero_().scatter_(0, torch.where(begins_R, tile_R, scratch), index_R)
        self.counts_W.zero_().scatter_add_(0, tile_R, torch.ones_like(tile_R))
