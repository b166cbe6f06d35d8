"""Attributes of a model that a policy changes besides its weights, kept to be put back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import Tensor, nn

from flatpeak.errors import UserError
from flatpeak.policy.attention import NAME
from flatpeak.policy.dropout import silence_dropout
from flatpeak.policy.linears import make_plain

_holders: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = weakref.WeakKeyDictionary()
"""The policy that holds each model; of no use once either is gone."""


def register_holder(causal: nn.Module, policy: object) -> None:
    """Note that `policy` holds the model. UserError where another does: they would undo each other's changes."""
    if _is_held(causal):
        gc.collect()  # a policy that nothing refers to any more may be part of a cycle
    if _is_held(causal):
        raise UserError(
            f"this {type(causal).__name__} is held by another flatpeak Policy: call its release() first; to sample "
            "from the model being trained, give train a factory, sampler=lambda policy: MySampler(NativeEngine(policy))"
        )
    _holders[causal] = weakref.ref(policy)


def unregister_holder(causal: nn.Module, policy: object) -> None:
    """Undo `register_holder`, where it was by this policy."""
    holder = _holders.get(causal)
    if holder is not None and holder() is policy:
        del _holders[causal]


def _is_held(causal: nn.Module) -> bool:
    holder = _holders.get(causal)
    return holder is not None and holder() is not None


class ModelSettings:
    """A model's attention, modes, dropout, trainable weights and the types of their gradients, as they were found."""

    def __init__(self, model: nn.Module, causal: Any) -> None:
        self.causal = causal
        self.attention = _own_attention(causal)
        self.modes = {module: module.training for module in model.modules()}
        self.trainable = {parameter: parameter.requires_grad for parameter in model.parameters()}
        self.grad_dtypes = {parameter: parameter.grad_dtype for parameter in model.parameters()}
        self.gradients = {
            parameter: weakref.ref(parameter.grad) for parameter in model.parameters() if parameter.grad is not None
        }
        """Those that the caller left; only referred to, so that a training step can free their memory."""
        self.dropout: list[tuple[nn.Module, str, float]] = []

    def silence_dropout(self, model: nn.Module) -> None:
        """Set every dropout probability to 0 until `restore`."""
        self.dropout = silence_dropout(model)

    def give_back_layers(self) -> None:
        """The model's own attention and classes of layers, for now or for good."""
        if self.causal.config._attn_implementation == NAME:
            self.causal.set_attn_implementation(self.attention)
        make_plain(self.causal)

    def restore(self) -> None:
        """Put everything back. Gradients that training left are dropped; those from before it stay."""
        self.give_back_layers()
        for module, name, probability in self.dropout:
            setattr(module, name, probability)
        for module, training in self.modes.items():
            module.training = training
        for parameter, trainable in self.trainable.items():
            if parameter.grad is not None and self._before(parameter) is not parameter.grad:
                parameter.grad = None
            parameter.requires_grad_(trainable)
            if parameter.grad_dtype != self.grad_dtypes[parameter]:
                parameter.grad_dtype = self.grad_dtypes[parameter]

    def _before(self, parameter: nn.Parameter) -> Tensor | None:
        found = self.gradients.get(parameter)
        return None if found is None else found()


def _own_attention(causal: Any) -> str:
    """The model's attention; of a model that a policy still holds, or left held, what transformers would choose."""
    found: str = causal.config._attn_implementation or "eager"
    if found != NAME:
        return found
    return "sdpa" if getattr(causal, "_supports_sdpa", False) else "eager"
