"""The memory of a planned rollout: keys and values, and the extra for reading prompts, decoding and drawing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from flatpeak.apps.planning.dry_run import prefill_memory
from flatpeak.apps.planning.fake_policy import PassSettings
from flatpeak.apps.planning.inventory import quantized_layers
from flatpeak.apps.planning.planned_model import PlannedModel, causal_of
from flatpeak.apps.planning.workload import Request, Workload
from flatpeak.config.run_config import RunConfig
from flatpeak.kernels.matmul import SMALLEST, onednn_is_faster
from flatpeak.policy.gpu_decoding import KINDS
from flatpeak.policy.kv_cache import GPU_KEY_MULTIPLE, fitting_buckets, graded_buckets, round_up
from flatpeak.policy.linears import TOGETHER
from flatpeak.policy.native_decoding import SETTING, TORCH
from flatpeak.policy.native_weights import SERVED
from flatpeak.policy.packing import ROW_MULTIPLE, key_multiple
from flatpeak.rollout.config import VLLMConfig
from flatpeak.training.master_weights import FLOAT32
from flatpeak.utils.adapter_base import is_of_adapter

PREFILL_TOKENS: Final = 8192
"""The most prompt tokens that the engine reads in one pass."""
GPU_SLOTS: Final = 16
"""Slots on a GPU are rounded up to a multiple of this."""
SCORES: Final = 3
"""Tensors of attention scores alive at once in a decoding step on a CPU: raw, joined, and their softmax."""
TOKEN_RECORD: Final = 12
"""Bytes of a drawn token: its id, and its log-probability."""


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    """Bytes of a rollout."""

    keys_and_values: int
    decoding: int
    """Activations, scores and logits."""


def rollout_memory(config: RunConfig, work: Workload, settings: PassSettings) -> RolloutMemory:
    """The memory of a run's rollouts, in training steps or evaluations, whichever is larger."""
    requests = [work.evaluation, work.request] if work.steps else [work.evaluation]
    each = [request_memory(request, config, settings) for request in requests if request.prompt_lengths]
    return RolloutMemory(
        keys_and_values=max((one.keys_and_values for one in each), default=0),
        decoding=max((one.decoding for one in each), default=0),
    )


def has_second_process(config: RunConfig) -> bool:
    """Whether a process with a copy of the policy draws rollouts ahead; servers need none."""
    return bool(config.rollout.staleness) and not isinstance(config.rollout.engine, VLLMConfig)


