"""Export of a run's model as one plain Hugging Face directory, its adapters merged into the base."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.errors import UserError
from flatpeak.pipeline.compare import locate_model
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import adapter_source, cast_weights, load_pretrained
from flatpeak.runs.checkpoints import MANIFEST, TRAINER, checkpoint_name, verify_checkpoint
from flatpeak.runs.directory import RunPaths
from flatpeak.utils.adapters import ADAPTER_CONFIG, check_base, load_adapter
from flatpeak.utils.huggingface import load_tokenizer, no_progress_bar, no_warnings

DType = Literal["float32", "bfloat16"]
MOST_LOST: Final = 0.5
"""The largest norm of the rounding error, over the norm of the adapters' share of the weights."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """The directory of an exported model, and how it was made."""

    path: Path
    source: Path
    """The checkpoint that it was made of."""
    dtype: DType | None
    """The type of its weights; None where the files were copied as they were."""
    lost: float | None
    """Norm of the rounding error over the norm of the adapters' share of the weights; None without adapters."""


def export(run: str | Path, directory: str | Path, *, checkpoint: str = "best", dtype: DType | None = None) -> Export:
    """Write the model of a run or checkpoint to a new directory that needs neither flatpeak nor peft.

    Adapters are merged in float32 and rounded once, to `dtype` (default: the run's `model.dtype`); a base in 4 bits is
    dequantized first, since 4 bits would not hold what the adapters have learned. Raises UserError where rounding would
    lose most of that, where there is no such checkpoint, and for a directory that is not empty.
    """
    source, target = _checkpoint(str(run), checkpoint), Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not empty: give a new directory")
    adapted = (source / ADAPTER_CONFIG).is_file()
    if not adapted and dtype is None:
        _copy(source, target)
        return Export(path=target, source=source, dtype=None, lost=None)
    trained = _trained_as(source)
    dtype = dtype or trained.dtype
    kind: torch.dtype = getattr(torch, dtype)
    with no_progress_bar(), no_warnings():
        model, lost = _merged(trained, source, kind) if adapted else (_base(trained), None)
        cast_weights(model, kind)
        model.save_pretrained(target)
    load_tokenizer(str(source)).save_pretrained(target)
    return Export(path=target, source=source, dtype=dtype, lost=lost)


def _checkpoint(run: str, checkpoint: str) -> Path:
    """The directory of the checkpoint; a directory that is no run stands for itself."""
    paths = RunPaths(Path(run))
    if not paths.is_run() or checkpoint == "best":
        path = locate_model(run).path
        assert path is not None  # only a run's stages may lack one
        if not Path(path).is_dir():
            raise UserError(f"{run}: not a run or a directory with a model")
        return Path(path)
    stages = {"last": paths.checkpoints / "last", "sft": paths.sft_checkpoints / "last"}
    source = paths.checkpoints / checkpoint_name(int(checkpoint)) if checkpoint.isdecimal() else stages.get(checkpoint)
    if source is None or not source.is_dir():
        there = ", ".join(sorted(path.name for path in paths.checkpoints.glob("[!.]*") if path.is_dir())) or "none"
        raise UserError(f"--checkpoint {checkpoint}: {run} has {there}; give best, last, sft or the number of a step")
    verify_checkpoint(source)
    return source


def _copy(source: Path, target: Path) -> None:
    """Copy a checkpoint without the trainer's state."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(TRAINER, MANIFEST), dirs_exist_ok=True)


def _trained_as(source: Path) -> ModelConfig:
    """The model of a checkpoint, in the type that its run had; float32 where it belongs to none."""
    recipe = locate_model(str(source)).recipe
    model = parse_config(load_recipe(recipe)).model if recipe is not None else ModelConfig()
    return adapter_source(
        ModelConfig(path=str(source), dtype=model.dtype, trust_remote_code=model.trust_remote_code, device="cpu")
    )


def _base(config: ModelConfig) -> Any:
    return load_pretrained(config, dtype=getattr(torch, config.dtype), device=torch.device("cpu"))[0]


def _merged(config: ModelConfig, source: Path, kind: torch.dtype) -> tuple[Any, float]:
    """The base in float32 with a checkpoint's adapters merged into it, and what rounding to `kind` will lose."""
    base = _base(config)
    base.requires_grad_(False)
    check_base(base, source, where=str(source))
    if config.quantization is not None:
        base = base.dequantize(dtype=torch.float32)
    cast_weights(base, torch.float32)
    adapted = load_adapter(base, str(source), where="adapter", checked=True)
    learned, rounding = 0.0, 0.0
    for layer in adapted.modules():
        if hasattr(layer, "merge") and hasattr(layer, "get_base_layer"):
            weight: Tensor = layer.get_base_layer().weight
            before = weight.detach().clone()
            layer.merge(safe_merge=True)
            merged = layer.get_base_layer().weight.detach()
            learned += float((merged - before).double().square().sum())
            rounding += float((merged.to(kind).float() - merged).double().square().sum())
    lost = (rounding / learned) ** 0.5 if learned else 0.0
    if lost > MOST_LOST:
        raise UserError(
            f"in {str(kind).removeprefix('torch.')} rounding would take {lost:.0%} of what the adapters have learned: "
            "export with --dtype float32"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are merged already, and that a trained head is tied no longer
        model = adapted.merge_and_unload()
    restore_conv1d(model)
    return model, lost


def restore_conv1d(model: Any) -> None:
    """Give a dequantized GPT-2 its own kind of linear layers back, whose weights lie transposed."""
    with torch.device("meta"):
        plain = type(model)(model.config)
    for name, module in plain.named_modules():
        linear = model.get_submodule(name)
        if isinstance(module, Conv1D) and isinstance(linear, torch.nn.Linear):
            own = Conv1D(linear.out_features, linear.in_features)
            own.weight.data, own.bias.data = linear.weight.detach().t().contiguous(), linear.bias.detach()
            model.set_submodule(name, own)
