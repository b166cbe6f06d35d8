"""Decoding by the native kernels (kernels.native), where they serve the model and a self-test agrees; the choice.

The kernels have a forward pass of their own, of Llama-like models and GPT-2. They are given the modules' own weights,
adapters merged; whatever is not exactly what they compute, a hook included, is left to torch. Before a policy's first
request, log-probabilities of both are compared on its own weights.
"""

from __future__ import annotations

import math
import os
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flatpeak.errors import UserError
from flatpeak.kernels.native.build import UnavailableError, library, library_name
from flatpeak.kernels.native.decode import Affine, LayerWeights, ModelWeights, NativeCache, PackedModel
from flatpeak.policy.compatibility import Probed
from flatpeak.policy.linears import Exchanged, FastConv1D, FastLayer, FastLinear
from flatpeak.policy.model_settings import has_training_forward
from flatpeak.policy.native_training import Trained, largest_gaps, probe_tokens

Kernels = Literal["auto", "torch", "native"]
SETTING = "FLATPEAK_KERNELS"
"""The environment variable that decides where `rollout.kernels` is auto, and for policies without a recipe."""
SERVED = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""The model types that the kernels have a forward pass of."""
TORCH = "torch"
"""The name of what decodes without kernels."""
TOLERANCE = 1e-5
"""Of the self-test's log-probabilities, times the largest logit: what sampler and trainer promise each other."""
TEST_PROMPTS, TEST_GROUPS, TEST_STEPS = (1, 33, 3, 18), (1, 5, 2, 4), 20
"""Tokens of each prompt, completions of each, and tokens of each completion in the self-test."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Decoded(Probed, Protocol):
    """The interface of a policy that is read here."""

    @property
    def below_float32(self) -> bool:
        """Whether anything on the way through the model rounds more coarsely than float32."""
        ...


class Computed(Decoded, Trained, Protocol):
    """A policy that is decoded and trained."""

    gathered: Any


class KernelChoice:
    """Whether a policy's requests and training passes go through native kernels, and why not."""

    def __init__(self) -> None:
        setting = os.environ.get(SETTING, "auto")
        if setting not in get_args(Kernels):
            raise UserError(f"{SETTING}={setting}: set auto, torch or native, or leave it unset")
        self.setting: Kernels = setting  # type: ignore[assignment]
        self.reason: str | None = None
        """The reason why the last request was not decoded by them, where `setting` leaves the choice open."""
        self.training_reason: str | None = None
        """The reason why training passes do not go through them, likewise."""
        self.used: str | None = None
        """The decoder of the last request: torch, or the name of a library of kernels."""
        self.idle = False
        """Whether servers draw the rollouts, so that no decoder is chosen."""
        self._agrees: bool | None = None
        self._trains: bool | None = None
        self._tested: list[int] | None = None
        """The versions of the weights that training passes were last compared on, with or without a verdict."""

    @property
    def notices(self) -> list[str]:
        """The reasons why decoding and training are slower than they could be, if they are."""
        reasons = {"decoding goes": self.reason, "a training pass goes": self.training_reason}
        return [f"{what} without native kernels, and is slower: {why}" for what, why in reasons.items() if why]

    def name(self, policy: Decoded) -> str:
        """The decoder of requests, chosen now if there was none."""
        if self.used is None:
            self.pack(policy)
        return self.used or TORCH

    def names(self, policy: Computed) -> str:
        """The decoder, and what training passes go through where that is another; these alone where servers draw."""
        trains = library_name() if self.trains(policy) else TORCH
        if self.idle:
            return f"{trains} in training passes"
        decodes = self.name(policy)
        return decodes if decodes == trains else f"{decodes} in rollouts, {trains} in training passes"

    def pack(self, policy: Decoded) -> PackedModel | None:
        """The weights for one request, or None if torch decodes it; UserError where only kernels are allowed."""
        self.reason, self.used = None, TORCH
        if self._leaves_to_torch(policy):
            return None
        try:
            packed = self._pack(policy)
        except UnavailableError as error:
            self.reason = self._refused(error)
            return None
        self.used = library_name()
        return packed

    def trains(self, policy: Computed) -> bool:
        """Whether passes with gradients go through kernels, and those that score as they do: decided once."""
        # The shards of a model can be compared with nothing.
        if self._leaves_to_torch(policy) or (self._trains is None and policy.gathered is not None):
            return False
        if self._trains is None and self._tested != _versions(policy):
            self.training_reason = None
            try:
                self._compare(policy)
            except UnavailableError as error:
                self.training_reason = self._refused(error)
        return bool(self._trains)

    def _leaves_to_torch(self, policy: Decoded) -> bool:
        return self.setting == "torch" or (self.setting == "auto" and policy.device.type != "cpu")

    def _refused(self, error: UnavailableError) -> str:
        """The reason, if kernels are not the only choice."""
        if self.setting == "native":
            raise UserError(f"rollout.kernels=native: {error}; set rollout.kernels=auto or torch") from None
        return str(error)

    def _pack(self, policy: Decoded) -> PackedModel:
        packed = PackedModel(read_weights(policy))
        if self._agrees is None:
            gap, tolerance = largest_gap(policy, packed)
            if not math.isfinite(gap):
                raise UnavailableError("the model's logits are NaN or infinite")
            self._agrees = gap <= tolerance
        if not self._agrees:
            raise UnavailableError("their log-probabilities differ from torch's on this model and machine")
        return packed

    def _compare(self, policy: Computed) -> None:
        weight = policy.head.linear.weight
        if policy.below_float32 or (weight.device.type, weight.dtype) != ("cpu", torch.float32):
            raise UnavailableError("they compute in float32 on a CPU")
        library()
        self._tested = _versions(policy)
        gaps = largest_gaps(policy)
        if not all(map(math.isfinite, gaps)):
            raise UnavailableError("the model's log-probabilities or its gradient are NaN or infinite")
        self._trains = max(gaps) <= 1
        if not self._trains:
            raise UnavailableError("log-probabilities or gradients differ from torch's on this model and machine")