def request_memory(request: Request, config: RunConfig, settings: PassSettings) -> RolloutMemory:
    """The memory of a request all of whose completions have the maximum length."""
    rows = min(config.rollout.max_rows, len(request.prompt_lengths) * request.group_size)
    first = request.prompt_lengths[: -(-rows // request.group_size)]
    if isinstance(config.rollout.engine, VLLMConfig):  # keys, values and logits are on the servers
        tokens = len(request.prompt_lengths) * request.group_size * request.new_tokens
        return RolloutMemory(keys_and_values=0, decoding=TOKEN_RECORD * tokens)
    if settings.model.fallback is not None or config.rollout.engine == "generate":
        return _generated(request, rows, config, settings.model)
    multiple = key_multiple(settings.model.shape) if config.rollout.batch_invariant else 1
    reading = prefill_memory(settings, _one_pass(first), multiple=multiple)
    columns = round_up(request.new_tokens, multiple if settings.on_cpu else GPU_KEY_MULTIPLE)
    cells = _prompt_cells(request.prompt_lengths, rows, multiple=multiple, on_cpu=settings.on_cpu)
    step = prefill_memory(settings, [1] * rows, multiple=1, with_logits=False).peak
    if settings.on_cpu:
        step += SCORES * FLOAT32 * rows * settings.model.shape.num_attention_heads * (columns + first[0])
    return RolloutMemory(
        keys_and_values=reading.per_token * (cells + _slots(rows, config, on_cpu=settings.on_cpu) * columns),
        decoding=max(reading.peak, step + _drawing(rows, len(first), config, settings.model))
        + TOKEN_RECORD * len(request.prompt_lengths) * request.group_size * request.new_tokens,
    )


def _one_pass(lengths: Sequence[int]) -> list[int]:
    """The longest prompts that are read together."""
    chosen: list[int] = []
    for length in lengths:
        if chosen and sum(chosen) + length > PREFILL_TOKENS:
            break
        chosen.append(length)
    return chosen


def _prompt_cells(lengths: Sequence[int], rows: int, *, multiple: int, on_cpu: bool) -> int:
    """Columns of the prompts' memory: an entry for each prompt in a slot and one more, in regions of similar width."""
    entries = min(len(lengths), rows + 1)
    buckets = fitting_buckets(lengths, entries, multiple=multiple) if on_cpu else graded_buckets(lengths, entries)
    return sum(columns * count for columns, count in buckets.items())


def _slots(rows: int, config: RunConfig, *, on_cpu: bool) -> int:
    if on_cpu:
        return round_up(rows, ROW_MULTIPLE if config.rollout.batch_invariant else 1)
    return round_up(rows, GPU_SLOTS) if rows > GPU_SLOTS // 2 else rows


def _drawing(rows: int, first_prompts: int, config: RunConfig, model: PlannedModel) -> int:
    """Bytes of logits and probabilities at the beginning of a request, when there are most of them.

    These are the prompts' logits, stacked, then a row for each completion, its probabilities, and a copy for each
    setting that changes them.
    """
    rollout = config.rollout
    copies = 2 + (rollout.temperature != 1) + 2 * (rollout.min_new_tokens > 0)
    copies += 2 * (rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0)
    return FLOAT32 * model.vocabulary * (2 * first_prompts + copies * rows)


def _generated(request: Request, rows: int, config: RunConfig, model: PlannedModel) -> RolloutMemory:
    """The memory of transformers' `generate`, in which every completion also has keys and values of its prompt."""
    per_token = kv_bytes_per_token(model)
    tokens = rows * (request.prompt_lengths[0] + request.new_tokens)
    return RolloutMemory(
        keys_and_values=per_token * tokens,
        # A layer's keys and values are copied as they grow.
        decoding=per_token * tokens // model.layers + _drawing(rows, rows, config, model),
    )


def kv_bytes_per_token(model: PlannedModel) -> int:
    """Bytes of a token's keys and values in all layers, according to the configuration."""
    shape = model.shape
    heads = shape.num_attention_heads
    kv_heads = getattr(shape, "num_key_value_heads", None) or heads
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    return 2 * model.layers * int(kv_heads) * int(dim) * model.dtype.itemsize


def packed_copies(model: PlannedModel, *, on_cpu: bool) -> list[int]:
    """Bytes of each copy of weights in oneDNN's layout, which decoding in float32 reads if that is faster.

    Layers that read the same input share a copy, unless adapters separate them; see policy.linears.
    """
    if not on_cpu or model.fallback is not None or not onednn_is_faster():
        return []
    quantized = {id(layer) for layer in quantized_layers(model)}
    single = {
        id(layer): layer.weight.nbytes
        for layer in model.modules.modules()
        if isinstance(layer, nn.Linear | Conv1D) and id(layer) not in quantized
        if layer.weight.dtype == torch.float32 and layer.weight.numel() >= SMALLEST
    }
    together = []
    for module in model.modules.modules():
        for names in TOGETHER:
            layers = [id(getattr(module, name, None)) for name in names]
            if single.keys() >= set(layers):
                together.append(sum(single.pop(layer) for layer in layers))
    return [*together, *single.values()]


def native_copy(config: RunConfig, model: PlannedModel, *, on_cpu: bool) -> int:
    """Bytes of the native kernels' copy for decoding: every linear weight once, adapters merged; see native_weights.

    If the kernels cannot be compiled or do not agree with torch, there is no copy.
    """
    kernels = config.rollout.kernels
    setting = os.environ.get(SETTING, kernels) if kernels == "auto" else kernels
    torch_decodes = setting == TORCH or config.rollout.engine not in ("auto", "native")
    if not on_cpu or torch_decodes or model.below_float32 or model.shape.model_type not in SERVED:
        return 0
    layers = causal_of(model.modules).named_modules()
    return sum(
        layer.weight.nbytes
        for name, layer in layers
        if isinstance(layer, nn.Linear | Conv1D) and not is_of_adapter(f"{name}.")
    )


def fused_copies(config: RunConfig, model: PlannedModel) -> int:
    """Bytes of the concatenated weights of queries, keys and values on a GPU; see policy.gpu_decoding."""
    whole = config.model.lora is None and config.rollout.engine in ("auto", "native")
    if not whole or model.fallback is not None or model.shape.model_type not in KINDS:
        return 0
    projections = (".q_proj.weight", ".k_proj.weight", ".v_proj.weight")
    return sum(p.nbytes for name, p in model.modules.named_parameters() if name.endswith(projections))
