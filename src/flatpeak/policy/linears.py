"""Linear layers, computed by the faster library, and the output layer with its logits.

If oneDNN is faster (kernels.matmul), only the classes of linear layers change: weights, names, hooks and saved files
stay the same. Layers with adapters are handled in the same way (policy.adapted_layers).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flatpeak.errors import UserError
from flatpeak.kernels.low_rank import Adapter, add_product
from flatpeak.kernels.matmul import linear, multiply, onednn_is_faster, pack, served

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers in one module that transformers calls in sequence with the same tensor."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Packed:
    """A copy of the weights of layers that read the same input, concatenated in oneDNN's layout.

    With adapters, the A matrices follow, so that one product gives x W^T and x A^T of all layers.
    """

    def __init__(self, layers: Sequence[FastLayer]) -> None:
        matrices = [layer.matrix().detach() for layer in layers]
        self._adapters = [layer.adapter() for layer in layers]
        down = [adapter.down_RK.detach() for adapter in self._adapters if adapter is not None]
        self._weight = pack(torch.cat([*matrices, *down]))
        self._bias = _joined_bias(layers, padding=sum(map(len, down)))
        slices = _slices([*matrices, *down])
        self._slices, of_adapters = slices[: len(layers)], iter(slices[len(layers) :])
        self._low = [None if adapter is None else next(of_adapters) for adapter in self._adapters]
        self._input: Tensor | None = None
        self._product: Tensor | None = None
        self._pending: set[int] = set()

    def output(self, index: int, input: Tensor) -> Tensor:
        """The output of layer `index`, from one product for all layers if they are called with the same tensor.

        Each layer's share of the product is used once, because a tensor may change between two calls of a layer.
        """
        if len(self._slices) == 1:
            return self._share(multiply(input, self._weight, self._bias), index)
        if input is not self._input or index not in self._pending or self._product is None:
            self._product = multiply(input, self._weight, self._bias)
            self._input, self._pending = input, set(range(len(self._slices)))
        output = self._share(self._product, index)
        self._pending.remove(index)
        if not self._pending:
            self._input, self._product = None, None
        return output

    def _share(self, product: Tensor, index: int) -> Tensor:
        """A layer's share of the product, with its adapter's product added in place."""
        low, adapter = self._low[index], self._adapters[index]
        if low is None or adapter is None:
            return product.narrow(-1, *self._slices[index]) if len(self._slices) > 1 else product
        rows = product.view(-1, product.shape[-1])
        own = rows.narrow(-1, *self._slices[index])
        output = add_product(own, rows.narrow(-1, *low), adapter.up_NR, adapter.scaling)
        return output.view(*product.shape[:-1], output.shape[-1])


def _joined_bias(layers: Sequence[FastLayer], *, padding: int) -> Tensor | None:
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if not biases:
        return None
    return torch.cat([*biases, biases[0].new_zeros(padding)]) if padding else torch.cat(biases)


def _slices(matrices: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(first, count) of each matrix's rows if all are concatenated."""
    ends = accumulate(len(matrix) for matrix in matrices)
    return [(end - len(matrix), len(matrix)) for end, matrix in zip(ends, matrices, strict=True)]


class Exchanged(nn.Module):
    """A module with a replaced class; everything else is unchanged."""

    plain: type[nn.Module]
    """The original class."""

    def __reduce_ex__(self, _: SupportsIndex) -> tuple[Any, ...]:
        """Pickle and copy it with its original class, because some of these classes are created at run time."""
        reduced: Any = super().__reduce_ex__(2)
        return _without_init, (self.plain,), *reduced[2:]


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The original class of a module."""
    return module.plain if isinstance(module, Exchanged) else type(module)


def _without_init(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


class FastLayer(Exchanged):
    """A linear layer that reads a packed copy of its weight while one exists."""

    packed: tuple[Packed, int] | None = None
    weight: Any
    bias: Any

    def matrix(self) -> Tensor:
        """The weight as [out, in]."""
        weight: Tensor = self.weight
        return weight

    def adapter(self) -> Adapter | None:
        """The adapter included in the product."""
        return None


class FastLinear(FastLayer, nn.Linear):
    """torch's linear layer, computed by kernels.matmul."""

    plain = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Return input W^T + b."""
        if self.packed is not None and reads_packed(input):
            return self.packed[0].output(self.packed[1], input)
        return linear(input, self.weight, self.bias)


class FastConv1D(FastLayer, Conv1D):
    """GPT-2's linear layer, which has a transposed weight, computed by kernels.matmul."""

    plain = Conv1D

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        if self.packed is not None and reads_packed(x):
            return self.packed[0].output(self.packed[1], x)
        return linear(x, self.weight.t(), self.bias)

    def matrix(self) -> Tensor:
        """The weight as [out, in]."""
        matrix: Tensor = self.weight.t()
        return matrix