def _versions(policy: Decoded) -> list[int]:
    """The number of changes of each weight so far, as torch counts them."""
    return [weight._version for weight in policy.model.parameters()]


@torch.no_grad()
def read_weights(policy: Decoded) -> ModelWeights:
    """The weights of a model, as the kernels know it; UnavailableError where they do not."""
    causal, config = policy.causal, policy.causal.config
    if policy.below_float32 or (policy.device.type, policy.head.linear.weight.dtype) != ("cpu", torch.float32):
        raise UnavailableError("they compute in float32 on a CPU")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if config.model_type not in SERVED or (window is not None and window < (policy.context_length or window + 1)):
        raise UnavailableError(f"they do not serve {config.model_type}{' with a window' if window else ''}")
    if policy.head.softcap is not None or policy.head.logit_scale != 1:
        raise UnavailableError("they know no soft cap and no scale of logits")
    policy.model.eval()  # dropout of adapters, which is off then
    for module in causal.modules():
        replaced = "forward" in module.__dict__ and not has_training_forward(
            module
        )  # which is for passes with gradients
        if replaced or any(module.__dict__[name] for name in _HOOKS):
            raise UnavailableError(f"a {type(module).__name__} has a hook")
    read = _read_gpt2 if config.model_type == "gpt2" else _read_llama
    return read(policy, getattr(causal, causal.base_model_prefix))


def _read_gpt2(policy: Decoded, trunk: Any) -> ModelWeights:
    config = policy.causal.config
    plain = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx and not config.add_cross_attention
    if config.activation_function not in ("gelu_new", "gelu_pytorch_tanh") or not plain:
        raise UnavailableError("they know only the usual variant of gpt2")
    dim = config.n_embd // config.n_head
    blocks = list(trunk.h)
    _check_own(policy, trunk, *blocks, *(module for block in blocks for module in (block.attn, block.mlp)))
    return ModelWeights(
        embedding=_weight(trunk.wte),
        positions=_weight(trunk.wpe),
        rope=None,
        last=_norm(trunk.ln_f),
        head=_affine(policy.head.linear),
        layers=[
            LayerWeights(
                before=_norm(block.ln_1),
                between=_norm(block.ln_2),
                qkv=_affine(block.attn.c_attn),
                out=_affine(block.attn.c_proj),
                up=_affine(block.mlp.c_fc),
                down=_affine(block.mlp.c_proj),
            )
            for block in blocks
        ],
        heads=config.n_head,
        kv_heads=config.n_head,
        dim=dim,
        inner=config.n_inner or 4 * config.n_embd,
        epsilon=config.layer_norm_epsilon,
        scale=dim**-0.5,
    )


def _read_llama(policy: Decoded, trunk: Any) -> ModelWeights:
    config, blocks = policy.causal.config, list(trunk.layers)
    attention = blocks[0].self_attn
    if config.hidden_act not in ("silu", "swish"):
        raise UnavailableError(f"they know SwiGLU, not {config.hidden_act}")
    _check_own(policy, trunk, trunk.rotary_emb, *blocks, *(module for b in blocks for module in (b.self_attn, b.mlp)))
    return ModelWeights(
        embedding=_weight(trunk.embed_tokens),
        positions=None,
        rope=lambda positions: _rope(trunk.rotary_emb, positions),
        last=_norm(trunk.norm),
        head=_affine(policy.head.linear),
        layers=[
            LayerWeights(
                before=_norm(block.input_layernorm),
                between=_norm(block.post_attention_layernorm),
                qkv=_affine(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj),
                out=_affine(block.self_attn.o_proj),
                up=_affine(block.mlp.gate_proj, block.mlp.up_proj),
                down=_affine(block.mlp.down_proj),
                q_norm=block.self_attn.q_norm.weight if config.model_type == "qwen3" else None,
                k_norm=block.self_attn.k_norm.weight if config.model_type == "qwen3" else None,
            )
            for block in blocks
        ],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=attention.head_dim,
        inner=config.intermediate_size,
        epsilon=config.rms_norm_eps,
        scale=attention.scaling,
    )


