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

KEY_MULTIPLE = 16
"""Keys come in multiples of this, so that a row's attention sums in the same order whatever its neighbours' lengths."""
SHARE_FROM = 1 << 16
"""On a CPU, prompts of at least so many bytes per layer are attended to where they stand; smaller ones are copied into
the slots, as reading them once per slot costs less than another round of products."""


class KeyValueCache:
    """Implements protocols.DecodeState."""

    def __init__(
        self, *, slots: int, prompts: int, prompt_tokens: int, new_tokens: int, key_multiple: int, device: torch.device
    ) -> None:
        self.num_slots = slots
        self.num_prompts = prompts
        self.key_multiple = key_multiple
        self.prompt_columns = round_up(prompt_tokens, key_multiple)
        self.columns = round_up(new_tokens + prompt_tokens, key_multiple)
        self.shares_prompts = False
        """Whether slots hold only their own keys and values. Known once the first prompts are read."""
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
        self._room = (slots, prompts, prompt_tokens, new_tokens)
        self._prompt_lengths = [0] * prompts
        self._starts = [0] * slots  # a slot's own length is its start plus the tokens decoded since the cache began
        self._decoded = 0
        self._cleared = 0
        self._attention = GpuAttention() if device.type != "cpu" else CpuAttention()

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
        needed = (slots, prompts, prompt_tokens, new_tokens)
        return all(wanted <= there for wanted, there in zip(needed, self._room, strict=True))

    def restart(self) -> None:
        """Serve another request in the same memory."""
        for tensor in (*self.marks, self.prompt_S, self.prompt_lengths_A):
            tensor.zero_()
        self._starts = [0] * self.num_slots
        self._decoded = 0
        self._attention.rearranged(self)

    def store(self, places: Sequence[int], prefill: PackedContext) -> None:
        """Keep the prompts of this prefill at these places."""
        assert prefill.kept is not None
        lengths_P = prefill.row.prompts.lengths
        index = self._index(places)
        if not self.layers:
            self._lay_out(next(iter(prefill.kept.values())))
        for layer, states in prefill.kept.items():
            if layer not in self.prompts:
                self._allocate(layer, states)
            for memory, new in zip(self.prompts[layer], states, strict=True):
                memory[:, :, : new.shape[2]].index_copy_(0, index, new)
        self.prompt_lengths_A.index_copy_(0, index, lengths_P)
        for place, length in zip(places, lengths_P.tolist(), strict=True):
            self._prompt_lengths[place] = length

    def admit(self, slots: Sequence[int], places: Sequence[int]) -> None:
        """Begin completions in these slots, of the prompts at these places."""
        slots_K, places_K = self._index(slots), self._index(places)
        lengths_K = self.prompt_lengths_A.index_select(0, places_K)
        self.prompt_S.index_copy_(0, slots_K, places_K)
        self.positions_S.index_copy_(0, slots_K, lengths_K)
        self.lengths_S.index_copy_(0, slots_K, torch.zeros_like(lengths_K) if self.shares_prompts else lengths_K)
        for slot, place in zip(slots, places, strict=True):
            self._starts[slot] = (0 if self.shares_prompts else self._prompt_lengths[place]) - self._decoded
        if not self.shares_prompts:
            for layer, memories in self.layers.items():
                for memory, prompts in zip(memories, self.prompts[layer], strict=True):
                    memory[:, :, : prompts.shape[2]].index_copy_(0, slots_K, prompts.index_select(0, places_K))
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
        for source, target in zip(sources, targets, strict=True):
            self._prompt_lengths[target] = self._prompt_lengths[source]

    def _move(self, memory: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        memory.index_copy_(0, self._index(targets), memory.index_select(0, self._index(sources)))

    def _lay_out(self, states: tuple[Tensor, Tensor]) -> None:
        """Decide by the size of the prompts where they stay, and with that what a slot has room for."""
        on_gpu = self.lengths_S.device.type != "cpu"
        token_bytes = sum(new.shape[1] * new.shape[3] * new.element_size() for new in states)
        _, _, prompt_tokens, new_tokens = self._room
        self.shares_prompts = on_gpu or prompt_tokens * token_bytes >= SHARE_FROM
        if self.shares_prompts:
            self.columns = round_up(new_tokens, self.key_multiple)
        # A captured step must not clear anything.
        self._cleared = self.columns if on_gpu else 0 if self.shares_prompts else self.prompt_columns

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
