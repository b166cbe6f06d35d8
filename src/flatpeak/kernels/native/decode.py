"""Decoding by the native kernels: a model's weights as a table of pointers, and the memory of a request.

A prompt has memory of exactly its length, and a slot has memory for its completion. Rows hold the addresses of both, so
moving a completion to another slot copies no keys. A decoding step is one call.

    row of a slot     token | output | prompt's memory: base, capacity, length | own memory: base, capacity, length
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flatpeak.kernels.native.build import call, library, record

LINEAR = ("qkv", "out", "up", "down", "head")
_LAYER = ("before", "between", *LINEAR[:4], "q_norm", "k_norm")
"""The components of a layer, norms and products. If the model has a gate (SwiGLU), `up` is gate and up concatenated;
otherwise GELU follows it. The norms of queries and keys may be missing."""
_ROW = 8
_TOKEN, _OUTPUT, _SHARED, _SHARED_LENGTH, _OWN, _OWN_CAPACITY, _OWN_LENGTH = 0, 1, 2, 4, 5, 6, 7


class Affine(NamedTuple):
    """The weight and bias of a product ([out, in]) or of a norm ([n]); a norm without a bias is RMSNorm."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """A decoder-only transformer in float32. Positions are learned or come from rope tables for n positions."""

    embedding: Tensor
    positions: Tensor | None
    rope: Callable[[int], tuple[Tensor, Tensor]] | None
    """cos and sin, each [n, D / 2]."""
    last: Affine
    head: Affine
    layers: Iterable[Mapping[str, Affine]]
    """The layers' components by name; iterated once and in order, so that only one joined copy exists at a time."""
    heads: int
    kv_heads: int
    epsilon: float
    scale: float


