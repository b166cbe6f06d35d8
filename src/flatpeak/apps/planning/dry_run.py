"""Dry runs: flatpeak's own passes on tensors with shapes but no data, and the bytes that are alive during them.

Activations depend on what each layer of an architecture keeps for its backward pass, on adapters, which cast their
inputs, and on kernels. Formulas for all of this would be guesses, so the passes are run (`fake_policy`) and every
allocation is counted. Layers repeat, so the memory of a few layers gives that of all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForSequenceClassification

from flatpeak.apps.planning.fake_policy import FakeContext, MemoryTracker, PassSettings, exchange_tensors, fake_policy
from flatpeak.apps.planning.inventory import nf4_bytes
from flatpeak.apps.planning.planned_model import PlannedModel, with_layers
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError, brief
from flatpeak.policy.loading import misfit
from flatpeak.policy.packing import fill, pack_prompts
from flatpeak.rewards.config import RewardConfig, SequenceClassifierConfig
from flatpeak.rewards.sequence_classifier import default_batch_tokens, locate
from flatpeak.types import Batch
from flatpeak.utils.adapter_base import ADAPTER_CONFIG, named_base, read_record
from flatpeak.utils.huggingface import load_errors, local_or_hub

FEW: Final = 2
MORE: Final = 3
"""The numbers of layers to run. Memory is linear in their number from the second layer on: the first has the embeddings
as its input. Without gradients, only keys and values outlive their layer, so FEW layers give the memory of all."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The memory of a prefill."""

    peak: int
    """The most bytes alive at once, including the keys and values of the prompts."""
    per_token: int
    """Bytes of the keys and values of one token."""


class NoDryRunError(Exception):
    """The passes of a model cannot run without data, for example if values decide which expert reads a token."""


