"""The choice between decoding by native kernels (kernels.native) and torch: support for the model, and a self-test.

Before a policy's first request, the self-test compares log-probabilities of kernels and torch with the policy's
weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.kernels.native.build import UnavailableError, library_name
from flatpeak.kernels.native.decode import ModelWeights, NativeCache, PackedModel
from flatpeak.policy.compatibility import PolicyParts
from flatpeak.policy.kernel_verdicts import remembered
from flatpeak.policy.linears import FastLayer
from flatpeak.policy.native_training import largest_gaps, probe_tokens
from flatpeak.policy.native_weights import read_weights

Kernels = Literal["auto", "torch", "native"]
SETTING = "FLATPEAK_KERNELS"
"""The environment variable for `rollout.kernels=auto`, and for policies without a recipe."""
TORCH = "torch"
"""The name of the decoder without kernels."""
TOLERANCE = 1e-5
"""Tolerance of the expected difference in a sampled token's log-probability, relative to the largest logit: sampler and
trainer agree within this."""
LARGEST_TOLERANCE = 1e-4
"""Tolerance for any single token: torch's rounding of improbable tokens in a large vocabulary exceeds `TOLERANCE`."""
TEST_PROMPTS, TEST_GROUPS, TEST_STEPS = (1, 33, 3, 18), (1, 5, 2, 4), 20
"""Tokens per prompt, completions per prompt, and tokens per completion in the self-test."""


Result = TypeVar("Result")


class _Copy(NamedTuple):
    """Packed weights, with the weights and the state at the time of the copy."""

    packed: PackedModel
    weights: Sequence[Tensor]
    state: list[Any]


class KernelChoice:
    """Whether a policy's requests and training passes use native kernels, and the reason if not."""

    def __init__(self) -> None:
        setting = os.environ.get(SETTING) or "auto"
        if setting not in get_args(Kernels):
            raise UserError(f"{SETTING}={setting}: set auto, torch or native, or unset it")
        self.setting: Kernels = setting  # type: ignore[assignment]
        self._asked_by = SETTING if setting == "native" else "rollout.kernels"
        self.reason: str | None = None
        """The reason why torch decoded the last request although `setting` allowed kernels."""
        self.training_reason: str | None = None
        """The reason why training passes use torch although `setting` allows kernels."""
        self.used: str | None = None
        """The decoder of the last request: torch, or the name of a library of kernels."""
        self.idle = False
        """Whether servers sample the rollouts, so that no decoder is chosen."""
        self._agrees: bool | None = None  # unknown before the first comparison
        self._trains: bool | None = None
        self._kept: _Copy | None = None
        self._tested: list[int] | None = None
        """The versions of the weights at the last comparison of training passes, with or without a verdict."""

    def choose(self, setting: Kernels, *, unserved: str | None) -> None:
        """Set the choice from a recipe; with auto, the environment variable decides.

        `unserved` is the reason, if any, why the native engine does not support the policy. UserError if there is one
        and the recipe allows only kernels.
        """
        if setting != "auto":
            self.setting, self._asked_by = setting, "rollout.kernels"
        if self.setting == "native" and unserved is not None:
            raise self._refusal(unserved)

    @property
    def notices(self) -> list[str]:
        """The reasons why decoding or training is slower than it could be, if any."""
        reasons = {"decoding runs": self.reason, "a training pass runs": self.training_reason}
        return [f"{what} without native kernels, and is slower: {why}" for what, why in reasons.items() if why]

    def name(self, policy: PolicyParts) -> str:
        """The decoder of requests, chosen now if it has not been chosen."""
        if self.used is None:
            self.pack(policy)
        return self.used or TORCH

    def names(self, policy: PolicyParts) -> str:
        """The decoder, and the training kernels if they differ; only the latter if servers sample the rollouts."""
        trains = library_name() if self.trains(policy) else TORCH
        if self.idle:
            return f"{trains} in training passes"
        decodes = self.name(policy)
        return decodes if decodes == trains else f"{decodes} in rollouts, {trains} in training passes"

    def pack(self, policy: PolicyParts) -> PackedModel | None:
        """The packed weights for a request, or None if torch decodes it; UserError if only kernels are allowed."""
        packed, self.reason = self._unless_torch(policy, lambda: self._pack(policy))
        self.used = TORCH if packed is None else library_name()
        return packed

    def trains(self, policy: PolicyParts) -> bool:
        """Whether passes with gradients, and the scoring passes that must match them, use kernels; decided once."""
        # A model in shards cannot be compared.
        if self._leaves_to_torch(policy):
            return False
        if self._trains is None and policy.gathered is None and self._tested != _versions(policy):
            _, self.training_reason = self._unless_torch(policy, lambda: self._compare(policy))
        return bool(self._trains)

    def _leaves_to_torch(self, policy: PolicyParts) -> bool:
        return self.setting == "torch" or (self.setting == "auto" and policy.device.type != "cpu")

    def _unless_torch(self, policy: PolicyParts, prepare: Callable[[], Result]) -> tuple[Result | None, str | None]:
        """The result of `prepare`, or None with the reason; UserError if only kernels are allowed."""
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
        """Free the packed weights: a training pass needs the memory, and changes the weights."""
        self._kept = None

    def _pack(self, policy: PolicyParts) -> PackedModel:
        weights = read_weights(policy)  # not copied yet
        if self._agrees is None:
            test = f"decoding by {library_name()}"
            self._agrees = remembered(
                test, policy, lambda: _is_tolerated("logits are", largest_gap(policy, self._copy(policy, weights)))
            )
        if not self._agrees:
            self.release()
            raise UnavailableError("their log-probabilities differ from torch's on this model and machine")
        return self._copy(policy, weights)

    def _copy(self, policy: PolicyParts, weights: ModelWeights) -> PackedModel:
        """The packed weights: the last copy if nothing has changed them."""
        state = _state(policy)
        if self._kept is None or self._kept.state != state:
            self.release()  # before making the next copy
            self._kept = _Copy(PackedModel(weights), list(policy.model.parameters()), state)
        return self._kept.packed

    def _compare(self, policy: PolicyParts) -> None:
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
    """Whether gaps are within the tolerance; UnavailableError if they are NaN or infinite."""
    if not all(map(math.isfinite, gaps)):
        raise UnavailableError(f"the model's {what} NaN or infinite")
    return max(gaps) <= 1


