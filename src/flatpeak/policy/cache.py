"""Keys and values of the completions being decoded: contiguous slots per layer, and each prompt's once.

S slots, of which a step decodes the first R; A places for prompts; D the head dimension. A slot's token j stands at
column j of its own memory; its prompt's stand at the prompt's place, shared by all of its group. Memory is allocated
once and written in place, so that graphs captured on it stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatpeak.policy.attention import AttentionRule, PackedContext
from flatpeak.policy.decoding import CpuAttention, GpuAttention


class KeyValueCache:
    """Implements protocols.DecodeState."""

    def __init__(
        self, *, slots: int, prompts: int, prompt_tokens: int, new_tokens: int, key_multiple: int, device: torch.device
    ) -> None:
        self.num_slots = slots
        self.num_prompts = prompts
        self.key_multiple = key_multiple
        self.prompt_columns = round_up(prompt_tokens, key_multiple)
        self.columns = round_up(new_tokens, key_multiple)
        self.lengths_S = torch.zeros(slots, dtype=torch.int64, device=device)
        """Own columns filled."""
        self.positions_S = torch.zeros_like(self.lengths_S)
        """The position of the token that comes next."""
        self.prompt_S = torch.zeros_like(self.lengths_S)
        """The place of each slot's prompt."""
        self.prompt_lengths_A = torch.zeros(prompts, dtype=torch.int64, device=device)
        self.prompts: dict[int, tuple[Tensor, Tensor]] = {}
        """Per layer keys and values [A, Hkv, prompt_columns, D]."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Per layer keys and values [S, Hkv, columns, D]."""
        self.calls: list[int] = []
        """The layers that asked for attention in this step."""
        self._on_gpu = device.type != "cpu"
        self._starts = [0] * slots  # a slot's own length is its start plus the tokens decoded since the cache began
        self._decoded = 0
        self._cleared = self.columns if self._on_gpu else 0  # a captured step must not clear anything
        self._attention = GpuAttention() if self._on_gpu else CpuAttention()

    @property
    def marks(self) -> list[Tensor]:
        """What says where the next token goes."""
        return [self.lengths_S, self.positions_S]

    @property
    def tensors(self) -> list[Tensor]:
        """All that a step reads or writes."""
        memories = [m for pairs in (self.prompts, self.layers) for pair in pairs.values() for m in pair]
        return [*self.marks, self.prompt_S, self.prompt_lengths_A, *memories]

    def serves(self, *, slots: int, prompts: int, prompt_tokens: int, new_tokens: int) -> bool:
        """Whether there is room for such a request."""
        wanted = (slots, prompts, prompt_tokens, new_tokens)
        room = (self.num_slots, self.num_prompts, self.prompt_columns, self.columns)
        return all(needed <= there for needed, there in zip(wanted, room, strict=True))

    def restart(self) -> None:
        """Serve another request in the same memory."""
        for tensor in (*self.marks, self.prompt_S, self.prompt_lengths_A):
            tensor.zero_()
        self._starts = [0] * self.num_slots
        self._decoded = 0
        self._cleared = self.columns if self._on_gpu else 0
        self._attention.rearranged(self)

    def store(self, places: Sequence[int], prefill: PackedContext) -> None:
        """Keep the prompts of this prefill at these places."""
        assert prefill.kept is not None
        index = self._index(places)
        for layer, states in prefill.kept.items():
            if layer not in self.prompts:
                self._allocate(layer, states)
            for memory, new in zip(self.prompts[layer], states, strict=True):
                memory[:, :, : new.shape[2]].index_copy_(0, index, new)
        self.prompt_lengths_A.index_copy_(0, index, prefill.row.prompts.lengths)

    def admit(self, slots: Sequence[int], places: Sequence[int]) -> None:
        """Begin completions in these slots, of the prompts at these places."""
        slots_K, places_K = self._index(slots), self._index(places)
        self.prompt_S.index_copy_(0, slots_K, places_K)
        self.positions_S.index_copy_(0, slots_K, self.prompt_lengths_A.index_select(0, places_K))
        self.lengths_S.index_fill_(0, slots_K, 0)
        for slot in slots:
            self._starts[slot] = -self._decoded
        self._attention.rearranged(self)

    def compact(
        self,
        slots: tuple[Sequence[int], Sequence[int]],
        places: tuple[Sequence[int], Sequence[int]],
        idle: Sequence[int],
    ) -> None:
        """Move completions and prompts from sources to targets; nothing is decoded in the idle slots any more."""
        if slots[0]:
            self._move_slots(*slots)
        if places[0]:
            self._move_prompts(*places)
        if idle:
            for tensor in (self.lengths_S, self.positions_S, self.prompt_S):
                tensor.index_fill_(0, self._index(idle), 0)
            for slot in idle:
                self._starts[slot] = -self._decoded
        self._attention.rearranged(self)

    def begin_token(self, num_rows: int) -> None:
        """Prepare a step over the first `num_rows` slots."""
        self.calls = []
        longest = max(self._starts[:num_rows]) + self._decoded + 1
        width = min(round_up(longest, self.key_multiple), self.columns)
        if width > self._cleared:
            self._clear(num_rows, width)
        self._attention.begin(self, num_rows, width)

    def end_token(self, num_rows: int) -> None:
        """The token is in. A slot whose completion has ended is decoded until others take its place: it stays put."""
        self.lengths_S[:num_rows].add_(1).clamp_(max=self.columns - 1)
        self.positions_S[:num_rows].add_(1)
        self._decoded += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See attention.AttentionContext; L is 1."""
        self.calls.append(layer)
        columns = self._attention.columns(self, key.shape[1])
        for memory, new in zip(self.layers[layer], (key, value), strict=True):
            memory.view(-1, memory.shape[-1]).index_copy_(0, columns, new.flatten(0, 2))
        return self._attention.attend(self, layer, query, rule)

    def _index(self, indices: Sequence[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.int64, device=self.lengths_S.device)

    def _move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        used = min(self._cleared, self.columns)
        for memories in self.layers.values():
            for memory in memories:
                self._move(memory[:, :, :used], sources, targets)
        for tensor in (self.lengths_S, self.positions_S, self.prompt_S):
            self._move(tensor, sources, targets)
        for source, target in zip(sources, targets, strict=True):
            self._starts[target] = self._starts[source]

    def _move_prompts(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for memories in self.prompts.values():
            for memory in memories:
                self._move(memory, sources, targets)
        self._move(self.prompt_lengths_A, sources, targets)
        now_at_A = torch.arange(self.num_prompts, device=self.prompt_S.device)
        now_at_A.index_copy_(0, self._index(sources), self._index(targets))
        self.prompt_S.copy_(now_at_A.index_select(0, self.prompt_S))

    def _move(self, memory: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        memory.index_copy_(0, self._index(targets), memory.index_select(0, self._index(sources)))

    def _allocate(self, layer: int, states: tuple[Tensor, Tensor]) -> None:
        def memories(count: int, columns: int) -> tuple[Tensor, Tensor]:
            keys, values = (new.new_empty(count, new.shape[1], columns, new.shape[3]) for new in states)
            return keys, values

        self.prompts[layer] = memories(self.num_prompts, self.prompt_columns)
        self.layers[layer] = memories(self.num_slots, self.columns)
        for memory in self.prompts[layer]:
            memory.zero_()
        for memory in self.layers[layer]:
            memory[:, :, : self._cleared].zero_()

    def _clear(self, num_rows: int, width: int) -> None:
        """Zeros where nobody has written: a hidden column is read too, with weight 0, and must be finite for that.

        The whole memory at once would cost more than a short request takes; most of it is never reached.
        """
        for memories in self.layers.values():
            for memory in memories:
                memory[:num_rows, :, self._cleared : width].zero_()
        self._cleared = width


def round_up(length: int, multiple: int) -> int:
    """The next multiple."""
    return -(-length // multiple) * multiple
