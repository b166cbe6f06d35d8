"""Export of a run's model as one plain Hugging Face directory, with its adapters merged into the base."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from flatpeak.errors import UserError
from flatpeak.pipeline.model_source import locate_model, trained_as
from flatpeak.pipeline.prompt_record import PROMPT_RECORD, read_prompt_record
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import cast_weights, load_pretrained
from flatpeak.rewards.sequence_classifier import RECORD as REWARD_MODEL
from flatpeak.rewards.sequence_classifier import load_base, load_model
from flatpeak.runs.checkpoints import TRAINING_FILES, checkpoint_name, verify_checkpoint
from flatpeak.runs.directory import RunPaths
from flatpeak.utils.adapter_base import ADAPTER_CONFIG
from flatpeak.utils.adapters import load_adapter
from flatpeak.utils.huggingface import no_progress_bar, no_warnings, save_tokenizer, share_weights

DType = Literal["float32", "bfloat16"]
MOST_LOST: Final = 0.5
"""The largest norm of the rounding error, relative to the norm of the adapters' share of the weights."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """The directory of an exported model, and how it was made."""

    path: Path
    source: Path
    """The checkpoint that it was made from."""
    dtype: DType | None
    """The type of its weights; None if the files were copied unchanged."""
    lost: float | None
    """Norm of the rounding error relative to the adapters' share of the weights; None without adapters."""


def export(run: str | Path, directory: str | Path, *, checkpoint: str = "best", dtype: DType | None = None) -> Export:
    """Write the model of a run or checkpoint to a new directory that needs neither flatpeak nor peft.

    Adapters are merged in float32 and rounded once, to `dtype` (default: the run's `model.dtype`); a base in 4 bits is
    dequantized first, because 4 bits could not represent what the adapters have learned. Raises UserError if rounding
    would lose most of that, if there is no such checkpoint, or if the directory is not empty.
    """
    source, target = locate_checkpoint(str(run), checkpoint), Path(directory)
    check_new(target)
    adapted = (source / ADAPTER_CONFIG).is_file()
    if not adapted and dtype is None:
        with whole_or_absent(target) as temporary:
            shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(*TRAINING_FILES), dirs_exist_ok=True)
        return Export(path=target, source=source, dtype=None, lost=None)
    trained, lost = trained_as(source), None
    dtype = dtype or trained.dtype
    kind: torch.dtype = getattr(torch, dtype)
    with no_progress_bar(), no_warnings():
        model, tokenizer = _load(trained, source)
        if adapted:
            model, lost = _merged(model, trained, source, kind)
        cast_weights(model, kind)
        with whole_or_absent(target) as temporary:
            model.save_pretrained(temporary)
            save_tokenizer(tokenizer, temporary)
            if (source / REWARD_MODEL).is_file():
                shutil.copy(source / REWARD_MODEL, temporary)
            record = read_prompt_record(source)
            if record is not None:  # a copy is loaded in the type that its record names
                text = record.model_copy(update={"dtype": dtype}).as_text()
                (temporary / PROMPT_RECORD).write_text(text, encoding="utf-8")
    return Export(path=target, source=source, dtype=dtype, lost=lost)


def check_new(target: Path) -> None:
    """UserError for a directory that is not empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not empty: give a new directory")


@contextmanager
def whole_or_absent(target: Path) -> Iterator[Path]:
    """A directory to write into, which becomes `target` at the end; after an error nothing of it remains."""
    temporary = target.absolute().with_name(f".export-{target.absolute().name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        share_weights(temporary)
        temporary.rename(target.absolute())
    except OSError as error:  # includes shutil.Error
        raise UserError(f"{target} cannot be written ({error}): free space or fix the cause") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def locate_checkpoint(run: str, checkpoint: str) -> Path:
    """The directory of a run's checkpoint, verified; a directory that is not a run stands for itself."""
    paths = RunPaths(Path(run))
    if not paths.is_run() and checkpoint != "best":
        raise UserError(
            f"--checkpoint {checkpoint}: {run} is not a run's directory; give one, or leave --checkpoint out"
        )
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


def _load(config: ModelConfig, source: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of a checkpoint in the type that it was trained in; for an adapter, its base."""
    dtype, cpu = getattr(torch, config.dtype), torch.device("cpu")
    if not (source / REWARD_MODEL).is_file():
        return load_pretrained(config, dtype=dtype, device=cpu)
    load = load_model if config.lora is None else load_base
    model, tokenizer, *_ = load(
        str(source), where="RUN", device=cpu, dtype=dtype, trust_remote_code=config.trust_remote_code
    )
    if model.config.pad_token_id is None:  # as in training: transformers' own forward pass needs it
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _merged(base: Any, config: ModelConfig, source: Path, kind: torch.dtype) -> tuple[Any, float]:
    """The base in float32 with a checkpoint's adapters merged into it, and what rounding to `kind` will lose."""
    base.requires_grad_(False)
    load = partial(load_adapter, path=str(source), where="adapter", scores=(source / REWARD_MODEL).is_file())
    quantized = config.quantization is not None
    if quantized:  # only for the check: the fingerprint covers the weights other than those in 4 bits
        base = load(base).unload().dequantize(dtype=torch.float32)
    cast_weights(base, torch.float32)
    adapted = load(base, checked=quantized)
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
        warnings.simplefilter("ignore")  # that they are already merged, and that a trained head is no longer tied
        model = adapted.merge_and_unload()
    restore_conv1d(model)
    return model, lost


def restore_conv1d(model: Any) -> None:
    """Restore the linear layers of a dequantized GPT-2 to their own kind, with transposed weights."""
    with torch.device("meta"):
        plain = type(model)(model.config)
    for name, module in plain.named_modules():
        linear = model.get_submodule(name)
        if isinstance(module, Conv1D) and isinstance(linear, torch.nn.Linear):
            own = Conv1D(linear.out_features, linear.in_features)
            own.weight.data, own.bias.data = linear.weight.detach().t().contiguous(), linear.bias.detach()
            model.set_submodule(name, own)
