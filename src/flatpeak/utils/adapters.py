"""Low-rank adapters (LoRA) by peft: creating, saving and loading them.

Importing this module loads neither torch nor peft.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from flatpeak.errors import UserError, brief
from flatpeak.utils.adapter_base import check_base, is_of_adapter, normalize_settings, write_record
from flatpeak.utils.huggingface import hub_or_directory, local_or_hub
from flatpeak.utils.schema import StrictConfig

if TYPE_CHECKING:
    from torch import nn


class LoraConfig(StrictConfig):
    """Low-rank adapters beside frozen weights, W x + s B A x (Hu et al. 2021, arXiv 2106.09685), made by peft."""

    rank: Annotated[int, Field(ge=1)] = 16
    """The rank r of the products B A."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """The scale s is alpha / rank, or alpha / sqrt(rank) with `rslora`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input in training passes, independent of `model.dropout`; 0: none."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of the layers that get adapters, such as [q_proj, v_proj]; all-linear: all except the output layer."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole and saved with the adapters."""
    rslora: bool = False
    """Rank-stabilized scaling (Kalajdzievski 2023, arXiv 2312.03732)."""
    dora: bool = False
    """Weight decomposition into magnitude and direction (Liu et al. 2024, arXiv 2402.09353)."""
    adapter: str | None = None
    """A directory or Hub name of an adapter to start from, with its own settings: of the settings above, only `dropout`
    may be given with it. null: new adapters."""

    @model_validator(mode="after")
    def _settings_of_the_adapter(self) -> LoraConfig:
        if self.adapter is not None and self.changed:
            names = ", ".join(f"model.lora.{name}" for name in self.changed)
            raise ValueError(f"model.lora.adapter={self.adapter} brings its own settings: leave out {names}")
        return self

    @property
    def changed(self) -> list[str]:
        """The settings of new adapters that differ from their defaults, except dropout."""
        names = sorted(set(type(self).model_fields) - {"adapter", "dropout"})
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    @property
    def asks_for_new(self) -> bool:
        """Whether it describes new adapters, by more than dropout. A recipe written by a run contains all settings,
        also those with default values."""
        written = self.model_fields_set - {"dropout"}
        whole = self.model_fields_set >= set(type(self).model_fields)
        return bool(self.changed or self.adapter is not None or (written and not whole))


def add_adapters(
    model: Any, config: LoraConfig, *, seed: int, head: str | None = None, revision: str | None = None
) -> Any:
    """A peft model with new adapters in float32 (B = 0), or with those of `config.adapter`; the base is frozen.

    `seed` draws A; the caller's generator is not changed. `head` is the score head of a sequence classifier, which is
    trained whole; `revision` is the base's. UserError if a target is in no layer's name, or the adapter does not fit
    the model.
    """
    import torch

    peft = _peft()
    if config.adapter is not None:
        settings: dict[str, Any] = {"scores": head is not None, "dropout": config.dropout, "revision": revision}
        return load_adapter(model, config.adapter, where="model.lora.adapter", **settings)
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
                target_modules=config.target_modules
                if config.target_modules == "all-linear"
                else list(config.target_modules),
                modules_to_save=[*config.modules_to_save, *([head] if head else [])] or None,
                use_rslora=config.rslora,
                use_dora=config.dora,
                revision=revision,
            ),
        )


def load_adapter(
    model: Any,
    path: str,
    *,
    where: str,
    scores: bool = False,
    dropout: float = 0.0,
    revision: str | None = None,
    checked: bool = False,
) -> Any:
    """A peft model with a saved adapter, trainable; UserError if the adapter belongs to another base.

    `scores` says that the model is a sequence classifier, `revision` is the base's, and `checked` says that the base
    is known to be right, for example because it was dequantized since. The caller's generator is not changed.
    """
    import torch

    peft = _peft()
    source = local_or_hub(path)
    with hub_or_directory(path) as problem, _peft_errors(f"{where}={path}", problem):
        config = peft.PeftConfig.from_pretrained(source)
        if config.peft_type != "LORA":
            raise UserError(f"{where}={path} is of type {config.peft_type.value}: only LoRA adapters are served")
        _check_task(config.task_type, scores=scores, where=f"{where}={path}")
        config.inference_mode, config.lora_dropout = False, dropout
        config.revision = revision or config.revision
        config.base_model_name_or_path = getattr(model, "name_or_path", None)
        with torch.random.fork_rng():  # it first draws random weights, which are then replaced
            adapted = peft.get_peft_model(model, config)
        _put(adapted, peft.utils.load_peft_weights(source, device="cpu"), where=f"{where}={path}")
    if not checked:
        check_base(adapted, Path(source), where=f"{where}={path}")
    return adapted


def check_own_adapters(model: Any) -> None:
    """Raise a UserError if a checkpoint of a caller's peft model would lose a part of it."""
    import torch

    if not hasattr(model, "get_base_model"):
        return
    peft = _peft()
    if model.active_peft_config.is_prompt_learning:
        raise UserError(
            f"the model has {model.active_peft_config.peft_type.value} of peft, whose virtual tokens flatpeak's passes "
            "leave out: give one with LoRA adapters"
        )
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise UserError(
            "the model's adapters are merged into its base, and get no gradient: call model.unmerge_adapter()"
        )
    names = active_adapters(model)
    if len(names) > 1:
        raise UserError(
            f"the model has {len(names)} active adapters ({', '.join(names)}), and a checkpoint holds one: merge the "
            "others into the base, or choose one with model.set_adapter(name)"
        )
    saved = peft.get_peft_model_state_dict(
        model, adapter_name=names[0], save_embedding_layers=_trains_embeddings(model)
    ).values()
    held = {tensor.untyped_storage().data_ptr() for tensor in saved if isinstance(tensor, torch.Tensor)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.untyped_storage().data_ptr() not in held:
            raise UserError(
                f"{name} is trainable and no part of the adapter {names[0]}, so checkpoints would lose it: freeze it, "
                "or name its module in modules_to_save of the adapter's LoraConfig"
            )


def restore_adapter(model: Any, directory: Path) -> None:
    """Load a checkpoint's adapter into a model whose active adapter is the same kind; UserError if it has none."""
    from safetensors.torch import load_file

    with _peft_errors(str(directory)):
        _put(model, load_file(directory / "adapter_model.safetensors"), where=str(directory))


def save_adapter(model: Any, directory: Path) -> None:
    """Write a peft model's active adapter in peft's format, for any name of the adapter, and the record of its base.

    A base in a directory is named by its absolute path, so that the adapter can be loaded from any directory.
    Embeddings count as the base's unless they are trained: to check whether they were resized, peft would ask the Hub
    each time.
    """
    (name,) = active_adapters(model)
    model.save_pretrained(directory, selected_adapters=[name], save_embedding_layers=_trains_embeddings(model))
    if name != "default":  # peft writes only this name into the directory itself
        for path in (directory / name).iterdir():
            path.replace(directory / path.name)
        (directory / name).rmdir()
    normalize_settings(directory)
    write_record(model, directory)


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


def active_adapters(model: Any) -> list[str]:
    """The names of the active adapters of a peft model, or of a model with transformers' `add_adapter`."""
    names: Any = model.active_adapters
    active: list[str] = names() if callable(names) else names  # a method if transformers has added the adapter
    return active


def _check_task(task: str | None, *, scores: bool, where: str) -> None:
    """UserError if a language model should get a reward model's adapter, or the reverse."""
    if scores and task == "CAUSAL_LM":
        raise UserError(
            f"{where} is the adapter of a language model, without a score head: a reward model is trained from a plain "
            "model, such as flatpeak export makes of it"
        )
    if not scores and task == "SEQ_CLS":
        raise UserError(f"{where} is the adapter of a reward model, which scores texts and writes none: name another")


def _put(model: Any, weights: Any, *, where: str) -> None:
    """Load saved weights into a model's active adapter; UserError if they belong to another adapter."""
    (adapter,) = active_adapters(model)
    report = _peft().set_peft_model_state_dict(model, weights, adapter_name=adapter)
    own = (name for name in report.missing_keys if f".{adapter}." in f"{name}.")
    missing = [name for name in own if is_of_adapter(name)]
    for name in (*report.unexpected_keys, *missing):
        raise UserError(f"{where} does not fit the model at {name}: it was trained on another base model")


def _trains_embeddings(model: Any) -> bool:
    """Whether embeddings or output layer are trained directly, and not by an adapter or in `modules_to_save`."""
    base = model.get_base_model()
    layers = (
        getattr(layer, "base_layer", layer) for layer in (base.get_input_embeddings(), base.get_output_embeddings())
    )
    weights = (getattr(layer, "weight", None) for layer in layers if not hasattr(layer, "modules_to_save"))
    return any(weight is not None and weight.requires_grad for weight in weights)


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


def silence_bitsandbytes() -> None:
    """Keep bitsandbytes, which peft imports too, from recommending CPU kernels that repack 4-bit weights."""
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
    """A context in which peft's errors become a UserError that names the setting, except running out of memory."""
    import torch

    with warnings.catch_warnings():
        # It changes GPT-2's switch and reports it, and calls transformers by a name that is about to change.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing. is deprecated")
        # Its warning about merging tied embeddings concerns only the export, which unties them.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        try:
            yield
        except (UserError, torch.OutOfMemoryError):
            raise
        except (ValueError, TypeError, KeyError, RuntimeError, OSError, NotImplementedError) as error:
            raise UserError(f"{where}: {problem or brief(error)}") from error
