"""The memory of a recipe's reward models: their weights by config.json, and a pass over completions by a dry run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForSequenceClassification

from flatpeak.apps.planning.dry_run import quiet_fake_tensors
from flatpeak.apps.planning.fake_policy import exchange_tensors
from flatpeak.apps.planning.inventory import nf4_bytes
from flatpeak.apps.planning.memory_tracker import MemoryTracker
from flatpeak.apps.planning.planned_model import with_layers
from flatpeak.config.run_config import RunConfig
from flatpeak.rewards.config import RewardConfig, SequenceClassifierConfig
from flatpeak.rewards.sequence_classifier import default_batch_tokens, locate
from flatpeak.utils.adapter_base import ADAPTER_CONFIG, named_base, read_record
from flatpeak.utils.huggingface import load_errors, local_or_hub

LAYERS: Final = 2
"""Layers that are run: without gradients a layer is freed before the next."""


@dataclass(frozen=True, kw_only=True)
class RewardModelMemory:
    """Bytes of reward models."""

    weights: int
    """Of all of them: they stay in memory."""
    scoring: int
    """Of the largest pass of any of them."""
    uncounted: tuple[str, ...]
    """Those whose passes cannot be run without data."""


def reward_model_memory(config: RunConfig, *, text_tokens: int, texts: int, on_cpu: bool) -> RewardModelMemory:
    """The memory of the recipe's reward models that are on the planned device, for texts of so many tokens.

    UserError where one of them is not there.
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
    """(the transformers configuration, the bytes of all weights) of a reward model, adapters included."""
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
    """Bytes alive at most while texts are scored, as `Classifier.scores` does."""
    model = _on_meta(with_layers(shape, LAYERS) if getattr(shape, "num_hidden_layers", 0) > LAYERS else shape, dtype)
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