def update_peak(settings: PassSettings, batch: Batch) -> int:
    """The most bytes alive in the forward and backward pass of a micro-batch: gradients, activations, logits."""
    model = settings.model

    def measure(layers: int) -> int:
        with fake_policy(settings, layers) as policy, MemoryTracker(policy.tensors) as memory:
            if settings.accumulated:
                for parameter in policy.trained:
                    parameter.grad = torch.empty_like(parameter, dtype=torch.float32)
            policy.score(batch).sum().backward()
            for parameter in policy.trained:
                parameter.grad = None
        return int(memory.peak)

    def at_depth() -> tuple[int, ...]:
        few = measure(min(FEW, model.layers))
        more = measure(MORE) if model.layers > FEW else few
        return (few + (more - few) * (model.layers - FEW) // (MORE - FEW),)

    key = ("update", settings.on_cpu, settings.recompute, settings.accumulated, settings.dropout, *_lengths(batch))
    return _remembered(model, key, at_depth)[0]


def scoring_peak(settings: PassSettings, batch: Batch) -> int:
    """The most bytes alive while a micro-batch is scored without gradients."""

    def measure() -> tuple[int, ...]:
        layers = min(FEW, settings.model.layers)
        with fake_policy(settings, layers) as policy, torch.no_grad(), MemoryTracker(policy.tensors) as memory:
            policy.score(batch)
        return (int(memory.peak),)

    return _remembered(settings.model, ("scoring", settings.on_cpu, *_lengths(batch)), measure)[0]


def prefill_memory(
    settings: PassSettings, lengths: Sequence[int], *, multiple: int, with_logits: bool = True
) -> Reading:
    """The memory of reading prompts of these lengths in one pass, with or without the logits of their last tokens."""
    depth = settings.model.layers
    row = pack_prompts([[0] * length for length in lengths], device=torch.device("cpu"), multiple=multiple)

    def measure() -> tuple[int, ...]:
        layers = min(FEW, depth)
        with fake_policy(settings, layers) as policy, torch.no_grad(), MemoryTracker(policy.tensors) as memory:
            context = FakeContext(row, keep_prompts=True, on_cpu=settings.on_cpu)
            hidden_PD = policy.hidden(row, context).index_select(0, row.source_T)
            if with_logits:
                policy.head.logits(fill(hidden_PD))
            kept = [states for pair in (context.kept or {}).values() for states in pair]
            held = {id(storage): storage.nbytes() for storage in (states.untyped_storage() for states in kept)}
        peak = int(memory.peak) + sum(held.values()) * (depth - layers) // layers
        return peak, sum(states.nbytes for states in kept) * depth // layers // sum(lengths)

    key = ("prefill", settings.on_cpu, multiple, with_logits, *lengths)
    peak, per_token = _remembered(settings.model, key, measure)
    return Reading(peak=peak, per_token=per_token)


def _lengths(batch: Batch) -> tuple[object, ...]:
    """The lengths of a batch's prompts and completions, which alone determine its memory."""
    return tuple(map(len, batch.prompts)), tuple(batch.lengths_N.tolist()), tuple(batch.prompt_N.tolist())


def _remembered(
    model: PlannedModel, key: tuple[object, ...], measure: Callable[[], tuple[int, ...]]
) -> tuple[int, ...]:
    """The result for this key, measured only the first time."""
    if key in model.measured:
        return model.measured[key]
    try:
        with quiet_fake_tensors():
            model.measured[key] = measure()
    except (RuntimeError, NotImplementedError) as error:
        new = model.config.new
        if new is not None:
            reason = misfit(model.shape, new.config) or brief(error)
            raise UserError(f"model.new cannot be built: {reason}") from error
        if model.fallback is None:
            raise
        raise NoDryRunError(brief(error)) from error
    return model.measured[key]


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """A context in which torch does not log tracebacks of errors in a dry run, which are caught."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass(frozen=True, kw_only=True)
class RewardModelMemory:
    """Bytes of reward models."""

    weights: int
    """Of all reward models, which stay in memory."""
    scoring: int
    """Of the largest pass of any of them."""
    uncounted: tuple[str, ...]
    """Reward models whose passes cannot run without data."""


def reward_model_memory(config: RunConfig, *, text_tokens: int, texts: int, on_cpu: bool) -> RewardModelMemory:
    """The memory of the recipe's reward models that are on the planned device, for texts with this many tokens.

    UserError if a reward model is missing.
    """
    weights, sizes, uncounted = 0, [0], []
    for where, one in _reward_models(config):
        if one.device != "auto" and one.device.startswith("cpu") != on_cpu:
            continue
        shape, size = _describe(one, where=where)
        weights += size
        rows = max(1, (one.batch_tokens or default_batch_tokens(on_cpu=on_cpu)) // text_tokens)
        try:
            sizes.append(_pass_bytes(shape, one.dtype, rows=min(rows, texts), tokens=text_tokens))
        except (RuntimeError, NotImplementedError):
            uncounted.append(where)
    return RewardModelMemory(weights=weights, scoring=max(sizes), uncounted=tuple(uncounted))


def _reward_models(config: RunConfig) -> Iterable[tuple[str, SequenceClassifierConfig]]:
    sections: dict[str, Mapping[str, RewardConfig]] = {"rewards": config.rewards}
    if config.curriculum is not None and config.curriculum.rewards is not None:
        sections["curriculum.rewards"] = config.curriculum.rewards
    for section, rewards in sections.items():
        for name, reward in rewards.items():
            if isinstance(reward, SequenceClassifierConfig):
                yield f"{section}.{name}", reward


def _describe(config: SequenceClassifierConfig, *, where: str) -> tuple[Any, int]:
    """(the transformers configuration, the bytes of all weights) of a reward model, including adapters."""
    source, revision, adapters, quantized = locate(config.path, where=f"{where}.path"), config.revision, 0, False
    directory = Path(source)
    if (directory / ADAPTER_CONFIG).is_file():
        record = read_record(directory)
        adapters = sum(file.stat().st_size for file in directory.glob("adapter_model.*"))
        quantized = record is not None and record.quantization is not None
        source, revision = named_base(directory, where=f"{where}.path")
    with load_errors(source, where=f"{where}.path"):
        shape = AutoConfig.from_pretrained(local_or_hub(source, revision=revision), revision=revision or "main")
        model = _on_meta(shape, config.dtype)
    inner = {id(one.weight) for one in model.base_model.modules() if isinstance(one, torch.nn.Linear)}
    held = (nf4_bytes(p.numel()) if quantized and id(p) in inner else p.nbytes for p in model.parameters())
    return shape, sum(held) + adapters


def _pass_bytes(shape: Any, dtype: str, *, rows: int, tokens: int) -> int:
    """The most bytes alive while texts are scored, as `Classifier.scores` does."""
    model = _on_meta(with_layers(shape, FEW) if getattr(shape, "num_hidden_layers", 0) > FEW else shape, dtype)
    model.config.use_cache = False
    token_ids = torch.zeros(rows, tokens, dtype=torch.int64)
    mask = torch.ones_like(token_ids)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with quiet_fake_tensors(), mode, torch.no_grad():
        exchange_tensors(model)
        with MemoryTracker([*model.parameters(), *model.buffers()]) as memory:
            model.eval().base_model(input_ids=token_ids, attention_mask=mask)
    return int(memory.peak)


def _on_meta(shape: Any, dtype: str) -> Any:
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(shape, dtype=getattr(torch, dtype))
