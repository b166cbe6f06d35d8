"""A policy on tensors with shapes but no data, which computes like `Policy` on the planned device.

Its model is the planned model with few layers, on torch's fake tensors (`FakeTensorMode`): all code of transformers,
peft and flatpeak runs unchanged. If code depends on a device that is missing, other code replaces it that keeps tensors
of the same sizes: attention on a GPU, and layers in 4 bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from flatpeak.apps.planning.inventory import quantized_layers
from flatpeak.apps.planning.planned_model import PlannedModel, causal_of
from flatpeak.functional.logprobs import Head as ChunkedHead
from flatpeak.functional.logprobs import chunk_tokens, head_gradients, token_logprobs
from flatpeak.kernels.block_attention import AttentionRule, Block
from flatpeak.kernels.flash_attention import FlashSegments
from flatpeak.policy.linears import Head, make_fast, read_head
from flatpeak.policy.model_settings import make_adapted_layers_fast, silence_dropout, training_layers
from flatpeak.policy.packing import PackedRow, flash_segments, pack_batch
from flatpeak.policy.training_attention import ATTENTION_NAME, PackedContext, last_hidden, register_attention
from flatpeak.types import Batch
from flatpeak.utils.adapters import dropout_modules


class MemoryTracker(TorchDispatchMode):
    """A context that counts the bytes of new tensors as long as they are alive, except those of `before`."""

    def __init__(self, before: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen = {id(tensor.untyped_storage()) for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the memory of its results."""
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._count(result)
        self.peak = max(self.peak, self.live + _scratch(func, args))
        return results

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.live += size
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def _scratch(func: Any, args: Any) -> int:
    """Bytes that an operation needs while it runs: oneDNN copies a transposed input into row order."""
    if getattr(func, "_opname", "") == "_linear_pointwise" and not args[0].is_contiguous():
        size: int = args[0].nbytes
        return size
    return 0


@dataclass(frozen=True, kw_only=True)
class PassSettings:
    """The settings that determine how much memory the passes of a model take."""

    model: PlannedModel
    on_cpu: bool
    recompute: bool
    """Whether layers are computed again in the backward pass."""
    accumulated: bool
    """Whether gradients of earlier micro-batches already exist."""
    dropout: bool


@dataclass(frozen=True, kw_only=True)
class FakePolicy:
    """The passes of `Policy` on a model without data."""

    modules: Any
    head: Head
    on_cpu: bool
    padded: bool

    @property
    def tensors(self) -> list[Tensor]:
        """All weights and buffers of the model."""
        return [*self.modules.parameters(), *self.modules.buffers()]

    @property
    def trained(self) -> list[nn.Parameter]:
        """The weights that get gradients."""
        return [parameter for parameter in self.modules.parameters() if parameter.requires_grad]

    def score(self, batch: Batch) -> Tensor:
        """The log-probabilities of a batch, as from Policy.token_logprobs."""
        if self.padded:
            return _padded_logprobs(causal_of(self.modules), batch)
        with unset_fake_temporarily():
            row = pack_batch(batch)
        hidden_TD = self.hidden(row, FakeContext(row, on_cpu=self.on_cpu)).index_select(0, row.source_T)
        head = self.head
        if not self.on_cpu:
            logprobs: Tensor = _FusedLogprobs.apply(hidden_TD, head.linear.weight, head.linear.bias)
            return logprobs
        logprobs_T, _ = token_logprobs(
            hidden_TD,
            head.linear.weight,
            batch.tokens_T,
            bias_V=head.linear.bias,
            softcap=head.softcap,
            logit_scale=head.logit_scale,
            chunk_size=chunk_tokens(len(head.linear.weight), on_cpu=True),
        )
        return logprobs_T

    def hidden(self, row: PackedRow, context: PackedContext) -> Tensor:
        """The last hidden states of a packed row, as from Policy.hidden."""
        causal = causal_of(self.modules)
        trunk = getattr(causal, causal.base_model_prefix)
        return last_hidden(trunk, row.token_ids_S[None], row.positions_S[None], context)[0]


