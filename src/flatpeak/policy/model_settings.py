"""Changes to a model while a policy holds it: how its layers run in training, and the settings to restore.

`training_layers` makes passes with gradients recompute the decoder layers in the backward pass, or compile them.
`ModelSettings` stores a model's attention, modes, dropout and trainable weights, and restores them. A caller's model is
changed only while a policy holds it, and only one policy at a time can hold it (`register_holder`).
"""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from flatpeak.errors import UserError
from flatpeak.policy.linears import make_plain
from flatpeak.policy.training_attention import ATTENTION_NAME, attention_forward, register_attention
from flatpeak.protocols import Tokenizer
from flatpeak.utils.control_tokens import end_of_turn

Forward = Callable[..., Any]
"""The `forward` of a layer's class, with the layer as its first argument."""
_OPAQUE_ATTENTION: Forward = torch.compiler.disable(attention_forward)
"""The attention function, for use inside compiled layers."""
_holders: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = weakref.WeakKeyDictionary()
"""The policy that holds each model, as long as both exist."""


@dataclass(frozen=True, kw_only=True)
class TrainingForward:
    """The replacement of a layer's `forward`; passes without gradients run the layer unchanged.

    It refers to its layer and does not copy the class's `forward`, so a deep copy of the model runs with the copied
    weights.
    """

    layer: nn.Module
    recompute: bool
    compiled: Forward | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; with gradients, as configured for training."""
        plain: Forward = type(self.layer).forward
        if not (self.layer.training and torch.is_grad_enabled()):
            return plain(self.layer, *args, **kwargs)
        if self.compiled is not None:
            keep_attention_out()
        run = self.compiled or plain
        if self.recompute:
            return checkpoint(run, self.layer, *args, use_reentrant=False, **kwargs)
        return run(self.layer, *args, **kwargs)


def make_adapted_layers_fast(causal: nn.Module) -> None:
    """Compute each linear layer that has a LoRA adapter as one product."""
    if any(hasattr(module, "lora_A") for module in causal.modules()):
        from flatpeak.policy.adapted_layers import make_adapters_fast  # imported here because it imports peft

        make_adapters_fast(causal)


@contextmanager
def training_layers(model: Any, *, recompute: bool, compiled: bool) -> Iterator[None]:
    """A context in which passes with gradients recompute the layers in the backward pass, compile them, or both.

    UserError if transformers does not mark the model's layers, or torch.compile does not work here.
    """
    layers = decoder_layers(model) if recompute or compiled else []
    if compiled:
        check_compiler(model.device)
    # One compiled function per layer class, so that all layers of the class share its graphs.
    by_class = {
        kind: torch.compile(kind.forward, dynamic=True) for kind in {type(layer) for layer in layers} if compiled
    }
    for layer in layers:
        setattr(layer, "forward", TrainingForward(layer=layer, recompute=recompute, compiled=by_class.get(type(layer))))  # noqa: B010
    try:
        yield
    finally:
        for layer in layers:
            delattr(layer, "forward")
        if compiled:
            register_attention()


@contextmanager
def scoring(model: nn.Module, *, trained: Collection[str] | None = None) -> Iterator[None]:
    """A context in which forward passes have the same bits as passes with gradients, at the lowest cost.

    Gradients are off, except in compiled layers, because graphs depend on which weights have gradients, and each graph
    rounds differently. `trained` names those weights for a copy of the trained model, whose weights have no gradients.
    """
    forwards = [training_forward(layer) for layer in model.modules()]
    if not any(forward is not None and forward.compiled is not None for forward in forwards):
        with torch.no_grad():
            yield
        return
    held = [weight for name, weight in model.named_parameters() if trained is not None and name in trained]
    with gradients_of(held, required=True), torch.enable_grad():
        yield


@contextmanager
def gradients_of(weights: Iterable[nn.Parameter], *, required: bool) -> Iterator[None]:
    """A context in which passes compute the gradients of these weights, or do not compute them."""
    changed = [weight for weight in weights if weight.requires_grad != required]
    for weight in changed:
        weight.requires_grad_(required)
    try:
        yield
    finally:
        for weight in changed:
            weight.requires_grad_(not required)


@contextmanager
def plain_layers(model: nn.Module) -> Iterator[None]:
    """A context in which all passes run the layers unchanged, because neither option is twice differentiable."""
    held = [(layer, layer.__dict__.pop("forward")) for layer in model.modules() if training_forward(layer)]
    try:
        yield
    finally:
        for layer, forward in held:
            layer.__dict__["forward"] = forward


def training_forward(layer: nn.Module) -> TrainingForward | None:
    """The forward pass that `training_layers` has given this layer, if any."""
    forward = layer.__dict__.get("forward")
    return forward if isinstance(forward, TrainingForward) else None


def is_replaced(module: nn.Module) -> bool:
    """Whether a forward pass without gradients is not that of the module's class alone: replaced, or with hooks."""
    forward = "forward" in module.__dict__ and training_forward(module) is None
    return forward or any(module.__dict__[name] for name in ("_forward_hooks", "_forward_pre_hooks"))