class PackedModel:
    """A copy of a model's weights in the layout of the kernels; later updates of the weights do not change it."""

    def __init__(self, weights: ModelWeights) -> None:
        self.width: int = library().vector_width()
        self._panel: int = library().panel()
        self.vocabulary = len(weights.head.weight)
        self._embedding, self._positions, self._rope = weights.embedding, weights.positions, weights.rope
        count, layers = 0, dict[str, Tensor | None]()
        for layer in weights.layers:
            inner = layer["down"].weight.shape[1]
            self._gated = len(layer["up"].weight) != inner
            self._dim = len(layer["qkv"].weight) // (weights.heads + 2 * weights.kv_heads)
            for component in _LAYER:
                layers |= self._packed(component, layer.get(component), count)
            count += 1
        self._memories = count * weights.kv_heads
        self._model = record(
            layers=count,
            hidden=weights.embedding.shape[1],
            inner=inner,
            heads=weights.heads,
            kv_heads=weights.kv_heads,
            dim=self._dim,
            vocabulary=self.vocabulary,
            gelu=not self._gated,
            epsilon=weights.epsilon,
            scale=weights.scale,
            embedding=weights.embedding.detach().contiguous(),
            positions=None if weights.positions is None else weights.positions.detach().contiguous(),
            cosines=None,
            sines=None,
            **self._packed("last", weights.last),
            **self._packed("head", weights.head),
            layer=record(**layers),
        )

    def reach(self, positions: int) -> None:
        """Extend the rope tables to this many positions; IndexError if the model has learned fewer positions."""
        learned = self._positions
        if learned is not None and positions > len(learned):
            raise IndexError(f"{positions} positions are requested, but the model has {len(learned)}")
        if self._rope is not None:
            self._tables = [table.contiguous() for table in self._rope(positions)]
            self._model.cosines, self._model.sines = (table.data_ptr() for table in self._tables)

    def check(self, tokens: Tensor) -> None:
        """IndexError if a token has no embedding: the kernels would read past the table."""
        known = len(self._embedding)
        for token in tokens[(tokens < 0) | (tokens >= known)].tolist():
            raise IndexError(f"token {token} of a prompt is outside the model's vocabulary of {known}")

    def memory(self, count: int, columns: int) -> Tensor:
        """`count` uninitialized memories for the keys and values of `columns` tokens each: [count, floats]."""
        per_column = self._dim + round_up(self._dim, self.width // 2)
        return torch.empty(count, self._memories * round_up(columns, self.width) * per_column, dtype=torch.float32)

    def forward(self, rows: Tensor, order: Tensor, outputs: int) -> Tensor:
        """The logits of these rows in this order: float32 [outputs, V]; undefined for unused rows."""
        stride = round_up(self.vocabulary, self._panel)
        logits = torch.empty(outputs, stride, dtype=torch.float32)
        call("forward", self._model, rows, order, len(order), outputs, logits, stride, torch.get_num_threads())
        return logits[:, : self.vocabulary]

    def _packed(self, component: str, affine: Affine | None, layer: int = 0) -> dict[str, Tensor | None]:
        """Weight and bias in the layout of the kernels."""
        weight, bias = affine or (None, None)
        if component in LINEAR and weight is not None:
            gated = component == "up" and self._gated
            weight = _panels(weight, self._panel, gated=gated).transpose(1, 2)
            bias = None if bias is None else _panels(bias, self._panel, gated=gated)
        plain = (each if each is None else each.detach().contiguous() for each in (weight, bias))
        return dict(zip((f"{component}_{layer}", f"{component}_{layer}_bias"), plain, strict=True))


def _panels(rows: Tensor, size: int, *, gated: bool = False) -> Tensor:
    """Rows in panels of this size, with the last padded with zeros: [panels, size, ...].

    Half panels of the gate alternate with half panels of what it gates, so that the kernel has both in registers.
    """
    if gated:
        return torch.cat([_panels(each, size // 2) for each in rows.chunk(2)], 1)
    missing = -len(rows) % size
    whole = F.pad(rows, (*[0] * (2 * rows.dim() - 1), missing)) if missing else rows
    panels: Tensor = whole.unflatten(0, (-1, size))
    return panels


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is at least `length`."""
    return -(-length // multiple) * multiple


class NativeCache:
    """Keys and values of one request; implements protocols.DecodeState."""

    prefill_tokens = 512
    """Prompt tokens per pass. Longer passes gain nothing, because the layers process 128 rows at a time, and would
    delay the first tokens."""

    def __init__(self, model: PackedModel, *, slots: int, longest_prompt: int, new_tokens: int) -> None:
        model.reach(longest_prompt + new_tokens)
        self._model = model
        self._own = model.memory(slots, new_tokens)
        self._prompts: dict[int, tuple[Tensor, int]] = {}  # memory and length, by entry
        self._rows = torch.zeros(slots, _ROW, dtype=torch.int64)  # rows without a prompt are not decoded
        self._rows[:, _OUTPUT] = torch.arange(slots)
        self._rows[:, _OWN] = self._own.data_ptr() + torch.arange(slots) * self._own.stride(0) * 4
        self._rows[:, _OWN_CAPACITY] = new_tokens
        self._skipped = torch.zeros(slots, dtype=torch.bool)
        self._order: Tensor | None = None  # of the slots being decoded, grouped by prompt

    def prefill(self, prompts: Sequence[Sequence[int]], entries: Sequence[int]) -> Tensor:
        """Read prompts into these entries; return the logits after each, float32 [P, V]."""
        tokens = torch.tensor([token for token_ids in prompts for token in token_ids])
        self._model.check(tokens)
        rows = torch.zeros(len(tokens), _ROW, dtype=torch.int64)
        rows[:, _TOKEN], rows[:, _OUTPUT] = tokens, -1
        pieces = rows.split([len(token_ids) for token_ids in prompts])
        for index, (piece, entry) in enumerate(zip(pieces, entries, strict=True)):
            self._release(entry)
            length = len(piece)
            memory = self._model.memory(1, length)
            self._prompts[entry] = memory, length
            piece[:, _SHARED:_SHARED_LENGTH] = torch.tensor([memory.data_ptr(), length])
            piece[:, _SHARED_LENGTH] = torch.arange(1, length + 1)
            piece[-1, _OUTPUT] = index
        return self._model.forward(rows, torch.arange(len(rows)), len(prompts))

    def decode(self, tokens_R: Tensor) -> Tensor:
        """Append a token to each of the first R slots; return the logits after it, float32 [R, V]."""
        rows = self._rows[: len(tokens_R)]
        rows[:, _TOKEN] = tokens_R
        # The slot of an ended completion stays at its last column until another completion replaces it.
        torch.minimum(rows[:, _OWN_LENGTH] + 1, rows[:, _OWN_CAPACITY], out=rows[:, _OWN_LENGTH])
        if self._order is None:
            prompts, slots = rows[:, _SHARED].sort(stable=True)
            self._order = slots[(prompts != 0) & ~self._skipped[slots]]
        return self._model.forward(rows, self._order, len(rows))

    def extend(self, slots: Sequence[int], kept: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to these slots after the first kept[k] tokens of each; return the logits after them, float32
        [K, V]."""
        pieces = []
        for index, (slot, before, token_ids) in enumerate(zip(slots, kept, tokens, strict=True)):
            piece = self._rows[slot].repeat(len(token_ids), 1)
            piece[:, _TOKEN], piece[:, _OUTPUT] = torch.tensor(token_ids), -1
            piece[:, _OWN_LENGTH] = torch.arange(before + 1, before + 1 + len(token_ids))
            piece[-1, _OUTPUT] = index
            self._rows[slot, _OWN_LENGTH] = before + len(token_ids)
            pieces.append(piece)
        rows = torch.cat(pieces)
        self._model.check(rows[:, _TOKEN])
        self._skipped[list(slots)], self._order = False, None
        return self._model.forward(rows, torch.arange(len(rows)), len(slots))

    def skip(self, slots: Sequence[int]) -> None:
        """Decode these slots no more until they are admitted or extended."""
        self._skipped[list(slots)], self._order = True, None

    def drawing(self, buffer: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """Sample a CompletionBuffer's tokens by these kernels, or by the buffer's code if it filters or is greedy."""
        if buffer.plain_draws is None:
            own: Callable[[Tensor, Tensor], Tensor] = buffer.draw
            return own
        tensors = dict(buffer.plain_draws)
        inverse_temperature = 1 / tensors.pop("temperature")
        num_ends, (completions, limit) = len(tensors["ends"]), tensors["tokens"].shape
        count = completions - 1  # the last completion is a dummy
        draws = record(**tensors, num_ends=num_ends, count=count, limit=limit, inverse_temperature=inverse_temperature)

        def draw(logits_RV: Tensor, completion_R: Tensor) -> Tensor:
            drawn_R = torch.empty_like(completion_R)
            stride, (_, vocabulary) = logits_RV.stride(0), logits_RV.shape
            call("draw", draws, logits_RV, stride, vocabulary, completion_R, len(completion_R), drawn_R)
            return drawn_R

        return draw

    def admit(self, slots: Sequence[int], entries: Sequence[int]) -> None:
        """Start completions in these slots, each with the prompt in its entry."""
        prompts = [(memory.data_ptr(), length, length) for memory, length in map(self._prompts.__getitem__, entries)]
        index = torch.tensor(slots)
        self._rows[index, _SHARED:_OWN] = torch.tensor(prompts)
        self._rows[index, _OWN_LENGTH] = 0
        self._skipped[index], self._order = False, None

    def compact(
        self,
        slots: tuple[Sequence[int], Sequence[int]],
        entries: tuple[Sequence[int], Sequence[int]],
        idle: Sequence[int],
    ) -> None:
        """Move completions and prompts from sources to targets, by address; the idle slots are not decoded."""
        sources, targets = map(list, slots)
        prompts = self._rows[sources, _SHARED]
        for of_slots in (self._rows, self._skipped):
            of_slots[[*targets, *sources]] = of_slots[[*sources, *targets]]
        self._rows[:, _OUTPUT] = torch.arange(len(self._rows))
        self._rows[[*sources, *idle], _SHARED] = 0
        self._rows[targets, _SHARED] = prompts
        for target in entries[1]:
            self._release(target)
        self._prompts |= {target: self._prompts.pop(source) for source, target in zip(*entries, strict=True)}
        self._order = None

    def _release(self, entry: int) -> None:
        """Free the memory of an entry's prompt, and stop decoding the slots of its completions."""
        if entry in self._prompts:
            memory, _ = self._prompts.pop(entry)
            self._rows[self._rows[:, _SHARED] == memory.data_ptr(), _SHARED] = 0
            self._order = None
