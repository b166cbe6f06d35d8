"""The precision of the numbers inside the model, as its layers show it: types, autocast, sharding policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

QUANTIZED = ("Params4bit", "Int8Params")
"""Types of parameters that are expanded to half precision where they are used."""


@dataclass(kw_only=True, slots=True)
class Seen:
    """Precisions that one pass has shown."""

    weights: set[torch.dtype] = field(default_factory=set)
    """The types that the weights of perturbed linear layers have while these run."""
    anywhere: set[torch.dtype] = field(default_factory=set)
    """The types that the weights and results of any linear layer have."""


@contextmanager
def watched(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[Seen]:
    """Watch every linear layer of a model for one pass; `parameters` are those that are perturbed."""
    seen, perturbed = Seen(), set(parameters)

    def before(module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # nothing of this may end up in a compiled graph
            return
        weight = matrix(module)
        if weight is None:
            return
        kind = weight.device.type
        used = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        seen.anywhere.add(used)
        if module in inside:
            seen.weights.add(used)

    def after(module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        computed = vars(module).get("compute_dtype")  # of bitsandbytes' layers, which give back their input's type
        seen.anywhere.update(
            dtype for dtype in (getattr(output, "dtype", None), computed) if isinstance(dtype, torch.dtype)
        )

    layers = [module for module in model.modules() if matrix(module) is not None]
    inside = {module for module in layers if perturbed.intersection(module.parameters())}
    with ExitStack() as hooks:
        for module in layers:
            for handle in (module.register_forward_pre_hook(before), module.register_forward_hook(after)):
                hooks.callback(handle.remove)
        yield seen


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The least precise floating-point type among these; float64 where there is none."""
    floating = (dtype for dtype in dtypes if dtype.is_floating_point)
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def coarser(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether a type rounds more than another one."""
    return torch.finfo(dtype).eps > torch.finfo(than).eps


def rounds(dtype: torch.dtype) -> bool:
    """Whether a type is below float32."""
    return coarser(dtype, torch.float32)


def held_type(model: nn.Module) -> torch.dtype:
    """The coarsest type that a model's weights are kept in; quantized ones count as bfloat16."""
    return coarsest(torch.bfloat16 if type(p).__name__ in QUANTIZED else p.dtype for p in model.parameters())


def matrix(module: nn.Module) -> Tensor | None:
    """A linear layer's weight; None for other modules.

    By its shape: norms have vectors, and embeddings are not cast. Never by `module.weight`, which a parametrized layer
    computes anew each time: spectral_norm then moves its buffers.
    """
    if isinstance(module, nn.Embedding):
        return None
    weight = module._parameters.get("weight")
    if weight is None and isinstance(module, nn.Linear):
        weight = next((p for p in module.parameters() if p.ndim == 2), None)
    return weight if weight is not None and weight.ndim == 2 else None
