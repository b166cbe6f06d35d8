"""Low-rank adapters of a policy (LoRA), as peft makes them, and the record of the model that they belong to.

A saved adapter is nothing without its base, so a checkpoint names it and holds a fingerprint of its weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from flatpeak.errors import UserError, brief
from flatpeak.policy.config import LoraConfig, ModelConfig
from flatpeak.policy.quantization import is_quantized
from flatpeak.utils.huggingface import hub_or_directory, local_or_hub

ADAPTER_CONFIG: Final = "adapter_config.json"
"""peft's file of an adapter's settings."""
RECORD: Final = "adapter_base.json"
"""The file beside it with the record of the base."""
SAMPLED: Final = 1024
"""Elements of each weight that the fingerprint reads."""
_ADAPTERS: Final = (".lora_", ".modules_to_save.")
_WRAPPERS: Final = (("base_model.model.", ""), (".base_layer.", "."), (".original_module.", "."))


@dataclass(frozen=True, kw_only=True)
class BaseRecord:
    """The base of a saved adapter."""

    fingerprint: str
    quantization: str | None = None


def add_adapters(model: Any, config: LoraConfig, *, seed: int) -> Any:
    """A peft model with new adapters in float32, B = 0, or with those of `config.adapter`; the base is frozen.

    A is drawn from `seed`; the caller's generator stays as it is. UserError where a target is in no layer's name, or
    the adapter does not fit the model.
    """
    peft = _peft()
    if config.adapter is not None:
        return load_adapter(model, config.adapter, where="model.lora.adapter")
    _check_targets(model, config)
    with torch.random.fork_rng(), _peft_errors("model.lora"):
        torch.manual_seed(seed)
        return peft.get_peft_model(
            model,
            peft.LoraConfig(
                task_type="CAUSAL_LM",
                r=config.rank,
                lora_alpha=config.alpha,
                lora_dropout=config.dropout,
                target_modules=_listed(config.target_modules),
                modules_to_save=list(config.modules_to_save) or None,
                use_rslora=config.rslora,
                use_dora=config.dora,
            ),
        )


def load_adapter(model: Any, path: str, *, where: str, checked: bool = False) -> Any:
    """A peft model with a saved adapter, trainable; UserError where that belongs to another base.

    `checked` says that the base is known to be the right one, as one that was dequantized since.
    """
    peft = _peft()
    source = local_or_hub(path)
    with hub_or_directory(path) as problem, _peft_errors(f"{where}={path}", problem):
        config = peft.PeftConfig.from_pretrained(source)
        if config.peft_type != "LORA":
            raise UserError(f"{where}={path} is of type {config.peft_type}: only LoRA adapters are served")
        config.inference_mode = False
        adapted = peft.get_peft_model(model, config)
        weights = peft.utils.load_peft_weights(source, device="cpu")
        report = peft.set_peft_model_state_dict(adapted, weights)
    missing = [name for name in report.missing_keys if any(marker in name for marker in _ADAPTERS)]
    for name in (*report.unexpected_keys, *missing):
        raise UserError(f"{where}={path} does not fit the model at {name}: it was trained on another base model")
    if not checked:
        check_base(adapted, Path(source), where=f"{where}={path}")
    return adapted


def restore_adapter(model: Any, directory: Path) -> None:
    """Put a checkpoint's adapters into a model that has such adapters."""
    peft = _peft()
    from safetensors.torch import load_file

    peft.set_peft_model_state_dict(model, load_file(directory / "adapter_model.safetensors"))


def adapter_source(config: ModelConfig) -> ModelConfig:
    """The configuration that loads what `model.path` names: where that is an adapter, its base with the adapter on it.

    UserError where the adapter's base is unknown, or the recipe wants further adapters.
    """
    directory = Path(config.path or "").expanduser()
    if config.path is None or not (directory / ADAPTER_CONFIG).is_file():
        return config
    if config.lora is not None and config.lora.model_fields_set - {"dropout"}:
        raise UserError(
            f"model.path={config.path} is an adapter already: leave out model.lora to train it on, or name its base as "
            "model.path to begin with another one"
        )
    settings = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = settings.get("base_model_name_or_path")
    if not base:
        raise UserError(
            f"model.path={config.path} is an adapter that does not name its base: set model.path to the base and "
            f"model.lora.adapter={config.path}"
        )
    record = read_record(directory)
    return config.model_copy(
        update={
            "path": base,
            "revision": settings.get("revision"),
            "lora": LoraConfig(adapter=config.path, dropout=config.lora.dropout if config.lora else 0.0),
            "quantization": config.quantization or (record.quantization if record else None),
        }
    )


