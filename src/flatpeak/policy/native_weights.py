"""The weights of Llama-like models and GPT-2 in the form that native kernels need, with adapters merged.

A model is refused unless it computes exactly what the kernels compute; even a hook rules it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flatpeak.kernels.low_rank import Adapter
from flatpeak.kernels.native.build import UnavailableError
from flatpeak.kernels.native.decode import LINEAR, Affine, ModelWeights
from flatpeak.policy.compatibility import PolicyParts
from flatpeak.policy.linears import FastLayer, plain_class
from flatpeak.policy.model_settings import is_replaced

_LLAMA = {
    "before": "input_layernorm",
    "between": "post_attention_layernorm",
    "qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "out": "self_attn.o_proj",
    "up": "mlp.gate_proj mlp.up_proj",
    "down": "mlp.down_proj",
}
LAYERS = {
    "gpt2": {
        "before": "ln_1",
        "between": "ln_2",
        "qkv": "attn.c_attn",
        "out": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},
}
"""The model types that the kernels support, and the names of a layer's components."""
SERVED = tuple(LAYERS)
_GELU = ("gelu_new", "gelu_pytorch_tanh")


@torch.no_grad()
def read_weights(policy: PolicyParts) -> ModelWeights:
    """A model's weights for the kernels; UnavailableError if they do not support it. Layers are read lazily."""
    config, gpt2 = policy.causal.config, policy.causal.config.model_type == "gpt2"
    if (reason := _unserved(policy)) is not None:
        raise UnavailableError(reason)
    policy.model.eval()  # turns off adapter dropout
    trunk = getattr(policy.causal, policy.causal.base_model_prefix)
    blocks = list(trunk.h if gpt2 else trunk.layers)
    attention = [block.attn if gpt2 else block.self_attn for block in blocks]
    rotary = None if gpt2 else trunk.rotary_emb
    _check_own(policy, trunk, *blocks, *attention, *(block.mlp for block in blocks), *filter(None, [rotary]))
    paths = LAYERS[config.model_type]
    for block in blocks:
        _check_layer(block, paths)
    return ModelWeights(
        embedding=_embedding(trunk.wte if gpt2 else trunk.embed_tokens),
        positions=_embedding(trunk.wpe) if gpt2 else None,
        rope=None if rotary is None else partial(_rope, rotary),
        last=_norm(trunk.ln_f if gpt2 else trunk.norm),
        head=_joined([policy.head.linear]),
        layers=(_layer(block, paths) for block in blocks),
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
        epsilon=config.layer_norm_epsilon if gpt2 else config.rms_norm_eps,
        scale=attention[0].head_dim ** -0.5 if gpt2 else attention[0].scaling,
    )


def _unserved(policy: PolicyParts) -> str | None:
    """The reason why the kernels do not support a model; None if they do."""
    config = policy.causal.config
    if policy.below_float32 or (policy.device.type, policy.head.linear.weight.dtype) != ("cpu", torch.float32):
        return "they compute in float32 on a CPU"
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if config.model_type not in SERVED or (window is not None and window < (policy.context_length or window + 1)):
        return f"they do not support {config.model_type}{' with a window' if window else ''}"
    if policy.head.softcap is not None or policy.head.logit_scale != 1:
        return "they do not support a soft cap or scale of logits"
    if config.model_type != "gpt2":
        known = config.hidden_act in ("silu", "swish")
    else:
        scaled = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
        known = scaled and not config.add_cross_attention and config.activation_function in _GELU
    if not known:
        return f"they support only the usual variant of {config.model_type}"
    for module in policy.causal.modules():
        if is_replaced(module):
            return f"a {type(module).__name__} has a hook"
    return None


def _rope(rotary: nn.Module, positions: int) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        tables = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None])
    cosines, sines = (table[0, :, : table.shape[-1] // 2] for table in tables)  # the halves are equal
    return cosines, sines


def _check_own(policy: PolicyParts, *modules: nn.Module) -> None:
    """UnavailableError if a module is not transformers' module for this type of model."""
    kind = policy.causal.config.model_type
    for module in modules:
        if plain_class(module).__module__ != f"transformers.models.{kind}.modeling_{kind}":
            raise UnavailableError(f"{type(module).__name__} is not a module of transformers' {kind}")


def _embedding(module: nn.Module) -> Tensor:
    if type(module) is not nn.Embedding:
        raise UnavailableError(f"they do not support {type(module).__name__} as an embedding")
    return module.weight


def _check_layer(block: nn.Module, paths: Mapping[str, str]) -> None:
    """UnavailableError if a layer has a component that the kernels do not support."""
    for component in LINEAR:
        modules: list[Any] = [block.get_submodule(path) for path in paths.get(component, "").split()]
        for module in modules:
            _adapter(module)
        if len({getattr(module, "base_layer", module).bias is None for module in modules}) > 1:
            raise UnavailableError("only some of the layers to concatenate have a bias")


@torch.no_grad()
def _layer(block: nn.Module, paths: Mapping[str, str]) -> dict[str, Affine]:
    """The components of a layer; concatenated or merged components are copies."""
    modules = {name: [block.get_submodule(path) for path in each.split()] for name, each in paths.items()}
    return {name: _joined(each) if name in LINEAR else _norm(*each) for name, each in modules.items()}


def _norm(module: Any) -> Affine:
    plain = plain_class(module)
    if plain is not nn.LayerNorm and not plain.__name__.endswith("RMSNorm"):
        raise UnavailableError(f"they do not support {type(module).__name__} as a norm")
    return Affine(module.weight, getattr(module, "bias", None))


def _joined(layers: Sequence[Any]) -> Affine:
    """Linear layers with the same input, concatenated, each with its adapter merged."""
    weights = [_matrix(layer) for layer in layers]
    biases = [bias for layer in layers if (bias := getattr(layer, "base_layer", layer).bias) is not None]
    if len(layers) == 1:
        return Affine(weights[0], biases[0] if biases else None)
    return Affine(torch.cat(weights), torch.cat(biases) if biases else None)


def _matrix(layer: Any) -> Tensor:
    """The weight as [out, in]."""
    adapter = _adapter(layer)
    if adapter is not None:
        merged: Tensor = layer.matrix() + adapter.scaling * (adapter.up_NR @ adapter.down_RK)
        return merged
    matrix: Tensor = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
    return matrix


def _adapter(layer: Any) -> Adapter | None:
    """A linear layer's adapter, if any; UnavailableError if the kernels do not support the layer."""
    if plain_class(layer) in (nn.Linear, Conv1D):
        return None
    adapter = layer.adapter() if isinstance(layer, FastLayer) else None
    if adapter is None:
        raise UnavailableError(f"they do not support {type(layer).__name__} as a linear layer")
    return adapter
