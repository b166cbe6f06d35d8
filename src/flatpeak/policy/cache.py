"""The keys and values of rows being decoded: contiguous per layer, one row per live completion."""

from __future__ import annotations

import torch
from torch import Tensor

from flatpeak.policy.attention import AttentionRule, PackedContext
from flatpeak.policy.packing import fill

KEY_MULTIPLE = 64
"""Keys come in multiples of this, so that a row's attention sums in the same order whatever its neighbours' lengths."""


class KeyValueCache:
    """Row r holds its own tokens from column 0 on: the prompt's, then what was decoded. Implements DecodeState.

    Rows are padded with copies of row 0 to a multiple of ROW_MULTIPLE; only the first `num_rows` count.
    """

    def __init__(self, prefill: PackedContext, *, copies: int, max_new_tokens: int) -> None:
        assert prefill.kept is not None
        prompts = prefill.row.prompts
        rows = fill(torch.arange(prompts.count, device=prompts.lengths.device).repeat_interleave(copies))
        self.num_rows = prompts.count * copies
        self.lengths_R = prompts.lengths.index_select(0, rows)
        self.longest = int(prompts.lengths.max())
        self._limit = _round_up(self.longest + max_new_tokens)
        # [R, columns, Hkv, D]: a new token is then one contiguous row of a flat copy.
        self.layers = {
            layer: tuple(states.transpose(1, 2).index_select(0, rows).contiguous() for states in kept)
            for layer, kept in prefill.kept.items()
        }
        self.calls: list[int] = []
        self._masks: dict[int | None, Tensor] = {}
        self._slots_R = torch.zeros(0, dtype=torch.int64)
        self._width = 0

    @property
    def positions_R(self) -> Tensor:
        """int64 [R]: the position of the token being decoded."""
        return self.lengths_R

    def keep(self, rows_R: Tensor) -> None:
        """Keep only these rows, in this order."""
        rows = fill(rows_R)
        self.num_rows = len(rows_R)
        self.lengths_R = self.lengths_R.index_select(0, rows)
        self.longest = int(self.lengths_R.max()) if self.num_rows else 0
        self.layers = {
            layer: (keys.index_select(0, rows), values.index_select(0, rows))
            for layer, (keys, values) in self.layers.items()
        }

    def begin_token(self) -> None:
        """Make room for one more token per row."""
        needed = _round_up(self.longest + 1)
        columns = next(iter(self.layers.values()))[0].shape[1]
        if needed > columns:
            grown = min(max(needed, 2 * columns), max(self._limit, needed))
            self.layers = {layer: tuple(_grow(states, grown) for states in pair) for layer, pair in self.layers.items()}
            columns = grown
        self._width = needed
        self._masks = {}
        self._slots_R = torch.arange(len(self.lengths_R), device=self.lengths_R.device) * columns + self.lengths_R
        self.calls = []

    def end_token(self) -> None:
        """The token is in."""
        self.lengths_R = self.lengths_R + 1
        self.longest += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See attention.AttentionContext; L is 1."""
        self.calls.append(layer)
        keys, values = self.layers[layer]
        for states, new in ((keys, key), (values, value)):
            states.view(-1, *states.shape[2:]).index_copy_(0, self._slots_R, new[:, :, 0])
        keys, values = (states[:, : self._width].transpose(1, 2) for states in (keys, values))
        rows, heads, _, dim = query.shape
        kv_heads = keys.shape[1]
        # Query heads that share a key head become query rows of it: no repeated keys.
        folded = query.view(rows, kv_heads, heads // kv_heads, dim)
        return rule(folded, keys, values, self._mask(rule.window)).reshape(rows, 1, heads, values.shape[-1])

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            distance = self.lengths_R[:, None] - torch.arange(self._width, device=self.lengths_R.device)
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self._masks[window] = visible[:, None, None, :]
        return self._masks[window]


def _round_up(length: int) -> int:
    return -(-length // KEY_MULTIPLE) * KEY_MULTIPLE


def _grow(states: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, 0, 0, columns - states.shape[1]))