def marked_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model, as transformers marks them."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model, as marked by transformers. UserError if it marks none."""
    layers = marked_layers(model)
    if not layers:
        raise UserError(
            f"transformers cannot recompute the layers of {type(model).__name__}: set "
            "training.activation_checkpointing and training.compile to false"
        )
    if any("forward" in layer.__dict__ for layer in layers):
        raise UserError(
            f"other code has replaced the forward of {type(model).__name__}'s layers (accelerate's hooks do): load "
            "the model without device_map, or set training.activation_checkpointing and training.compile to false"
        )
    return layers


def keep_attention_out() -> None:
    """Exclude flatpeak's attention from compiled graphs, which end before it and continue after it.

    Inside a graph, it would be compiled for every layer index, and torch gives up after eight. Every new policy
    registers the function again, so this is repeated before each use; it costs no more than setting a dictionary key.
    """
    AttentionInterface.register(ATTENTION_NAME, _OPAQUE_ATTENTION)


def check_compiler(device: torch.device) -> None:
    """Raise UserError before the first step if torch.compile does not work."""
    # Inductor uses the same two compilers.
    compiler = os.environ.get("CXX") or "g++"
    remedy = f"install one (apt-get install g++), set CXX, or set training.compile=false (device {device})"
    if shutil.which(compiler) is None:
        raise UserError(f"training.compile=true needs a C++ compiler, but {compiler} does not exist: {remedy}")
    try:
        torch.compile(lambda values: values.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # a broken toolchain may raise anything
        line = str(error).strip().split("\n")[0]
        raise UserError(f"training.compile=true: torch.compile fails here ({line}): {remedy}") from error


_DROPS: Final = ("dropout", "pdrop", "layerdrop", "jitter")
"""Words in the names of attributes that make training passes random."""


def silence_dropout(
    model: nn.Module, *, keep: Collection[nn.Module] = frozenset()
) -> list[tuple[nn.Module, str, float]]:
    """Set every dropout probability to 0: dropout modules (LoRA's too) and attention's plain attributes.

    Modules in `keep` are unchanged. Returns (module, attribute, probability) for each probability that was not 0.
    """
    settings = [
        (module, name, float(setting))
        for module in model.modules()
        if module not in keep
        for name, setting in vars(module).items()
        if _is_probability(module, name, setting) and setting
    ]
    for module, name, _ in settings:
        setattr(module, name, 0.0)
    return settings


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """A context without dropout, even in passes with gradients."""
    settings = silence_dropout(model)
    try:
        yield
    finally:
        for module, name, probability in settings:
            setattr(module, name, probability)


def _is_probability(module: nn.Module, name: str, setting: object) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd) and name == "p":
        return True
    return isinstance(setting, float) and any(word in name for word in _DROPS)


