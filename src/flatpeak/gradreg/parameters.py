"""The perturbed parameters, chosen by module instead of substrings of names, and the precision they run in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from flatpeak.errors import UserError
from flatpeak.gradreg.config import GradientRegularizationConfig, PerturbedSet

SECTION = "gradient_regularization"
"""The recipe section that messages name by default."""
QUANTIZED = ("Params4bit", "Int8Params")
"""Types of parameters that are dequantized to half precision for each use."""
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Prefixes that DDP, torch.compile, FSDP1 and activation checkpointing add to parameter names."""


def choose_parameters(model: nn.Module, config: GradientRegularizationConfig) -> list[nn.Parameter]:
    """The trainable parameters whose gradient is penalized, in the model's order. UserError if there are none."""
    return perturbed_parameters(model, config.perturbed, section=SECTION)


def perturbed_parameters(model: nn.Module, perturbed: PerturbedSet, *, section: str) -> list[nn.Parameter]:
    """The trainable parameters of a set, in the model's order; messages name the recipe section `section`."""
    chosen = (
        _by_pattern(model, perturbed, section) if isinstance(perturbed, tuple) else set(_by_identity(model, perturbed))
    )
    parameters = [p for p in model.parameters() if p in chosen and p.requires_grad]
    if not parameters:
        raise UserError(f"{section}.perturbed={perturbed}: {_advice(model, perturbed)}")
    for name, parameter in model.named_parameters():
        if parameter in chosen and parameter.requires_grad:
            _check_dense(name, parameter, section)
    _check_embeddings(model, set(parameters))
    return parameters


def are_adapters(model: nn.Module, parameters: Collection[nn.Parameter]) -> bool:
    """Whether these are adapters of a frozen model: PEFT's, or float32 parameters in a model in half precision."""
    if set(parameters) <= set(_adapters(model)):
        return True
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    return any(is_below_float32(p.dtype) for p in frozen) and not any(is_below_float32(p.dtype) for p in parameters)


def block_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of a model's repeated blocks: ModuleLists outside other ModuleLists (lists of experts are inside)."""
    lists: list[nn.ModuleList] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and module not in inside:
            inside.update(module.modules())
            # Lists of embedding tables or heads are not blocks.
            if not all(isinstance(member, nn.Embedding | nn.Linear) for member in module):
                lists.append(module)
    return lists


def _by_identity(model: nn.Module, perturbed: str) -> Iterator[nn.Parameter]:
    if perturbed == "all":
        yield from model.parameters()
    elif perturbed == "blocks":
        yield from (p for blocks in block_lists(model) for p in blocks.parameters())
    elif perturbed == "last_block":
        yield from (p for blocks in block_lists(model) for p in blocks[-1].parameters())
    elif perturbed == "last_layer":
        layer = _output_layer(model)
        yield from layer.parameters() if layer is not None else ()
    else:
        yield from _adapters(model)


def _adapters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that PEFT's layers declare as adapters, without the modules that PEFT trains whole."""
    for module in model.modules():
        for name in set(getattr(module, "adapter_layer_names", ())) - {"modules_to_save"}:
            adapter = getattr(module, name, None)
            if isinstance(adapter, nn.Module):
                yield from adapter.parameters()


def _output_layer(model: nn.Module) -> nn.Module | None:
    unwrapped: Any = model
    while hasattr(unwrapped, "module") and isinstance(unwrapped.module, nn.Module):
        unwrapped = unwrapped.module
    if hasattr(unwrapped, "get_output_embeddings") and unwrapped.get_output_embeddings() is not None:
        layer: nn.Module = unwrapped.get_output_embeddings()
        return layer
    linears = [module for module in unwrapped.modules() if isinstance(module, nn.Linear)]
    return linears[-1] if linears else None


def _by_pattern(model: nn.Module, patterns: tuple[str, ...], section: str) -> set[nn.Parameter]:
    names = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    chosen: set[nn.Parameter] = set()
    for pattern in patterns:
        matched = {p for name, p in names.items() if fnmatchcase(name, pattern)}
        if not matched:
            some = ", ".join(list(names)[:4]) or "(no trainable parameter)"
            raise UserError(f"{section}.perturbed: {pattern} matches no trainable parameter; names are like {some}")
        chosen |= matched
    return chosen


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def _advice(model: nn.Module, perturbed: object) -> str:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return "the model has no trainable parameter"
    if perturbed == "adapters":
        return "the model has no trainable adapter; add one with peft, or use blocks"
    if perturbed in ("blocks", "last_block"):
        return "the model has no trainable parameter in a list of repeated blocks; use all, adapters or a pattern"
    return "it selects no trainable parameter; use blocks, all or a pattern"


