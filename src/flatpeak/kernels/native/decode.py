"""Decoding by the native kernels: a model's weights as a table of pointers, and the memory of a request.

A prompt has a memory of its own, as long as it is, and a slot one for its completion. Rows refer to both by address, so
that moving a completion to another slot copies no key. A decoding step is one call.

    row of a slot     token | output | prompt's memory: base, capacity, length | own memory: base, capacity, length
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatpeak.kernels.native.build import library, structure

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ROW = 8
_TOKEN, _OUTPUT, _SHARED, _SHARED_LENGTH, _OWN, _OWN_CAPACITY, _OWN_LENGTH = 0, 1, 2, 4, 5, 6, 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Affine:
    """A weight with its bias, of a product ([out, in]) or of a norm ([n]); a norm without a bias is RMSNorm."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer. `up` has gate and up below each other where the model has a gate (SwiGLU), else GELU follows it."""

    before: Affine
    between: Affine
    qkv: Affine
    out: Affine
    up: Affine
    down: Affine
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """A decoder-only transformer in float32. Positions are learned, or tables of rope for the first n positions."""

    embedding: Tensor
    positions: Tensor | None
    rope: Callable[[int], tuple[Tensor, Tensor]] | None
    """cos and sin, each [n, D / 2]."""
    last: Affine
    head: Affine
    layers: Sequence[LayerWeights]
    heads: int
    kv_heads: int
    dim: int
    inner: int
    epsilon: float
    scale: float


_Affine = structure(weight=_POINTER, bias=_POINTER)
_Layer = structure(
    **dict.fromkeys(("before", "between", "qkv", "out", "up", "down"), _Affine), q_norm=_POINTER, k_norm=_POINTER
)
_Model = structure(
    **dict.fromkeys(("layers", "hidden", "inner", "heads", "kv_heads", "dim", "vocabulary", "gelu"), _INT),
    **dict.fromkeys(("epsilon", "scale"), _FLOAT),
    **dict.fromkeys(("embedding", "positions", "cosines", "sines"), _POINTER),
    **dict.fromkeys(("last", "head"), _Affine),
    layer=_POINTER,
)
_Draws = structure(
    **dict.fromkeys(("keys", "ends"), _POINTER),
    **dict.fromkeys(("num_ends", "count", "limit"), _INT),
    **dict.fromkeys(("tokens", "lengths", "logprobs", "ended", "stopped"), _POINTER),
    inverse_temperature=ctypes.c_double,
)