def register_holder(causal: nn.Module, policy: object) -> None:
    """Record that `policy` holds the model. UserError if another policy does: they would undo each other's changes."""
    if _is_held(causal):
        gc.collect()  # an unreferenced policy may still exist in a reference cycle
    if _is_held(causal):
        raise UserError(
            f"another flatpeak Policy holds this {type(causal).__name__}: call its release() first; to sample "
            "from the model being trained, give train a factory, sampler=lambda policy: MySampler(NativeEngine(policy))"
        )
    _holders[causal] = weakref.ref(policy)


def unregister_holder(causal: nn.Module, policy: object) -> None:
    """Undo `register_holder`, if this policy is the holder."""
    holder = _holders.get(causal)
    if holder is not None and holder() is policy:
        del _holders[causal]


def _is_held(causal: nn.Module) -> bool:
    holder = _holders.get(causal)
    return holder is not None and holder() is not None


class ModelSettings:
    """A model's settings before the policy changed them: attention, modes, dropout, trainable weights, gradients."""

    def __init__(self, model: nn.Module, causal: Any) -> None:
        self.causal = causal
        self.attention = _own_attention(causal)
        self.modes = {module: module.training for module in model.modules()}
        self.trainable = {parameter: parameter.requires_grad for parameter in model.parameters()}
        self.grad_dtypes = {parameter: parameter.grad_dtype for parameter in model.parameters()}
        self.gradients = {
            parameter: weakref.ref(parameter.grad) for parameter in model.parameters() if parameter.grad is not None
        }
        """Weak references to the caller's gradients, so that a training step can free their memory."""
        self.dropout: list[tuple[nn.Module, str, float]] = []

    def silence_dropout(self, model: nn.Module, *, keep: Collection[nn.Module]) -> None:
        """Set every dropout probability to 0 until `restore`, except in the modules in `keep`."""
        self.dropout = silence_dropout(model, keep=keep)

    def give_back_layers(self) -> None:
        """Restore the model's attention and layer classes, temporarily or for good."""
        if self.causal.config._attn_implementation == ATTENTION_NAME:
            self.causal.set_attn_implementation(self.attention)
        make_plain(self.causal)

    def forget_weights(self) -> None:
        """Drop the weights because others replace them; `restore` then leaves weights unchanged."""
        for of_weights in (self.trainable, self.grad_dtypes, self.gradients):
            of_weights.clear()

    def restore(self) -> None:
        """Restore everything. Gradients from training are dropped; earlier gradients stay."""
        self.give_back_layers()
        for module, name, probability in self.dropout:
            setattr(module, name, probability)
        for module, training in self.modes.items():
            module.training = training
        for parameter, trainable in self.trainable.items():
            before = self.gradients.get(parameter)
            if parameter.grad is not None and (before is None or before() is not parameter.grad):
                parameter.grad = None
            parameter.requires_grad_(trainable)
            if parameter.grad_dtype != self.grad_dtypes[parameter]:
                parameter.grad_dtype = self.grad_dtypes[parameter]


def _own_attention(causal: Any) -> str:
    """The model's attention; if a policy replaced it without restoring it, transformers' default."""
    implementation: str = causal.config._attn_implementation or "eager"
    if implementation != ATTENTION_NAME:
        return implementation
    return "sdpa" if getattr(causal, "_supports_sdpa", False) else "eager"


def eos_token_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """All end-of-sequence tokens of the tokenizer, the model and its generation config, and its chat's end of turn."""
    eos: set[int] = set()
    for source in (tokenizer, model.config, getattr(model, "generation_config", None)):
        ids = getattr(source, "eos_token_id", None)
        eos.update([ids] if isinstance(ids, int) else ids or [])
    turn = end_of_turn(tokenizer)
    eos.update([] if turn is None else [turn])
    if not eos:
        raise UserError("neither tokenizer nor model has an end-of-sequence token: set tokenizer.eos_token")
    return frozenset(eos)
