"""The base of a saved adapter: its name, and the record of its weights next to the adapter.

A saved adapter is useless without its base. Importing this module loads neither torch nor peft.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flatpeak.errors import UserError
from flatpeak.utils.huggingface import is_surely_local

if TYPE_CHECKING:
    from torch import nn

ADAPTER_CONFIG: Final = "adapter_config.json"
"""peft's file of an adapter's settings."""
RECORD: Final = "adapter_base.json"
"""The file next to it with the record of the base."""
SAMPLED: Final = 1024
"""Elements of each weight that the fingerprint reads."""
SCORE_HEADS: Final = ("score", "classifier")
"""Names of the heads of sequence classifiers. A base without a head gets a new random head each time."""
_ADAPTERS: Final = (".lora_", ".modules_to_save.")
_NAME_BASE: Final = "set model.path to the base and model.lora.adapter="
_WRAPPERS: Final = (("base_model.model.", ""), (".base_layer.", "."), (".original_module.", "."))


@dataclass(frozen=True, kw_only=True)
class BaseRecord:
    """The base of a saved adapter."""

    fingerprint: str
    quantization: str | None = None


def normalize_settings(directory: Path) -> None:
    """Sort a saved adapter's sets, whose order differs in each process, and make the path of a local base absolute."""
    settings = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = settings.get("base_model_name_or_path")
    if base and Path(base).expanduser().exists():
        settings["base_model_name_or_path"] = str(Path(base).expanduser().absolute())
    for name in ("target_modules", "exclude_modules"):
        if isinstance(settings.get(name), list):
            settings[name].sort()
    text = json.dumps(settings, indent=2, sort_keys=True)
    (directory / ADAPTER_CONFIG).write_text(text, encoding="utf-8")


def named_base(directory: Path, *, where: str) -> tuple[str, str | None]:
    """(path, revision) of the base that a saved adapter names; UserError if it names none, or a missing one."""
    base, revision = _named(directory)
    if not base:
        raise UserError(f"{where}={directory} is an adapter that does not name its base: {_NAME_BASE}{directory}")
    if is_surely_local(base) and not Path(base).expanduser().exists():
        remedy = f", or {_NAME_BASE}{directory}" if where == "model.path" else ""
        raise UserError(f"{where}={directory} is an adapter of {base}, which is not there: put that back{remedy}")
    return base, revision


def _named(directory: Path) -> tuple[str | None, str | None]:
    try:
        settings = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        return settings.get("base_model_name_or_path"), settings.get("revision")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{directory / ADAPTER_CONFIG}: not the settings of an adapter; copy it again") from error


def write_record(model: nn.Module, directory: Path) -> None:
    """Write the record of a peft model's base next to its saved adapter."""
    record = BaseRecord(fingerprint=fingerprint(model), quantization=quantization_of(model))
    (directory / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def read_record(directory: Path) -> BaseRecord | None:
    """The record next to an adapter; None if there is none, as for adapters not trained by flatpeak."""
    path = directory / RECORD
    if not path.is_file():
        return None
    try:
        return BaseRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not the record of an adapter's base ({error}); copy it again") from error


def check_base(model: nn.Module, directory: Path, *, where: str) -> None:
    """Raise a UserError if an adapter's record is about another base than the model's; without a record it passes."""
    record = read_record(directory)
    if record is None or record.fingerprint == fingerprint(model):
        return
    if record.quantization != quantization_of(model):
        was, remedy = (
            "not in 4 bits",
            "leave out model.quantization, or train on from what flatpeak export makes of it",
        )
        if record.quantization is not None:
            was, remedy = "in 4 bits", f"set model.quantization={record.quantization}"
        raise UserError(f"{where} was trained over a base {was}, unlike this one: {remedy}")
    raise UserError(
        f"{where} was trained on other weights than those of this model: name its base as model.path "
        f"({_named(directory)[0]} when it was saved)"
    )


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of the names, the shapes and the first elements of a model's frozen weights.

    Weights are rounded to bfloat16, so that the same base in float32 and bfloat16 gives the same result. Quantized
    weights are left out, because they depend on the device that quantized them.
    """
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: _base_name(item[0])):
        own = parameter.requires_grad or any(marker in name for marker in _ADAPTERS)
        if own or not parameter.is_floating_point() or _base_name(name).startswith(SCORE_HEADS):
            continue
        first = parameter.detach().flatten()[:SAMPLED].to(device="cpu", dtype=torch.bfloat16)
        digest.update(f"{_base_name(name)} {tuple(parameter.shape)} ".encode())
        digest.update(first.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def is_of_adapter(name: str) -> bool:
    """Whether a parameter with that name belongs to an adapter."""
    return any(marker in name for marker in _ADAPTERS)


def quantization_of(model: nn.Module) -> str | None:
    """The value of `model.quantization` with which a model was loaded."""
    return "nf4" if any(type(parameter).__name__ == "Params4bit" for parameter in model.parameters()) else None


def _base_name(name: str) -> str:
    for wrapper, plain in _WRAPPERS:
        name = name.replace(wrapper, plain)
    return name
