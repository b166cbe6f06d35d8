"""Low-rank adapters (LoRA), as peft makes them, and the record of the model that they belong to.

A saved adapter is nothing without its base, so a checkpoint names it and holds a fingerprint of its weights. Importing
this module loads neither torch nor peft.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from flatpeak.errors import UserError, brief
from flatpeak.utils.huggingface import hub_or_directory, local_or_hub
from flatpeak.utils.schema import StrictConfig

if TYPE_CHECKING:
    from torch import nn

ADAPTER_CONFIG: Final = "adapter_config.json"
"""peft's file of an adapter's settings."""
RECORD: Final = "adapter_base.json"
"""The file beside it with the record of the base."""
SAMPLED: Final = 1024
"""Elements of each weight that the fingerprint reads."""
SCORE_HEADS: Final = ("score", "classifier")
"""Names of the heads of sequence classifiers. A base that has none gets another random one each time."""
_ADAPTERS: Final = (".lora_", ".modules_to_save.")
_NAME_BASE: Final = "set model.path to the base and model.lora.adapter="
_WRAPPERS: Final = (("base_model.model.", ""), (".base_layer.", "."), (".original_module.", "."))


class LoraConfig(StrictConfig):
    """Low-rank adapters beside frozen weights, W x + s B A x (Hu et al. 2021, arXiv 2106.09685), as peft makes them."""

    rank: Annotated[int, Field(ge=1)] = 16
    alpha: Annotated[float, Field(gt=0)] = 32
    """s = alpha / rank, or alpha / sqrt(rank) with `rslora`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input in training passes, whatever `model.dropout` is."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of the layers that get adapters, such as [q_proj, v_proj]; all-linear: all but the output layer."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole and saved with the adapters."""
    rslora: bool = False
    """Rank-stabilized scaling (Kalajdzievski 2023, arXiv 2312.03732)."""
    dora: bool = False
    """Weight decomposition into magnitude and direction (Liu et al. 2024, arXiv 2402.09353)."""
    adapter: str | None = None
    """A directory or Hub name of an adapter to start from, whose own settings replace those above."""

    @model_validator(mode="after")
    def _settings_of_the_adapter(self) -> LoraConfig:
        replaced = sorted(self.model_fields_set - {"adapter", "dropout"})
        changed = [name for name in replaced if getattr(self, name) != type(self).model_fields[name].default]
        if self.adapter is not None and changed:
            names = ", ".join(f"model.lora.{name}" for name in changed)
            raise ValueError(f"model.lora.adapter={self.adapter} brings its own settings: leave out {names}")
        return self


@dataclass(frozen=True, kw_only=True)
class BaseRecord:
    """The base of a saved adapter."""

    fingerprint: str
    quantization: str | None = None


def add_adapters(model: Any, config: LoraConfig, *, seed: int, head: str | None = None) -> Any:
    """A peft model with new adapters in float32, B = 0, or with those of `config.adapter`; the base is frozen.

    A is drawn from `seed`; the caller's generator stays as it is. `head` is the score head of a sequence classifier,
    which is trained whole. UserError where a target is in no layer's name, or the adapter does not fit the model.
    """
    import torch

    peft = _peft()
    if config.adapter is not None:
        return load_adapter(model, config.adapter, where="model.lora.adapter", dropout=config.dropout)
    _check_targets(model, config)
    with torch.random.fork_rng(), _peft_errors("model.lora"):
        torch.manual_seed(seed)
        return peft.get_peft_model(
            model,
            peft.LoraConfig(
                task_type="CAUSAL_LM" if head is None else "SEQ_CLS",
                r=config.rank,
                lora_alpha=config.alpha,
                lora_dropout=config.dropout,
                target_modules=_listed(config.target_modules),
                modules_to_save=[*config.modules_to_save, *([head] if head else [])] or None,
                use_rslora=config.rslora,
                use_dora=config.dora,
            ),
        )


def load_adapter(model: Any, path: str, *, where: str, dropout: float = 0.0, checked: bool = False) -> Any:
    """A peft model with a saved adapter, trainable; UserError where that belongs to another base.

    `checked` says that the base is known to be the right one, as one that was dequantized since.
    """
    peft = _peft()
    source = local_or_hub(path)
    with hub_or_directory(path) as problem, _peft_errors(f"{where}={path}", problem):
        config = peft.PeftConfig.from_pretrained(source)
        if config.peft_type != "LORA":
            raise UserError(f"{where}={path} is of type {config.peft_type}: only LoRA adapters are served")
        config.inference_mode, config.lora_dropout = False, dropout
        adapted = peft.get_peft_model(model, config)
        _put(adapted, peft.utils.load_peft_weights(source, device="cpu"), where=f"{where}={path}")
    if not checked:
        check_base(adapted, Path(source), where=f"{where}={path}")
    return adapted


def check_own_adapters(model: Any) -> None:
    """Raise a UserError for a caller's peft model of which a checkpoint would lose a part."""
    import torch

    if not hasattr(model, "get_base_model"):
        return
    peft = _peft()
    if model.active_peft_config.is_prompt_learning:
        raise UserError(
            f"the model has {model.active_peft_config.peft_type.value} of peft, whose virtual tokens flatpeak's passes "
            "leave out: give one with LoRA adapters"
        )
    names = model.active_adapters
    if len(names) > 1:
        raise UserError(
            f"the model has {len(names)} active adapters ({', '.join(names)}), and a checkpoint holds one: merge the "
            "others into the base, or choose one with model.set_adapter(name)"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = peft.get_peft_model_state_dict(model, adapter_name=names[0]).values()
    held = {tensor.untyped_storage().data_ptr() for tensor in saved if isinstance(tensor, torch.Tensor)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.untyped_storage().data_ptr() not in held:
            raise UserError(
                f"{name} is trainable and no part of the adapter {names[0]}, so checkpoints would lose it: freeze it, "
                "or name its module in modules_to_save of the adapter's LoraConfig"
            )


def restore_adapter(model: Any, directory: Path) -> None:
    """Put a checkpoint's adapter into a model that has such an adapter, the active one; UserError where it has not."""
    from safetensors.torch import load_file

    with _peft_errors(str(directory)):
        _put(model, load_file(directory / "adapter_model.safetensors"), where=str(directory))


def save_adapter(model: Any, directory: Path) -> None:
    """Write a peft model's active adapter as peft does, whatever its name, and the record of its base.

    A base in a directory is named by its absolute path, so that the adapter may be loaded from any other.
    """
    (name,) = active_adapters(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")
        model.save_pretrained(directory, selected_adapters=[name])
    if name != "default":  # which peft alone writes into the directory itself
        for path in (directory / name).iterdir():
            path.replace(directory / path.name)
        (directory / name).rmdir()
    settings = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = settings.get("base_model_name_or_path")
    if base and Path(base).is_dir():
        settings["base_model_name_or_path"] = str(Path(base).absolute())
        text = json.dumps(settings, indent=2, sort_keys=True)
        (directory / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    write_record(model, directory)


def write_record(model: Any, directory: Path) -> None:
    """Write the record of a peft model's base beside its saved adapters."""
    quantized = any(map(is_quantized, model.parameters()))
    record = BaseRecord(fingerprint=fingerprint(model), quantization="nf4" if quantized else None)
    (directory / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def named_base(directory: Path, *, where: str) -> tuple[str, str | None]:
    """(path, revision) of the base that a saved adapter names; UserError where it names none."""
    settings = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = settings.get("base_model_name_or_path")
    if not base:
        raise UserError(f"{where}={directory} is an adapter that does not name its base: {_NAME_BASE}{directory}")
    return base, settings.get("revision")


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
        base, _ = named_base(directory, where=where)
        raise UserError(
            f"{where} was trained on other weights than those of this model: name its base as model.path "
            f"({base} when it was saved)"
        )


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of the names, the shapes and the first elements of a model's frozen weights.

    In bfloat16, to which a base in float32 and the same one in bfloat16 round alike; without quantized weights, which
    depend on the device that has quantized them.
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


def dropout_modules(model: nn.Module) -> set[nn.Module]:
    """The dropout modules that belong to adapters."""
    from torch import nn

    adapters = (getattr(module, "lora_dropout", None) for module in model.modules())
    return {module for one in adapters if isinstance(one, nn.Module) for module in one.modules()}


def linear_names(model: nn.Module) -> list[str]:
    """The last parts of the names of a model's linear layers."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return sorted(
        {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    )


def is_quantized(parameter: nn.Parameter) -> bool:
    """Whether a parameter holds 4-bit numbers."""
    return type(parameter).__name__ == "Params4bit"


def active_adapters(model: Any) -> list[str]:
    """The names of a peft model's active adapters."""
    names: list[str] = model.active_adapters
    return names


def _put(model: Any, weights: Any, *, where: str) -> None:
    """Put saved weights into a model's active adapter; UserError where they are those of another."""
    (adapter,) = active_adapters(model)
    report = _peft().set_peft_model_state_dict(model, weights, adapter_name=adapter)
    own = (name for name in report.missing_keys if f".{adapter}." in f"{name}.")
    missing = [name for name in own if any(marker in name for marker in _ADAPTERS)]
    for name in (*report.unexpected_keys, *missing):
        raise UserError(f"{where} does not fit the model at {name}: it was trained on another base model")


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


def silence_bitsandbytes() -> None:
    """Keep bitsandbytes, which peft imports too, from recommending kernels for CPUs that repack 4-bit weights."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def _peft() -> Any:
    silence_bitsandbytes()
    try:
        import peft
    except ImportError as error:
        raise UserError('model.lora needs peft: pip install "flatpeak[lora]"') from error
    return peft


@contextmanager
def _peft_errors(where: str, problem: str | None = None) -> Iterator[None]:
    """A context in which what peft raises is a UserError that names the setting."""
    with warnings.catch_warnings():
        # It sets GPT-2's own switch and says so, and asks transformers by a name that is about to change.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing. is deprecated")
        try:
            yield
        except UserError:
            raise
        except (ValueError, TypeError, KeyError, RuntimeError, OSError, NotImplementedError) as error:
            raise UserError(f"{where}: {problem or brief(error)}") from error