def _versions(policy: PolicyParts) -> list[int]:
    """The number of changes of each weight, as torch counts them; 0 if it does not count them (inference mode)."""
    return [0 if weight.is_inference() else weight._version for weight in policy.model.parameters()]


def _state(policy: PolicyParts) -> list[Any]:
    """Everything that packed weights depend on: the set of weights, their changes, and the active adapters."""
    adapters = [each.adapter() for each in policy.model.modules() if isinstance(each, FastLayer)]
    scalings = [(id(each.down_RK), id(each.up_NR), each.scaling) for each in adapters if each is not None]
    weights = list(policy.model.parameters())
    # Some values of each weight: torch does not count changes by a fused optimizer or through `.data`.
    samples = [weight.detach().flatten()[:: max(1, weight.numel() // 64)].tolist() for weight in weights]
    return [list(map(id, weights)), _versions(policy), samples, scalings]


@torch.inference_mode()
def largest_gap(policy: PolicyParts, packed: PackedModel) -> float:
    """The largest difference in log-probabilities from torch, relative to the tolerance; NaN if any is NaN.

    Groups have uneven sizes. Completions consist of fixed tokens instead of samples; every slot decodes at every step.
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
    """The larger of the expected and the largest difference in log-probabilities, each divided by its tolerance."""
    logprobs_RV = theirs_RV.log_softmax(-1)
    gaps_RV = (logprobs_RV - ours_RV.log_softmax(-1)).abs()
    expected_R = (logprobs_RV.exp() * gaps_RV).sum(-1)
    return torch.maximum(expected_R.max() / TOLERANCE, gaps_RV.max() / LARGEST_TOLERANCE)