class PackedModel:
    """A copy of a model's weights as the kernels read them; it does not follow the weights."""

    def __init__(self, weights: ModelWeights) -> None:
        kernels = library()
        self.width: int = kernels.vector_width()
        self.vocabulary = len(weights.head.weight)
        self._panel: int = kernels.panel()
        self._forward = kernels.forward
        self._forward.argtypes = [_POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _INT]
        self._forward.restype = None
        self._weights = weights
        self._kept: list[Tensor] = []
        gelu = len(weights.layers[0].up.weight) == weights.inner
        self._layers = (_Layer * len(weights.layers))(*(self._layer(layer, gelu) for layer in weights.layers))
        self._model = _Model(
            layers=len(weights.layers),
            hidden=weights.embedding.shape[1],
            vocabulary=self.vocabulary,
            gelu=gelu,
            embedding=self._address(weights.embedding),
            positions=self._address(weights.positions),
            last=self._affine(weights.last),
            head=self._product(weights.head),
            layer=ctypes.addressof(self._layers),
            **{name: getattr(weights, name) for name in ("inner", "heads", "kv_heads", "dim", "epsilon", "scale")},
        )

    def reach(self, positions: int) -> None:
        """Make the tables of rope for this many positions; IndexError where the model has learned fewer."""
        learned = self._weights.positions
        if learned is not None and positions > len(learned):
            raise IndexError(f"{positions} positions are asked for, and the model has {len(learned)}")
        if self._weights.rope is not None:
            cosines, sines = self._weights.rope(positions)
            self._model.cosines, self._model.sines = self._address(cosines), self._address(sines)

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """IndexError where a token has no embedding: the kernels would read whatever lies there."""
        known = range(len(self._weights.embedding))
        for token in {token for prompt in prompts for token in prompt}:
            if token not in known:
                raise IndexError(f"token {token} of a prompt is none of the model's {len(known)}")

    def memory(self, count: int, columns: int) -> Tensor:
        """Uninitialized memory for the keys and values of this many tokens, `count` times: [count, floats]."""
        model, width = self._weights, self.width
        per_column = model.dim + round_up(model.dim, width)
        floats = len(model.layers) * model.kv_heads * round_up(columns, width) * per_column
        return torch.empty(count, floats, dtype=torch.float32)

    def forward(self, rows: Tensor, order: Tensor, outputs: int) -> Tensor:
        """The logits of these rows, in this order: float32 [outputs, V], those of no row without meaning."""
        stride = round_up(self.vocabulary, self._panel)
        logits = torch.empty(outputs, stride, dtype=torch.float32)
        self._forward(
            ctypes.addressof(self._model),
            rows.data_ptr(),
            order.data_ptr(),
            len(order),
            outputs,
            logits.data_ptr(),
            stride,
            torch.get_num_threads(),
        )
        return logits[:, : self.vocabulary]

    def _layer(self, layer: LayerWeights, gelu: bool) -> ctypes.Structure:
        return _Layer(
            before=self._affine(layer.before),
            between=self._affine(layer.between),
            qkv=self._product(layer.qkv),
            out=self._product(layer.out),
            up=self._product(layer.up if gelu else self._interleaved(layer.up)),
            down=self._product(layer.down),
            q_norm=self._address(layer.q_norm),
            k_norm=self._address(layer.k_norm),
        )

    def _interleaved(self, gate_and_up: Affine) -> Affine:
        """Half a panel of the gate beside half a panel of what it gates, so that they meet in registers."""
        half = self._panel // 2

        def mix(joined: Tensor) -> Tensor:
            gate, up = (_padded(each, half).unflatten(0, (-1, half)) for each in joined.chunk(2))
            return torch.stack([gate, up], 1).flatten(0, 2)

        bias = gate_and_up.bias
        return Affine(weight=mix(gate_and_up.weight), bias=None if bias is None else mix(bias))

    def _product(self, product: Affine) -> ctypes.Structure:
        panels = _padded(product.weight, self._panel).unflatten(0, (-1, self._panel)).transpose(1, 2)
        bias = None if product.bias is None else _padded(product.bias, self._panel)
        return self._affine(Affine(weight=panels, bias=bias))

    def _affine(self, affine: Affine) -> ctypes.Structure:
        return _Affine(self._address(affine.weight), self._address(affine.bias))

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is at least `length`."""
    return -(-length // multiple) * multiple


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """More rows of zeros, up to a multiple."""
    missing = -len(tensor) % multiple
    return F.pad(tensor, (*[0] * (2 * tensor.dim() - 1), missing)) if missing else tensor


class NativeCache:
    """Keys and values of one request; implements protocols.DecodeState."""

    def __init__(self, model: PackedModel, *, slots: int, longest_prompt: int, new_tokens: int) -> None:
        model.reach(longest_prompt + new_tokens)
        self._model = model
        self._own = model.memory(slots, new_tokens)
        self._prompts: dict[int, Tensor] = {}  # memories, by entry
        self._rows = torch.zeros(slots, _ROW, dtype=torch.int64)
        self._rows[:, _OUTPUT] = torch.arange(slots)
        self._rows[:, _OWN] = self._own.data_ptr() + torch.arange(slots) * self._own.stride(0) * 4
        self._rows[:, _OWN_CAPACITY] = new_tokens
        self._prompt_of: dict[int, int] = {}  # the address of the prompt's memory, by slot that is decoded
        self._lengths: dict[int, int] = {}  # of prompts, by address
        self._order: Tensor | None = None  # of these slots, those of a prompt side by side

    def prefill(self, prompts: Sequence[Sequence[int]], entries: Sequence[int]) -> Tensor:
        """Read prompts into these entries; the logits after each, float32 [P, V]."""
        pieces = []
        self._model.check(prompts)
        for index, (token_ids, entry) in enumerate(zip(prompts, entries, strict=True)):
            self._release(entry)
            memory = self._prompts[entry] = self._model.memory(1, len(token_ids))
            self._lengths[memory.data_ptr()] = len(token_ids)
            rows = torch.zeros(len(token_ids), _ROW, dtype=torch.int64)
            rows[:, _TOKEN] = torch.tensor(token_ids)
            rows[:, _OUTPUT] = -1
            rows[-1, _OUTPUT] = index
            rows[:, _SHARED:_SHARED_LENGTH] = torch.tensor([memory.data_ptr(), len(token_ids)])
            rows[:, _SHARED_LENGTH] = torch.arange(1, len(token_ids) + 1)
            pieces.append(rows)
        rows = torch.cat(pieces)
        return self._model.forward(rows, torch.arange(len(rows)), len(prompts))

    def decode(self, tokens_R: Tensor) -> Tensor:
        """Append a token to each of the first R slots; the logits after it, float32 [R, V]."""
        rows = self._rows[: len(tokens_R)]
        rows[:, _TOKEN] = tokens_R
        # A slot whose completion has ended stays at its last column until another takes its place.
        torch.minimum(rows[:, _OWN_LENGTH] + 1, rows[:, _OWN_CAPACITY], out=rows[:, _OWN_LENGTH])
        if self._order is None:
            used = [slot for slot in self._prompt_of if slot < len(rows)]
            slots = sorted(used, key=lambda slot: (self._prompt_of[slot], slot))
            self._order = torch.tensor(slots, dtype=torch.int64)
        return self._model.forward(rows, self._order, len(rows))

    def drawing(self, buffer: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """The draws of a CompletionBuffer by these kernels, or its own where filters or greedy tokens are wanted."""
        draws = buffer.plain_draws
        return buffer.draw if draws is None else _NativeDraws(**draws)

    def admit(self, slots: Sequence[int], entries: Sequence[int]) -> None:
        """Begin completions in these slots, each of the prompt in its entry."""
        for slot, entry in zip(slots, entries, strict=True):
            self._prompt_of[slot] = self._prompts[entry].data_ptr()
        bases = [self._prompt_of[slot] for slot in slots]
        index = torch.tensor(slots)
        self._rows[index, _SHARED] = torch.tensor(bases)
        self._rows[index, _SHARED + 1] = self._rows[index, _SHARED_LENGTH] = torch.tensor(
            [self._lengths[base] for base in bases]
        )
        self._rows[index, _OWN_LENGTH] = 0
        self._order = None

    def compact(
        self,
        slots: tuple[Sequence[int], Sequence[int]],
        entries: tuple[Sequence[int], Sequence[int]],
        idle: Sequence[int],
    ) -> None:
        """Move completions and prompts from sources to targets, by address; nothing is decoded in the idle slots."""
        sources, targets = slots
        if sources:
            self._rows[[*targets, *sources]] = self._rows[[*sources, *targets]]
            self._rows[:, _OUTPUT] = torch.arange(len(self._rows))
        moved = {target: self._prompt_of[source] for source, target in zip(*slots, strict=True)}
        for slot in (*sources, *idle):
            self._prompt_of.pop(slot, None)
        self._prompt_of |= moved
        for target in entries[1]:
            self._release(target)
        self._prompts |= {target: self._prompts.pop(source) for source, target in zip(*entries, strict=True)}
        self._order = None

    def _release(self, entry: int) -> None:
        """Free the memory of an entry's prompt; slots that a completion of it was left in are not decoded any more."""
        if entry in self._prompts:
            address = self._prompts.pop(entry).data_ptr()
            self._prompt_of = {slot: base for slot, base in self._prompt_of.items() if base != address}
            self._order = None


class _NativeDraws:
    """A CompletionBuffer's draws from softmax(logits / temperature), recorded in its tensors."""

    def __init__(self, *, temperature: float, **tensors: Tensor) -> None:
        self._draw = library().draw
        self._draw.argtypes = [_POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER]
        self._draw.restype = None
        self._tensors = tensors
        count, limit = tensors["tokens"].shape
        self._draws = _Draws(
            num_ends=len(tensors["ends"]),
            count=count - 1,  # the last completion is a dummy
            limit=limit,
            inverse_temperature=1 / temperature,
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )

    def __call__(self, logits_RV: Tensor, completion_R: Tensor) -> Tensor:
        """The next token of each of these completions, int64 [R]; see CompletionBuffer.draw."""
        drawn_R = torch.empty_like(completion_R)
        self._draw(
            ctypes.addressof(self._draws),
            logits_RV.data_ptr(),
            logits_RV.stride(0),
            logits_RV.shape[1],
            completion_R.data_ptr(),
            len(completion_R),
            drawn_R.data_ptr(),
        )
        return drawn_R