def reads_packed(input: Tensor) -> bool:
    """Whether a layer with a packed copy of its weight uses it for this input."""
    return not torch.is_grad_enabled() and input.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def is_watched(module: nn.Module) -> bool:
    """Whether a call of the module does more than its forward pass."""
    return "forward" in module.__dict__ or any(module.__dict__[name] for name in _HOOKS)


_FAST: dict[type[nn.Module], type[FastLayer]] = {nn.Linear: FastLinear, Conv1D: FastConv1D}


def make_fast(model: nn.Module) -> None:
    """Replace the class of every layer that oneDNN computes; does nothing if oneDNN is not faster."""
    if not onednn_is_faster():
        return
    for module in model.modules():
        fast: type[nn.Module] | None = _FAST.get(type(module))
        if fast is not None and isinstance(module.weight, Tensor) and served(module.weight):
            module.__class__ = fast


def make_plain(model: nn.Module) -> None:
    """Restore the original class of every module."""
    for module in model.modules():
        plain = module.plain if isinstance(module, Exchanged) else None
        if plain is not None:
            module.__class__ = plain


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """A context with copies of the weights in oneDNN's layout: one more model in memory.

    The weights must not change while the copies exist.
    """
    layers = _packable(model)
    try:
        for group in _groups(model, layers):
            packed = Packed(group)
            for index, layer in enumerate(group):
                layer.packed = (packed, index)
        yield
    finally:
        for layer in layers:
            layer.packed = None


def _packable(model: nn.Module) -> list[FastLayer]:
    """The layers that oneDNN multiplies; a layer with an adapter without its base.

    The weight of a pruned layer is no parameter: its hook computes it at each call, after a copy would be made.
    """
    modules = [module for module in model.modules() if isinstance(module, FastLayer) and served(module.weight)]
    fast = [module for module in modules if isinstance(module.weight, nn.Parameter)]
    plain = (FastLinear, FastConv1D)
    adapted = [layer for layer in fast if not isinstance(layer, plain) and _served_with(layer.adapter())]
    bases = {id(layer.base_layer) for layer in adapted}
    return [layer for layer in fast if (isinstance(layer, plain) and id(layer) not in bases) or layer in adapted]


def _served_with(adapter: Adapter | None) -> bool:
    return adapter is not None and adapter.down_RK.dtype == adapter.up_NR.dtype == torch.float32


def _groups(model: nn.Module, layers: Sequence[FastLayer]) -> Iterator[Sequence[FastLayer]]:
    """Groups of layers that are multiplied together, then each other layer by itself."""
    grouped: set[nn.Module] = set()
    for module in model.modules():
        for names in TOGETHER:
            candidates = [getattr(module, name, None) for name in names]
            together = [layer for layer in candidates if isinstance(layer, FastLayer) and layer in layers]
            if len(together) == len(names) and len({layer.bias is None for layer in together}) == 1:
                grouped.update(together)
                yield together
    yield from ([layer] for layer in layers if layer not in grouped)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The output layer: logits = softcap * tanh(logit_scale * (hidden W^T + b) / softcap)."""

    linear: nn.Linear
    softcap: float | None
    logit_scale: float

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """The logits of hidden states, float32 [R, V]."""
        return self._scaled(self.linear(hidden_RD))

    def logits_of_weights(self, hidden_RD: Tensor) -> Tensor:
        """The logits as training computes them: without what a hook of the layer makes of them."""
        return self._scaled(nn.functional.linear(hidden_RD, self.linear.weight, self.linear.bias))

    def _scaled(self, output_RV: Tensor) -> Tensor:
        logits = output_RV.float()
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def read_head(model: PreTrainedModel) -> Head:
    """Read a model's output layer, soft cap and scale. The start-up probe compares the logits with the model's."""
    linear = model.get_output_embeddings()
    trained_whole = getattr(linear, "modules_to_save", None)  # peft also keeps the frozen original
    if isinstance(trained_whole, nn.ModuleDict):
        linear = trained_whole[linear.active_adapter]
    if type(linear) is not nn.Linear:
        raise UserError(
            f"the output layer of {type(model).__name__} is {type(linear).__name__}, not a plain linear layer: "
            "exclude lm_head from adapters and quantization"
        )
    if not isinstance(linear.weight, nn.Parameter):
        raise UserError(
            f"the weight of {type(model).__name__}'s output layer is computed at each call (torch.nn.utils.prune or "
            "weight_norm): call prune.remove or remove_weight_norm on it"
        )
    config = model.config
    scale = getattr(config, "logit_scale", None)  # cohere multiplies
    divisor = getattr(config, "logits_scaling", None)  # granite divides
    logit_scale = 1.0
    if scale is not None:
        logit_scale = float(scale)
    elif divisor:
        logit_scale = 1.0 / divisor
    return Head(
        linear=linear,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=logit_scale,
    )
