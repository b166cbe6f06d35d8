"""Decoding by the native kernels (kernels.native), where they serve the model and a self-test agrees; the choice.

The kernels have a forward pass of their own, of Llama-like models and GPT-2. They are given the modules' own weights,
adapters merged; whatever is not exactly what they compute, a hook included, is left to torch. Before a policy's first
request, log-probabilities of both are compared on its own weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flatpeak.errors import UserError
from flatpeak.kernels.low_rank import Adapter
from flatpeak.kernels.native.build import UnavailableError, library_name
from flatpeak.kernels.native.decode import LINEAR, Affine, ModelWeights, NativeCache, PackedModel
from flatpeak.policy.compatibility import Probed
from flatpeak.policy.kernel_verdicts import remembered
from flatpeak.policy.linears import FastLayer, plain_class
from flatpeak.policy.model_settings import has_training_forward
from flatpeak.policy.native_training import Trained, largest_gaps, probe_tokens

Kernels = Literal["auto", "torch", "native"]
SETTING = "FLATPEAK_KERNELS"
"""The environment variable that decides where `rollout.kernels` is auto, and for policies without a recipe."""
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
"""The model types that the kernels have a forward pass of, and their names of the components of a layer."""
SERVED = tuple(LAYERS)
_GELU = ("gelu_new", "gelu_pytorch_tanh")
TORCH = "torch"
"""The name of what decodes without kernels."""
TOLERANCE = 1e-5
"""Of the expected difference of a drawn token's log-probability, times the largest logit: what sampler and trainer
promise each other."""
LARGEST_TOLERANCE = 1e-4
"""Of any token's, likewise: for improbable tokens of a large vocabulary, torch's own rounding exceeds the first one."""
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


Result = TypeVar("Result")


class _Copy(NamedTuple):
    """Packed weights, and the weights and their state that they are a copy of."""

    packed: PackedModel
    weights: Sequence[Tensor]
    state: list[Any]


class KernelChoice:
    """Whether a policy's requests and training passes go through native kernels, and why not."""

    def __init__(self) -> None:
        setting = os.environ.get(SETTING) or "auto"
        if setting not in get_args(Kernels):
            raise UserError(f"{SETTING}={setting}: set auto, torch or native, or leave it unset")
        self.setting: Kernels = setting  # type: ignore[assignment]
        self._asked_by = SETTING if setting == "native" else "rollout.kernels"
        self.reason: str | None = None
        """The reason why the last request was not decoded by them, where `setting` leaves the choice open."""
        self.training_reason: str | None = None
        """The reason why training passes do not go through them, likewise."""
        self.used: str | None = None
        """The decoder of the last request: torch, or the name of a library of kernels."""
        self.idle = False
        """Whether servers draw the rollouts, so that no decoder is chosen."""
        self._agrees: bool | None = None  # not known before the first comparison
        self._trains: bool | None = None
        self._kept: _Copy | None = None
        self._tested: list[int] | None = None
        """The versions of the weights that training passes were last compared on, with or without a verdict."""

    def choose(self, setting: Kernels, *, unserved: str | None) -> None:
        """Take a recipe's setting, of which auto leaves the environment's.

        `unserved` is the reason why the native engine does not serve the policy, if it does not: a UserError where
        kernels are the only choice.
        """
        if setting != "auto":
            self.setting, self._asked_by = setting, "rollout.kernels"
        if self.setting == "native" and unserved is not None:
            raise self._refusal(unserved)

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
        packed, self.reason = self._unless_torch(policy, lambda: self._pack(policy))
        self.used = TORCH if packed is None else library_name()
        return packed

    def trains(self, policy: Computed) -> bool:
        """Whether passes with gradients go through kernels, and those that score as they do: decided once."""
        # The shards of a model can be compared with nothing.
        if self._leaves_to_torch(policy):
            return False
        if self._trains is None and policy.gathered is None and self._tested != _versions(policy):
            _, self.training_reason = self._unless_torch(policy, lambda: self._compare(policy))
        return bool(self._trains)

    def _leaves_to_torch(self, policy: Decoded) -> bool:
        return self.setting == "torch" or (self.setting == "auto" and policy.device.type != "cpu")

    def _unless_torch(self, policy: Decoded, prepare: Callable[[], Result]) -> tuple[Result | None, str | None]:
        """The result of `prepare`, or None with the reason; UserError if kernels are the only choice."""
        if self._leaves_to_torch(policy):
            return None, None
        try:
            return prepare(), None
        except UnavailableError as error:
            if self.setting == "native":
                raise self._refusal(str(error)) from None
            return None, str(error)

    def _refusal(self, reason: str) -> UserError:
        return UserError(f"{self._asked_by}=native: {reason}; set {self._asked_by}=auto or torch")

    def release(self) -> None:
        """Free the packed weights: a training pass needs the memory, and changes the weights after it."""
        self._kept = None

    def _pack(self, policy: Decoded) -> PackedModel:
        weights = read_weights(policy)  # nothing is copied yet
        if self._agrees is None:
            test = f"decoding by {library_name()}"
            self._agrees = remembered(
                test, policy, lambda: _is_tolerated("logits are", largest_gap(policy, self._copy(policy, weights)))
            )
        if not self._agrees:
            self.release()
            raise UnavailableError("their log-probabilities differ from torch's on this model and machine")
        return self._copy(policy, weights)

    def _copy(self, policy: Decoded, weights: ModelWeights) -> PackedModel:
        """The packed weights: those of the last request while nothing has changed them."""
        state = _state(policy)
        if self._kept is None or self._kept.state != state:
            self.release()  # before there is another
            self._kept = _Copy(PackedModel(weights), list(policy.model.parameters()), state)
        return self._kept.packed

    def _compare(self, policy: Computed) -> None:
        weight = policy.head.linear.weight
        if policy.below_float32 or (weight.device.type, weight.dtype) != ("cpu", torch.float32):
            raise UnavailableError("they compute in float32 on a CPU")
        test = f"training by {library_name()}"
        self._tested = _versions(policy)
        self._trains = remembered(
            test, policy, lambda: _is_tolerated("log-probabilities or its gradient are", *largest_gaps(policy))
        )
        if not self._trains:
            raise UnavailableError("log-probabilities or gradients differ from torch's on this model and machine")