@contextmanager
def fake_policy(settings: PassSettings, layers: int) -> Iterator[FakePolicy]:
    """The model with this many layers on tensors without data, in the mode that makes more of them."""
    modules = settings.model.build(layers)
    causal = causal_of(modules)
    head = read_head(causal)
    quantized = list(quantized_layers(settings.model, modules))
    quantize(quantized)
    if not settings.dropout:
        silence_dropout(modules, keep=dropout_modules(modules))
    padded = settings.model.fallback is not None
    if not padded:
        register_attention()
        causal.set_attn_implementation(ATTENTION_NAME)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        exchange_tensors(modules)
        if settings.on_cpu and not padded:
            make_fast(causal)
        if not padded:
            make_adapted_layers_fast(causal)
            if quantized and settings.on_cpu:
                expand_adapted(causal)
    modules.train()
    with training_layers(causal, recompute=settings.recompute, compiled=False), mode:
        yield FakePolicy(modules=modules, head=head, on_cpu=settings.on_cpu, padded=padded)


def _padded_logprobs(causal: Any, batch: Batch) -> Tensor:
    """The log-probabilities of a padded batch, as from outputs.padded_outputs; lengths are equal here."""
    rows, tokens = len(batch.lengths_N), len(batch.tokens_T)
    with unset_fake_temporarily():
        input_ids = torch.zeros(rows, max(map(len, batch.prompts)) + tokens // rows, dtype=torch.int64)

    def choose(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (arguments[0].flatten(0, 1)[None, :tokens],)

    hook = causal.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        logits_TV = causal(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits[0]
    finally:
        hook.remove()
    logprobs_TV = torch.log_softmax(logits_TV.float() / 1.0, dim=-1)
    chosen_T = logprobs_TV.gather(1, torch.zeros_like(batch.tokens_T)[:, None])[:, 0]
    return chosen_T - (logprobs_TV.exp() * logprobs_TV).sum(-1)


def exchange_tensors(modules: nn.Module) -> None:
    """Replace every weight and buffer by a fake tensor of its shape and type; tied weights stay tied."""
    exchanged: dict[int, nn.Parameter] = {}
    for module in modules.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in exchanged:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                exchanged[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                if parameter.requires_grad:
                    exchanged[id(parameter)].grad_dtype = torch.float32  # as MasterWeights requests from autograd
            module._parameters[name] = exchanged[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class FakeContext(PackedContext):
    """Attention within a packed row of tensors without data, as on the planned device."""

    def __init__(self, row: PackedRow, *, keep_prompts: bool = False, on_cpu: bool) -> None:
        super().__init__(row, keep_prompts=keep_prompts)
        self._on_cpu = on_cpu

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Attend within the row; see PackedContext."""
        chosen: Any = rule if self._on_cpu else _GpuRule(rule)
        return super().attend(layer, query, key, value, chosen)

    def _on_prompts(self, rule: AttentionRule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._on_cpu:
            return super()._on_prompts(rule, query, key, value)
        return rule(query, key, value, self._prompt_mask(query.shape[2], rule.window))

    def _flash_segments(self, rule: AttentionRule, states: Sequence[Tensor]) -> FlashSegments | None:
        half = states[0].dtype in (torch.bfloat16, torch.float16) and len({each.shape[-1] for each in states}) == 1
        if self._on_cpu or rule.softcap is not None or rule.dropout or not half:
            return None
        if self._segments is None:
            with unset_fake_temporarily():
                self._segments = flash_segments(self.row)
        return self._segments

    def _blocks_of(self, index: int, window: int | None) -> list[Block]:
        with unset_fake_temporarily():  # blocks are cut by lengths, whose values must be read
            return super()._blocks_of(index, window)


class _GpuRule:
    """An attention rule with the kernel that scaled_dot_product_attention uses on a GPU.

    Flash attention supports no mask, and memory-efficient attention no key head for several query heads: with both,
    torch falls back to explicit products, which keep every score. Each shape is run once, and then replaced by tensors
    with as many bytes: explicit products are hundreds of operations in each block of each layer.
    """

    plain: Final = False
    """Whether `attend_in_blocks` may use its fused kernel for CPUs."""

    def __init__(self, rule: AttentionRule) -> None:
        self.window, self.softcap, self.dropout = rule.window, rule.softcap, rule.dropout
        self.scale = rule.scale
        self._rule = rule

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of query over key and value; see AttentionRule."""
        shapes = tuple(tuple(states.shape) for states in (query, key, value))
        size = _attention_size(self._rule, shapes, None if mask is None else tuple(mask.shape), query.dtype)
        output: Tensor = _Attention.apply(query, key, value, size)
        return output


@dataclass(frozen=True, kw_only=True)
class _AttentionSize:
    """Bytes of one call of attention, without its inputs, its output and their gradients."""

    kept: int
    """Kept for the backward pass."""
    forward: int
    """The most during the forward pass, including the kept bytes."""
    backward: int
    """The most during the backward pass, in addition to the kept bytes."""


@cache
def _attention_size(
    rule: AttentionRule, shapes: tuple[tuple[int, ...], ...], mask_shape: tuple[int, ...] | None, dtype: torch.dtype
) -> _AttentionSize:
    flash = mask_shape is None and dtype in (torch.bfloat16, torch.float16)
    written_out = shapes[0][1] != shapes[1][1] and not flash
    # Without the hooks of a layer that is recomputed, into which the call below would come back.
    kept_as_they_are = saved_tensors_hooks(lambda states: states, lambda states: states)
    with _disable_current_modes(), FakeTensorMode(), torch.enable_grad(), kept_as_they_are:
        states = query, key, value = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        mask = None if mask_shape is None else torch.empty(mask_shape, dtype=torch.bool)
        inputs = states if mask is None else [*states, mask]
        with MemoryTracker(inputs) as memory:
            with sdpa_kernel(SDPBackend.MATH) if written_out else nullcontext():
                output = rule(query, key, value, mask)
            kept, forward = memory.live - output.nbytes, memory.peak - output.nbytes
            start = memory.live
            memory.peak = start
            output.backward(torch.empty(1, dtype=dtype).expand(output.shape))
    gradients = sum(one.nbytes for one in states)
    return _AttentionSize(kept=kept, forward=max(forward, kept), backward=max(0, memory.peak - start - gradients))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, size: _AttentionSize) -> Tensor:
        torch.empty(size.forward, dtype=torch.uint8)
        ctx.size, ctx.states = size, [(states.shape, states.dtype) for states in (query, key, value)]
        ctx.save_for_backward(torch.empty(size.kept, dtype=torch.uint8))
        return query.new_empty(*query.shape[:3], value.shape[3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors is not None  # accessed so that recomputation fills it
        torch.empty(ctx.size.backward, dtype=torch.uint8)
        return (*(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.states), None)


class _FusedLogprobs(torch.autograd.Function):
    """`token_logprobs` with kernels from the logits on, which need no other tensor of a chunk."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        size = chunk_tokens(len(weight_VD), on_cpu=False, fused=True)
        ctx.head = ChunkedHead(softcap=None, logit_scale=1.0, temperature=1.0, chunk_size=size, kept_T=None)
        for rows in ctx.head.chunks(len(hidden_TD)):
            F.linear(hidden_TD[rows], weight_VD, bias_V)
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V)
        return hidden_TD.new_empty(len(hidden_TD), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V = ctx.saved_tensors
        return tuple(
            head_gradients(
                *(ctx.head, hidden_TD, weight_VD, bias_V),
                needs=ctx.needs_input_grad,
                score_gradient=lambda rows, scores_CV: scores_CV,
                logit_gradient=lambda rows: F.linear(hidden_TD[rows], weight_VD, bias_V),
            )
        )


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is expanded from 4 bits for each product, and again in the backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input W^T + b."""
        output: Tensor = _Expanded.apply(input, self.weight, self.bias)
        return output


class QuantizedConv1D(Conv1D):
    """GPT-2's linear layer, whose weight is transposed, treated in the same way."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        output: Tensor = _Expanded.apply(x, self.weight.t(), self.bias)
        return output


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(input, torch.empty_like(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ torch.empty_like(weight), None, None


def quantize(layers: Iterable[nn.Module]) -> None:
    """Replace the classes of these linear layers."""
    for layer in layers:
        layer.__class__ = QuantizedLinear if isinstance(layer, nn.Linear) else QuantizedConv1D


def expand_adapted(modules: nn.Module) -> None:
    """Compute layers in 4 bits and their adapters as one product, as policy.adapted_layers does on a CPU."""
    from flatpeak.policy.adapted_layers import AdaptedLinear  # imported here because it loads peft

    class ExpandedLinear(AdaptedLinear):
        """A layer with an adapter whose base is expanded in each pass."""

        def knows(self, base: nn.Module) -> bool:
            return True

        def matrix(self) -> Tensor:
            return torch.empty_like(self.base_layer.weight)

    for module in modules.modules():
        if type(module) is AdaptedLinear and isinstance(module.base_layer, QuantizedLinear):
            module.__class__ = ExpandedLinear