def _check_dense(name: str, parameter: nn.Parameter, section: str) -> None:
    if type(parameter).__name__ in QUANTIZED or not parameter.is_floating_point():
        raise UserError(
            f"{section}: {plain_name(name)} is quantized, so a small step cannot move it; "
            f"perturb adapters in float32 instead ({section}.perturbed=adapters)"
        )


def check_not_sparse(model: nn.Module, gradients: Mapping[nn.Parameter, Tensor]) -> None:
    """Raise UserError for sparse gradients: norms and differences need dense ones."""
    sparse = {p for p, grad in gradients.items() if grad.layout is not torch.strided}
    for name, parameter in model.named_parameters() if sparse else ():
        if parameter in sparse:
            raise UserError(_sparse(name))


def _check_embeddings(model: nn.Module, parameters: set[nn.Parameter]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight in parameters:
            raise UserError(_sparse(f"{name}.weight"))


def _sparse(name: str) -> str:
    return (
        f"gradient_regularization: {plain_name(name)} has sparse gradients, but the penalty needs dense ones: use "
        "sparse=False for the embedding, or exclude it (gradient_regularization.perturbed=blocks)"
    )


@dataclass(kw_only=True, slots=True)
class ObservedPrecision:
    """Precisions of one pass."""

    weights: set[torch.dtype] = field(default_factory=set)
    """The types of the perturbed linear layers' weights in their forward pass."""
    anywhere: set[torch.dtype] = field(default_factory=set)
    """The types of the weights and outputs of all linear layers."""


@contextmanager
def observe_precision(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[ObservedPrecision]:
    """Record the types of all linear layers' weights and outputs in this context; `parameters` are the perturbed
    ones."""
    observed, perturbed = ObservedPrecision(), set(parameters)

    def before(module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # keep this code out of compiled graphs
            return
        weight = linear_weight(module)
        if weight is None:
            return
        kind = weight.device.type
        used = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        observed.anywhere.add(used)
        if module in inside:
            observed.weights.add(used)

    def after(module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        computed = vars(module).get("compute_dtype")  # bitsandbytes layers; their outputs have the type of their inputs
        observed.anywhere.update(
            dtype for dtype in (getattr(output, "dtype", None), computed) if isinstance(dtype, torch.dtype)
        )

    layers = [module for module in model.modules() if linear_weight(module) is not None]
    inside = {module for module in layers if perturbed.intersection(module.parameters())}
    with ExitStack() as hooks:
        for module in layers:
            for handle in (module.register_forward_pre_hook(before), module.register_forward_hook(after)):
                hooks.callback(handle.remove)
        yield observed


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The least precise floating-point type; float64 for an empty sequence."""
    floating = (dtype for dtype in dtypes if dtype.is_floating_point)
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def is_coarser(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether a type rounds more than `than`."""
    return torch.finfo(dtype).eps > torch.finfo(than).eps


def is_below_float32(dtype: torch.dtype) -> bool:
    """Whether a type is below float32."""
    return is_coarser(dtype, torch.float32)


def weight_dtype(model: nn.Module) -> torch.dtype:
    """The coarsest type of a model's weights; for quantized weights the type after dequantization, or bfloat16."""
    dtypes = {p.dtype for p in model.parameters() if type(p).__name__ not in QUANTIZED}
    for module in model.modules():
        if any(type(p).__name__ in QUANTIZED for p in module._parameters.values()):
            dtypes.add(vars(module).get("compute_dtype") or torch.bfloat16)
    return coarsest(dtypes)


def linear_weight(module: nn.Module) -> Tensor | None:
    """A linear layer's weight; None for other modules.

    Chosen by shape: norms have vectors, and embeddings are not cast. It does not read `module.weight`, which a
    parametrized layer computes at each access: spectral_norm then changes its buffers.
    """
    if isinstance(module, nn.Embedding):
        return None
    weight = module._parameters.get("weight")
    if weight is None and isinstance(module, nn.Linear):
        weight = next((p for p in module.parameters() if p.ndim == 2), None)
    return weight if weight is not None and weight.ndim == 2 else None