def _is_tolerated(what: str, *gaps: float) -> bool:
    """Whether gaps are within what is tolerated; UnavailableError where there is no verdict."""
    if not all(map(math.isfinite, gaps)):
        raise UnavailableError(f"the model's {what} NaN or infinite")
    return max(gaps) <= 1


def _versions(policy: Decoded) -> list[int]:
    """The number of changes of each weight so far, as torch counts them; 0 where it counts none (inference mode)."""
    return [0 if weight.is_inference() else weight._version for weight in policy.model.parameters()]


def _state(policy: Decoded) -> list[Any]:
    """All that packed weights depend on: which weights there are, their changes, and the adapters at work."""
    adapters = [each.adapter() for each in policy.model.modules() if isinstance(each, FastLayer)]
    scalings = [(id(each.down_RK), id(each.up_NR), each.scaling) for each in adapters if each is not None]
    weights = list(policy.model.parameters())
    # A few values of each: torch counts no change by a fused optimizer or through `.data`.
    samples = [weight.detach().flatten()[:: max(1, weight.numel() // 64)].tolist() for weight in weights]
    return [list(map(id, weights)), _versions(policy), samples, scalings]


@torch.no_grad()
def read_weights(policy: Decoded) -> ModelWeights:
    """The weights of a model, as the kernels know it; UnavailableError where they do not. Layers are read lazily."""
    config, gpt2 = policy.causal.config, policy.causal.config.model_type == "gpt2"
    if (reason := _unserved(policy)) is not None:
        raise UnavailableError(reason)
    policy.model.eval()  # dropout of adapters, which is off then
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


def _unserved(policy: Decoded) -> str | None:
    """The reason why the kernels do not serve a model, if they do not."""
    config = policy.causal.config
    if policy.below_float32 or (policy.device.type, policy.head.linear.weight.dtype) != ("cpu", torch.float32):
        return "they compute in float32 on a CPU"
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if config.model_type not in SERVED or (window is not None and window < (policy.context_length or window + 1)):
        return f"they do not serve {config.model_type}{' with a window' if window else ''}"
    if policy.head.softcap is not None or policy.head.logit_scale != 1:
        return "they know no soft cap and no scale of logits"
    if config.model_type != "gpt2":
        known = config.hidden_act in ("silu", "swish")
    else:
        scaled = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
        known = scaled and not config.add_cross_attention and config.activation_function in _GELU
    if not known:
        return f"they know only the usual variant of {config.model_type}"
    for module in policy.causal.modules():
        # A training forward is for passes with gradients.
        replaced = "forward" in module.__dict__ and not has_training_forward(module)
        if replaced or any(module.__dict__[name] for name in _HOOKS):
            return f"a {type(module).__name__} has a hook"
    return None


def _rope(rotary: nn.Module, positions: int) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        tables = rotary(torch.zeros(1), torch.arange(positions)[None])
    cosines, sines = (table[0, :, : table.shape[-1] // 2] for table in tables)  # the halves are equal
    return cosines, sines


def _check_own(policy: Decoded, *modules: nn.Module) -> None:
    """UnavailableError where a module is not the one that transformers has for this type of model."""
    kind = policy.causal.config.model_type
    for module in modules:
        if plain_class(module).__module__ != f"transformers.models.{kind}.modeling_{kind}":
            raise UnavailableError(f"{type(module).__name__} is not a module of transformers' {kind}")


def _embedding(module: nn.Module) -> Tensor:
    if type(module) is not nn.Embedding:
        raise UnavailableError(f"they do not know {type(module).__name__} as an embedding")
    return module.weight


def _check_layer(block: nn.Module, paths: Mapping[str, str]) -> None:
    """UnavailableError where a layer has a component that the kernels do not know."""
    for component in LINEAR:
        modules: list[Any] = [block.get_submodule(path) for path in paths.get(component, "").split()]
        for module in modules:
            _adapter(module)
        if len({getattr(module, "base_layer", module).bias is None for module in modules}) > 1:
            raise UnavailableError("only some of the layers that they join have a bias")


@torch.no_grad()
def _layer(block: nn.Module, paths: Mapping[str, str]) -> dict[str, Affine]:
    """The components of a layer, with copies of what is joined or merged."""
    modules = {name: [block.get_submodule(path) for path in each.split()] for name, each in paths.items()}
    return {name: _joined(each) if name in LINEAR else _norm(*each) for name, each in modules.items()}


def _norm(module: Any) -> Affine:
    plain = plain_class(module)
    if plain is not nn.LayerNorm and not plain.__name__.endswith("RMSNorm"):
        raise UnavailableError(f"they do not know {type(module).__name__} as a norm")
    return Affine(module.weight, getattr(module, "bias", None))


def _joined(layers: Sequence[Any]) -> Affine:
    """Linear layers that read the same input, one below the other, each with its adapter merged."""
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
    """The adapter of a linear layer that has one; UnavailableError where the kernels do not know the layer."""
    if plain_class(layer) in (nn.Linear, Conv1D):
        return None
    adapter = layer.adapter() if isinstance(layer, FastLayer) else None
    if adapter is None:
        raise UnavailableError(f"they do not know {type(layer).__name__} as a linear layer")
    return adapter


@torch.inference_mode()
def largest_gap(policy: Decoded, packed: PackedModel) -> float:
    """The largest difference of log-probabilities from torch's, relative to what is tolerated; NaN where there is one.

    Groups have uneven sizes. Completions are given tokens, and not drawn: those of all slots at every step.
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
    everything = range(len(prompts))
    pairs = [(policy.prefill(torch_cache, prompts, everything), native_cache.prefill(prompts, everything))]
    for cache in (torch_cache, native_cache):
        cache.admit(slots, entries)
    for _ in range(steps):
        tokens_R = torch.tensor([next(tokens) for _ in slots])
        pairs.append((policy.decode(torch_cache, tokens_R), native_cache.decode(tokens_R)))
    largest = torch.stack([logits.abs().max() for logits, _ in pairs]).max().clamp(min=1)
    return float(torch.stack([_gap(*pair) for pair in pairs]).max() / largest)


def _gap(theirs_RV: Tensor, ours_RV: Tensor) -> Tensor:
    """The larger of the expected and the largest difference of log-probabilities, by what is tolerated of each."""
    logprobs_RV = theirs_RV.log_softmax(-1)
    gaps_RV = (logprobs_RV - ours_RV.log_softmax(-1)).abs()
    expected_R = (logprobs_RV.exp() * gaps_RV).sum(-1)
    return torch.maximum(expected_R.max() / TOLERANCE, gaps_RV.max() / LARGEST_TOLERANCE)
