"""A decoding step of Llama-like models on a GPU, with a quarter of the launches of transformers' modules.

A step of a small batch reads every weight once, so its time is that of the launches and of memory. Norms, rotary
embeddings and gates are one Triton kernel each (kernels.decode_layer_triton), and the products of queries, keys and
values are one product. Their weights, about 7% of a model's, are copied before each request.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from flatpeak.kernels.block_attention import AttentionRule
from flatpeak.kernels.gpu_kernels import works
from flatpeak.policy.kv_cache import KeyValueCache
from flatpeak.policy.linears import plain_class
from flatpeak.policy.model_settings import is_replaced

KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""The model types whose decoder layers are those of Llama, with norms of queries and keys in Qwen3."""
_GENERAL = (nn.Embedding, nn.Linear, nn.ModuleList, nn.SiLU, type(ACT2FN["silu"]))
"""The other classes of modules in such a model. An adapter has another class, and these among its children."""
LARGEST_HIDDEN = 16_384
"""The largest hidden dimension: a norm's row lies in the registers of one program."""


class FusedDecoding:
    """The decoding step of one model. Weights may change in place; `refresh` copies those that are concatenated."""

    def __init__(self, causal: Any) -> None:
        self._trunk = getattr(causal, causal.base_model_prefix)
        self._concatenated = [_concatenated(layer) for layer in self._trunk.layers]
        self._rules = [_rule(layer.self_attn) for layer in self._trunk.layers]

    @property
    def tensors(self) -> list[Tensor]:
        """The copies, whose addresses a captured step uses."""
        return [each for pair in self._concatenated for each in pair if each is not None]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights of queries, keys and values again."""
        for layer, (weight, bias) in zip(self._trunk.layers, self._concatenated, strict=True):
            layers = _projections(layer)
            torch.cat([each.weight for each in layers], out=weight)
            if bias is not None:
                torch.cat([each.bias for each in layers], out=bias)

    def hidden(self, cache: KeyValueCache, tokens_R: Tensor) -> Tensor:
        """Append a token to each of the first R slots: the last hidden states, [R, D]."""
        from flatpeak.kernels.decode_layer_triton import add_and_normalize, gated

        residual_RD = self._trunk.embed_tokens(tokens_R)
        positions_R1 = cache.positions_S[: len(tokens_R), None]
        cosines_RD, sines_RD = (each[:, 0].contiguous() for each in self._trunk.rotary_emb(residual_RD, positions_R1))
        update_RD: Tensor | None = None
        for index, layer in enumerate(self._trunk.layers):
            norm, mlp = layer.input_layernorm, layer.mlp
            input_RD = add_and_normalize(update_RD, residual_RD, norm.weight, norm.variance_epsilon)
            attended_RF = self._attend(cache, index, input_RD, (cosines_RD, sines_RD))
            norm, out = layer.post_attention_layernorm, layer.self_attn.o_proj
            update_RD = F.linear(attended_RF, out.weight, out.bias)
            input_RD = add_and_normalize(update_RD, residual_RD, norm.weight, norm.variance_epsilon)
            width = len(mlp.gate_proj.weight)
            gate_up_RF = input_RD.new_empty(len(input_RD), 2 * width)
            torch.mm(input_RD, mlp.gate_proj.weight.t(), out=gate_up_RF[:, :width])
            torch.mm(input_RD, mlp.up_proj.weight.t(), out=gate_up_RF[:, width:])
            update_RD = F.linear(gated(gate_up_RF), mlp.down_proj.weight)
        return add_and_normalize(update_RD, residual_RD, self._trunk.norm.weight, self._trunk.norm.variance_epsilon)

    def _attend(self, cache: KeyValueCache, index: int, input_RD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Store a layer's new keys and values, and attend: [R, Hq D]."""
        from flatpeak.kernels.decode_layer_triton import rotate_and_store

        attention = self._trunk.layers[index].self_attn
        query_norm: Any = getattr(attention, "q_norm", None)
        query_RHD = rotate_and_store(
            F.linear(input_RD, *self._concatenated[index]),
            *angles,
            *cache.layers[index],
            cache.lengths_S,
            None if query_norm is None else (query_norm.weight, attention.k_norm.weight, query_norm.variance_epsilon),
            heads=attention.config.num_attention_heads,
        )
        return cache.attend_stored(index, query_RHD, self._rules[index]).flatten(1)


def _rule(attention: Any) -> AttentionRule:
    config = attention.config
    of_all = config.sliding_window if config.model_type == "mistral" else None  # Llama's ignores this key
    window = getattr(attention, "sliding_window", of_all)
    return AttentionRule(scale=attention.scaling, window=window)


def _projections(layer: Any) -> tuple[Any, ...]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj


@torch.no_grad()
def _concatenated(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one product for queries, keys and values; copies."""
    layers = _projections(layer)
    bias = None if layers[0].bias is None else torch.cat([each.bias for each in layers])
    return torch.cat([each.weight for each in layers]), bias


def fused_decoding(causal: Any, kept: FusedDecoding | None) -> FusedDecoding | None:
    """The fused step of a model for its next request; `kept`: that of the last one.

    None if the model computes anything else than the usual layers of its type.
    """
    weight = next(causal.parameters())
    if not (_is_usual(causal) and works("decode_layer", device=weight.device, dtype=weight.dtype)):
        return None
    if kept is None:
        with torch.inference_mode(False):  # its copies outlive the request
            return FusedDecoding(causal)
    kept.refresh()
    return kept


def _is_usual(causal: Any) -> bool:
    config, weights = causal.config, list(causal.parameters())
    kind, dtype = config.model_type, weights[0].dtype
    if (
        kind not in KINDS
        or {(weight.device.type, weight.dtype) for weight in weights} != {("cuda", dtype)}
        or config.hidden_size > LARGEST_HIDDEN
    ):
        return False
    trunk = getattr(causal, causal.base_model_prefix)
    for module in trunk.modules():
        own = plain_class(module).__module__ == f"transformers.models.{kind}.modeling_{kind}"
        if not (own or type(module) in _GENERAL) or is_replaced(module):
            return False
    layer = trunk.layers[0]  # all are alike
    projections = {each.bias is None for each in _projections(layer)}
    gates = [getattr(layer.mlp, name).bias is None for name in ("gate_proj", "up_proj", "down_proj")]
    return all(gates) and len(projections) == 1
