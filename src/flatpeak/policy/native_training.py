"""Training passes by the native kernels (kernels.native.training_pass), if a self-test agrees.

Attention over packed rows decides for each call whether to use them (policy.training_attention). RMS norms, gated MLPs
and GPT-2's GELU only change their classes, as linear layers do (policy.linears), which still compute the products.
Calls that the kernels do not support use the original code: other types, autocast, compiled layers, sharded weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import NewGELUActivation, SiLUActivation

from flatpeak.errors import brief
from flatpeak.kernels.native.build import UnavailableError, library
from flatpeak.kernels.native.training_pass import gelu, rms_norm, swiglu
from flatpeak.policy.compatibility import PolicyParts
from flatpeak.policy.linears import Exchanged, is_watched
from flatpeak.policy.model_settings import gradients_of, plain_layers, without_dropout
from flatpeak.types import PackedCompletions

KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""The model types whose norms and MLPs are replaced."""
TEST_PROMPTS, TEST_RESPONSES = (1, 33, 3, 18), ((1, 20, 7), (9, 70), (), (2, 3, 17))
"""Tokens of each prompt and its responses in the self-test; one response is longer than the kernels' query block."""
LOGPROB_TOLERANCE = 1e-5
"""Tolerance of log-probabilities in the self-test, relative to the largest: sampler and trainer agree within this."""
GRADIENT_TOLERANCE = 1e-4
"""Tolerance of the gradient in the self-test, relative to the largest entry: a hundred times rounding."""
OWN_TOLERANCE, LEAST_TOLERANCE = 1e-2, 1e-6
"""Tolerance of each weight's gradient: the first times its largest entry, plus the second times the largest entry of
all gradients, because some gradients are mostly rounding error; at most GRADIENT_TOLERANCE."""


class NativeNorm(Exchanged):
    """The RMSNorm of llama and similar models: w x / sqrt(mean(x^2) + epsilon)."""

    weight: Any
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normalized states."""
        if _computed(hidden_states) and type(self.weight) is nn.Parameter and self.weight.dtype == torch.float32:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        plain: Tensor = super().forward(hidden_states)
        return plain


class NativeGatedMLP(Exchanged):
    """The MLP of llama and similar models: down(silu(gate(x)) up(x))."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any
    act_fn: Any

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        plain = type(self.act_fn) is SiLUActivation and not is_watched(self.act_fn)
        output: Tensor = self.down_proj(swiglu(gate, up) if plain and _computed(gate, up) else self.act_fn(gate) * up)
        return output


def _computed(*tensors: Tensor) -> bool:
    """Whether kernels support these tensors: float32 on a CPU, whole vectors per row, no autocast, not compiled."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    width = library().vector_width()
    return all(
        each.dtype == torch.float32 and each.device.type == "cpu" and not each.shape[-1] % width for each in tensors
    )


class NativeGELU(Exchanged, NewGELUActivation):
    """GPT-2's GELU, for which transformers needs eight passes over the input."""

    plain = NewGELUActivation

    def forward(self, input: Tensor) -> Tensor:
        """Return x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
        return gelu(input) if _computed(input) else F.gelu(input, approximate="tanh")


def make_native(model: nn.Module) -> None:
    """Replace the classes of the modules that kernels compute; `linears.make_plain` restores them."""
    for module in model.modules():
        native = _native_class(type(module))  # type: ignore[arg-type]
        if native is not None:
            module.__class__ = native


@cache
def _native_class(plain: type[nn.Module]) -> type[nn.Module] | None:
    if plain is NewGELUActivation:
        return NativeGELU
    kinds = [kind for kind in KINDS if plain.__module__ == f"transformers.models.{kind}.modeling_{kind}"]
    for ending, native in (("RMSNorm", NativeNorm), ("MLP", NativeGatedMLP)):
        if kinds and plain.__name__.endswith(ending):
            return type(native.__name__, (native, plain), {"plain": plain})
    return None


@torch.inference_mode(False)
def largest_gaps(policy: PolicyParts) -> tuple[float, float]:
    """The largest differences of log-probabilities and gradient from torch, each relative to its tolerance.

    UnavailableError if the pass by kernels fails.
    """
    vocabulary = len(policy.head.linear.weight)
    batch = _test_batch(vocabulary, policy.context_length or vocabulary)
    weights_T = torch.linspace(-1.0, 1.5, len(batch.tokens_T))
    # A frozen copy uses the policy's verdict, so all of its weights are differentiated.
    parameters = policy.parameters() or [each for each in policy.model.parameters() if each.is_floating_point()]
    results = []
    with (
        gradients_of(parameters, required=True),
        _without_hooks(parameters),
        plain_layers(policy.causal),
        without_dropout(policy.model),
        torch.enable_grad(),
    ):
        try:
            for native in (False, True):
                policy.use_kernels(native)
                logprobs_T, _ = policy.packed_logprobs(batch, temperature=1.0)
                loss = (weights_T * logprobs_T).sum()
                grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                results.append((logprobs_T.detach(), [grad for grad in grads if grad is not None]))
        except Exception as error:
            if not results:  # the pass by torch failed, as it would in a run
                raise
            raise UnavailableError(f"their training pass failed: {type(error).__name__}: {brief(error)}") from error
        finally:
            policy.use_kernels(False)
    (torch_T, torch_grads), (native_T, native_grads) = results
    tolerated = LOGPROB_TOLERANCE * max(1.0, float(torch_T.abs().max()))
    return float((torch_T - native_T).abs().max()) / tolerated, _largest_gap(torch_grads, native_grads)


def _largest_gap(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> float:
    """The largest difference of gradients, each relative to its tolerance; NaN if any is NaN."""
    sizes = torch.stack([grad.abs().max() for grad in theirs])
    gaps = torch.stack([(a - b).abs().max() for a, b in zip(theirs, ours, strict=True)])
    own = OWN_TOLERANCE * sizes + LEAST_TOLERANCE * sizes.max()
    tolerated = own.clamp(max=GRADIENT_TOLERANCE * float(sizes.max()))
    return float(torch.where(gaps == 0, gaps, gaps / tolerated).max())


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A context in which a caller's gradient hooks do not run."""
    held = [(parameter, parameter._backward_hooks) for parameter in parameters]
    for parameter, _ in held:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in held:
            parameter._backward_hooks = hooks


def _test_batch(vocabulary: int, context: int) -> PackedCompletions:
    """Groups of uneven sizes, cut to the model's context."""
    lengths = [max(1, min(length, context // 2)) for length in TEST_PROMPTS]
    responses = [[max(1, min(length, context // 2)) for length in group] for group in TEST_RESPONSES]
    lengths_N = torch.tensor([length for group in responses for length in group])
    total = int(lengths_N.sum())
    tokens = probe_tokens(vocabulary)
    return PackedCompletions(
        prompts=tuple(tuple(islice(tokens, length)) for length in lengths),
        prompt_N=torch.arange(len(responses)).repeat_interleave(torch.tensor([len(group) for group in responses])),
        lengths_N=lengths_N,
        tokens_T=torch.tensor(list(islice(tokens, total))),
        sequence_T=torch.arange(len(lengths_N)).repeat_interleave(lengths_N),
    )


def probe_tokens(vocabulary: int) -> Iterator[int]:
    """Token ids that look random and are the same every time."""
    number = 1
    while True:
        number = number * 48271 % 0x7FFFFFFF  # Park and Miller 1988
        yield number % vocabulary