def _rope(rotary: nn.Module, positions: int) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        tables = rotary(torch.zeros(1), torch.arange(positions)[None])
    cosines, sines = (table[0, :, : table.shape[-1] // 2] for table in tables)  # the halves are equal
    return cosines, sines


def _check_own(policy: Decoded, *modules: nn.Module) -> None:
    """UnavailableError where a module is not the one that transformers has for this type of model."""
    kind = policy.causal.config.model_type
    for module in modules:
        plain = module.plain if isinstance(module, Exchanged) else type(module)
        if plain.__module__ != f"transformers.models.{kind}.modeling_{kind}":
            raise UnavailableError(f"{type(module).__name__} is not a module of transformers' {kind}")


def _weight(embedding: nn.Module) -> Tensor:
    if type(embedding) is not nn.Embedding:
        raise UnavailableError(f"they do not know {type(embedding).__name__} as an embedding")
    return embedding.weight


def _norm(module: Any) -> Affine:
    plain = module.plain if isinstance(module, Exchanged) else type(module)
    if plain is not nn.LayerNorm and not plain.__name__.endswith("RMSNorm"):
        raise UnavailableError(f"they do not know {type(module).__name__} as a norm")
    return Affine(weight=module.weight, bias=getattr(module, "bias", None))


def _affine(*layers: Any) -> Affine:
    """Linear layers that read the same input, one below the other, each with its adapter merged."""
    biases = [getattr(layer, "base_layer", layer).bias for layer in layers]
    if len({bias is None for bias in biases}) > 1:
        raise UnavailableError("only some of the layers that they join have a bias")
    matrices = [_matrix(layer) for layer in layers]
    return Affine(weight=torch.cat(matrices), bias=None if biases[0] is None else torch.cat(biases))


def _matrix(layer: Any) -> Tensor:
    """The weight as [out, in]."""
    matrix: Tensor
    if type(layer) in (nn.Linear, FastLinear):
        matrix = layer.weight
    elif type(layer) in (Conv1D, FastConv1D):
        matrix = layer.weight.t()
    elif isinstance(layer, FastLayer) and (adapter := layer.adapter()) is not None:
        matrix = layer.matrix() + adapter.scaling * (adapter.up_NR @ adapter.down_RK)
    else:
        raise UnavailableError(f"they do not know {type(layer).__name__} as a linear layer")
    return matrix


@torch.inference_mode()
def largest_gap(policy: Decoded, packed: PackedModel) -> tuple[float, float]:
    """The largest difference of log-probabilities from torch's, on groups of uneven sizes, and what is tolerated.

    Completions are given tokens, and not drawn: those of all slots at every step.
    """
    context = policy.context_length or 1 << 30
    steps = max(1, min(TEST_STEPS, context // 2))
    lengths = [max(1, min(length, context - steps)) for length in TEST_PROMPTS]
    tokens = probe_tokens(len(policy.head.linear.weight))
    prompts = [[next(tokens) for _ in range(length)] for length in lengths]
    entries = [p for p, size in enumerate(TEST_GROUPS) for _ in range(size)]
    slots = list(range(len(entries)))
    torch_cache = policy.open(slots=len(slots), entries=len(prompts), prompt_lengths=lengths, new_tokens=steps)
    native_cache = NativeCache(packed, slots=len(slots), longest_prompt=max(lengths), new_tokens=steps)
    pairs = [
        (
            policy.prefill(torch_cache, prompts, range(len(prompts))),
            native_cache.prefill(prompts, range(len(prompts))),
        )
    ]
    for cache in (torch_cache, native_cache):
        cache.admit(slots, entries)
    for _ in range(steps):
        tokens_R = torch.tensor([next(tokens) for _ in slots])
        pairs.append((policy.decode(torch_cache, tokens_R), native_cache.decode(tokens_R)))
    gaps = [(a.log_softmax(-1) - b.log_softmax(-1)).abs().max().item() for a, b in pairs]
    largest = max(logits.abs().max().item() for logits, _ in pairs)
    return max(gaps), TOLERANCE * max(1.0, largest)
