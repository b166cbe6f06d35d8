"""peft's linear layers with LoRA adapters, computed as one product (kernels.low_rank) if the result is the same.

Only the classes of the modules are replaced, as for plain layers (policy.linears). Calls that are not plain LoRA over a
frozen base use peft's forward pass: DoRA and other variants, active dropout, adapter biases, several active adapters or
none, merged adapters, modules with hooks, autocast, compiled layers.

Importing this module loads peft.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.import_utils import is_bnb_4bit_available
from peft.tuners.lora import Linear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flatpeak.kernels.low_rank import Adapter, adapted_linear
from flatpeak.policy.linears import FastConv1D, FastLayer, FastLinear, is_watched, reads_packed

_BASES = (nn.Linear, FastLinear, Conv1D, FastConv1D)


class AdaptedLayer(FastLayer):
    """A peft layer with a base and named adapters; peft's forward pass remains as a fallback."""

    active_adapters: list[str]
    base_layer: Any
    disable_adapters: bool
    lora_A: Any
    lora_B: Any
    lora_bias: Any
    lora_dropout: Any
    lora_variant: Any
    merged: bool
    scaling: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return x W^T + b + s x A^T B^T, or the result of peft's forward pass."""
        packed = self.packed if not (args or kwargs or self.disable_adapters) else None
        if packed is not None and reads_packed(x):
            return packed[0].output(packed[1], x)
        adapter = None if args or kwargs or torch.compiler.is_compiling() else self.adapter()
        if adapter is None or torch.is_autocast_enabled(x.device.type) or not self.multiplies(x):
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        return adapted_linear(x, self.matrix, self.base_layer.bias, adapter)

    def adapter(self) -> Adapter | None:
        """The active adapter, if the layer is plain LoRA over a frozen base."""
        names = self.active_adapters
        if len(names) != 1 or names[0] not in self.lora_A or self.disable_adapters or self.merged:
            return None
        name = names[0]
        base, down, up, dropout = self.base_layer, self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
        if name in self.lora_variant or self.lora_bias[name] or not self.knows(base):
            return None
        linear = all(type(layer) in (nn.Linear, FastLinear) for layer in (down, up))
        if not linear or not _is_off(dropout) or any(map(is_watched, (base, down, up, dropout))):
            return None
        if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
            return None
        return Adapter(down_RK=down.weight, up_NR=up.weight, scaling=self.scaling[name])

    def knows(self, base: nn.Module) -> bool:
        """Whether `matrix` supports this base."""
        return type(base) in _BASES

    def multiplies(self, x: Tensor) -> bool:
        """Whether the layer multiplies this input without a cast."""
        return bool(x.dtype == self.base_layer.weight.dtype)

    def matrix(self) -> Tensor:
        """The base's weight as [out, in]."""
        weight: Tensor = self.base_layer.weight
        return weight.t() if isinstance(self.base_layer, Conv1D) else weight


class AdaptedLinear(AdaptedLayer, Linear):
    """peft's layer over a linear layer."""

    plain = Linear


_FAST: dict[type[nn.Module], type[FastLayer]] = {Linear: AdaptedLinear}

if is_bnb_4bit_available():
    from bitsandbytes.functional import dequantize_4bit
    from peft.tuners.lora import Linear4bit

    class AdaptedLinear4bit(AdaptedLayer, Linear4bit):
        """peft's layer over a 4-bit linear layer on a CPU; on a GPU peft uses bitsandbytes' kernels."""

        plain = Linear4bit

        def knows(self, base: nn.Module) -> bool:
            """Whether `matrix` supports this base."""
            state = _quant_state(base)
            shape = (self.out_features, self.in_features)
            return base.weight.device.type == "cpu" and state is not None and tuple(state.shape) == shape

        def multiplies(self, x: Tensor) -> bool:
            """Whether the layer multiplies this input without a cast."""
            base = self.base_layer
            return x.dtype == base.compute_dtype and (base.bias is None or base.bias.dtype == x.dtype)

        def matrix(self) -> Tensor:
            """The base's weight as [out, in], dequantized for this product only."""
            weight = self.base_layer.weight
            matrix: Tensor = dequantize_4bit(weight, _quant_state(self.base_layer)).to(self.base_layer.compute_dtype)
            return matrix

    _FAST[Linear4bit] = AdaptedLinear4bit


def _quant_state(base: Any) -> Any:
    """The scales of a 4-bit weight; if FSDP2 has gathered the weight, the layer holds them."""
    return getattr(base.weight, "quant_state", None) or getattr(base, "quant_state", None)


def make_adapters_fast(model: nn.Module) -> None:
    """Replace the class of every linear layer with LoRA adapters; `linears.make_plain` restores them."""
    for module in model.modules():
        fast = _FAST.get(type(module))
        if fast is not None:
            module.__class__ = fast


def _is_off(dropout: nn.Module) -> bool:
    kind = type(dropout)
    return kind is nn.Identity or (kind is nn.Dropout and not (dropout.training and dropout.p))