def resumed_source(config: ModelConfig, checkpoint: Path) -> ModelConfig:
    """The configuration that loads a run's model as a checkpoint has it: all of it, or its adapters on their base."""
    config = adapter_source(config)
    if config.lora is None:
        return config.model_copy(update={"path": str(checkpoint), "new": None, "revision": None})
    adapter = LoraConfig(adapter=str(checkpoint), dropout=config.lora.dropout)
    return config.model_copy(update={"lora": adapter})


def write_record(model: Any, directory: Path) -> None:
    """Write the record of a peft model's base beside its saved adapters."""
    quantized = any(map(is_quantized, model.parameters()))
    record = BaseRecord(fingerprint=fingerprint(model), quantization="nf4" if quantized else None)
    (directory / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def read_record(directory: Path) -> BaseRecord | None:
    """The record beside an adapter; None where it has none, as an adapter that flatpeak did not train."""
    path = directory / RECORD
    if not path.is_file():
        return None
    try:
        return BaseRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not the record of an adapter's base ({error}); copy it again") from error


def check_base(model: nn.Module, directory: Path, *, where: str) -> None:
    """Raise a UserError where an adapter's record is of another base than the model's; one without a record passes."""
    record = read_record(directory)
    if record is not None and record.fingerprint != fingerprint(model):
        base = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise UserError(
            f"{where} was trained on other weights than those of this model: name its base as model.path "
            f"({base} when it was saved)"
        )


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of the names, the shapes and the first elements of a model's frozen weights.

    In bfloat16, to which a base in float32 and the same one in bfloat16 round alike; without quantized weights, which
    depend on the device that has quantized them.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: _base_name(item[0])):
        if parameter.requires_grad or not parameter.is_floating_point() or any(marker in name for marker in _ADAPTERS):
            continue
        first = parameter.detach().flatten()[:SAMPLED].to(device="cpu", dtype=torch.bfloat16)
        digest.update(f"{_base_name(name)} {tuple(parameter.shape)} ".encode())
        digest.update(first.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def dropout_modules(model: nn.Module) -> set[nn.Module]:
    """The dropout modules that belong to adapters."""
    adapters = (getattr(module, "lora_dropout", None) for module in model.modules())
    return {module for one in adapters if isinstance(one, nn.Module) for module in one.modules()}


def linear_names(model: nn.Module) -> list[str]:
    """The last parts of the names of a model's linear layers."""
    return sorted(
        {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    )


def _base_name(name: str) -> str:
    for wrapper, plain in _WRAPPERS:
        name = name.replace(wrapper, plain)
    return name


def _check_targets(model: nn.Module, config: LoraConfig) -> None:
    targets = config.target_modules if isinstance(config.target_modules, tuple) else ()
    _check_names("target_modules", targets, model, choices=linear_names(model))
    modules = sorted({name.rpartition(".")[2] for name, _ in model.named_modules()} - {""})
    _check_names("modules_to_save", config.modules_to_save, model, choices=[n for n in modules if not n.isdecimal()])


def _check_names(key: str, wanted: Iterable[str], model: nn.Module, *, choices: Iterable[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for one in wanted:
        if not any(name == one or name.endswith(f".{one}") for name in names):
            raise UserError(f"model.lora.{key}: no module is called {one}; there are {', '.join(choices)}")


def _listed(targets: str | tuple[str, ...]) -> str | list[str]:
    return targets if isinstance(targets, str) else list(targets)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError('model.lora needs peft: pip install "flatpeak[lora]"') from error
    return peft


@contextmanager
def _peft_errors(where: str, problem: str | None = None) -> Iterator[None]:
    """A context in which what peft raises is a UserError that names the setting."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, RuntimeError, OSError, NotImplementedError) as error:
        raise UserError(f"{where}: {problem or brief(error)}") from error
