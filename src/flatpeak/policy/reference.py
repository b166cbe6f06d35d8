"""The reference model of the KL terms (a frozen copy of the policy, or another model) and its resets."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from flatpeak.errors import UserError
from flatpeak.policy.config import ReferenceConfig
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import scoring


class Snapshot(Policy):
    """A frozen copy of a policy, including adapters, that can be updated in place.

    It shares the weights that training does not change: with adapters, the whole base is in memory only once. The copy
    of a sharded policy is whole and shares nothing; all ranks make and update it together.
    """

    def __init__(self, policy: Policy) -> None:
        self.trained = frozenset(name for name, weight in policy.model.named_parameters() if weight.requires_grad)
        """Names of the weights that training changes; the others always equal the policy's."""
        self.shares = policy.gathered is None
        """Whether it shares the other weights; a sharded policy has no permanent whole copy to share with."""
        frozen = (weight for weight in policy.model.parameters() if not weight.requires_grad)
        shared = {id(weight): weight for weight in frozen} if self.shares else {}
        with policy.whole() as whole, whole.plain_attention() as model:
            duplicate = copy.deepcopy(model, memo=shared)
        duplicate.requires_grad_(False)
        super().__init__(duplicate, policy.tokenizer, kernels=policy.kernels)

    def scoring(self) -> AbstractContextManager[None]:
        """A context for scoring; see Policy.scoring."""
        return scoring(self.model, trained=self.trained)

    def _own_weights(self) -> list[nn.Parameter]:
        """The copied weights; shared weights stay on the policy's device."""
        return [weight for name, weight in self.model.named_parameters() if not self.shares or name in self.trained]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that may differ from the policy's, not copied; tied weights once."""
        return self._movable(self.model)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values of such tensors into this model's tensors."""
        own = self.tensors()
        assert own.keys() == tensors.keys()
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def average(self, policy: Policy, averages: Mapping[str, Tensor], *, decay: float) -> dict[str, Tensor]:
        """decay * average + (1 - decay) * the policy's weights, in float32 at least, which this model rounds to."""
        with policy.whole() as whole:
            current = {name: tensor.detach().clone() for name, tensor in self._movable(whole.model).items()}
        mixed = {
            # A checkpoint's averages are on the CPU.
            name: _average(averages.get(name, own).to(own.device), current[name].to(own.device), decay=decay)
            for name, own in self.tensors().items()
        }
        self.load(mixed)
        return mixed

    def follow(self, policy: Policy) -> None:
        """Copy the current weights of the policy."""
        with policy.whole() as whole:
            self.load(self._movable(whole.model))

    def _movable(self, model: Any) -> dict[str, Tensor]:
        # Unsaved buffers, such as rotary tables, are derived values and not part of the state.
        saved = model.state_dict().keys()
        weights = {name: weight for name, weight in model.named_parameters() if name in self.trained}
        return weights | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _average(average: Tensor, value: Tensor, *, decay: float) -> Tensor:
    """The average's next value; a whole number, as in a buffer, is that of the policy."""
    if not average.is_floating_point():
        return value
    wide = torch.promote_types(average.dtype, torch.float32)
    return average.to(wide).lerp(value.to(wide), 1 - decay)


def snapshot(policy: Policy) -> Snapshot:
    """A frozen copy of the current policy."""
    return Snapshot(policy)


def renewed(reference: Policy, policy: Policy) -> Snapshot:
    """A frozen copy of the current policy, in the memory of the reference if that is such a copy too.

    Any other reference is replaced by a new copy: another model may differ in more than its weights, even with the same
    shapes. The copy is offloaded if the reference is.
    """
    if isinstance(reference, Snapshot):
        reference.follow(policy)
        return reference
    copied = Snapshot(policy)
    if reference.offloaded:
        copied.offload()
    return copied


class ReferenceResets:
    """The rule by which the reference moves: resets, or an average of the policy; and how often it has so far.

    The average (EMA) is kept in float32: in bfloat16 small steps would be lost. KL to a fixed reference keeps the
    policy near its start. After a reset the reference is the recent policy, so training can go any distance in small
    steps (ProRL, arXiv 2505.24864; arXiv 2602.18037).
    """

    def __init__(self, rule: ReferenceConfig) -> None:
        self.rule = rule
        self.count = 0
        self.averages: dict[str, Tensor] = {}
        """The average's tensors; empty without one, and before the first step."""

    def due(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether a step with these metrics ends with a reset."""
        every, bound = self.rule.reset_every, self.rule.reset_at_kl
        # A step without trained tokens has no KL.
        far = bound is not None and metrics.get("policy/kl_reference", 0.0) > bound
        return far or (every is not None and step % every == 0)

    def after_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        reference: Policy | None,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
    ) -> Policy | None:
        """The reference of the next step: the same, the current policy, or the average with it."""
        if self.rule.ema is not None:
            assert isinstance(reference, Snapshot)  # it begins as the policy
            self.averages = reference.average(policy, self.averages, decay=self.rule.ema)
            self.count += 1
        if not self.due(step, metrics):
            return reference
        assert reference is not None  # recipes with resets keep a reference
        self.count += 1
        if self.rule.reset_optimizer:
            optimizer.state.clear()
        return renewed(reference, policy)

    def metrics(self) -> dict[str, float]:
        """The number of resets, if the recipe has a rule for them."""
        return {"reference/resets": float(self.count)} if self.rule.resets else {}

    def tensors(self, reference: Policy | None) -> dict[str, Tensor]:
        """The reference for a checkpoint; empty before it first moves, because it is still the initial one."""
        if self.averages:
            return self.averages
        if not self.count or reference is None:
            return {}
        assert isinstance(reference, Snapshot)  # every reset makes one
        return reference.tensors()

    def load(
        self, count: int, tensors: Mapping[str, Tensor], *, reference: Policy | None, policy: Policy
    ) -> Policy | None:
        """Continue from a saved `count` and `tensors`; return the reference of that time."""
        if reference is None:  # a fork may drop KL, and a later fork may add it again
            return None
        self.count = count
        self.averages = dict(tensors) if self.rule.ema is not None else {}
        if not count:
            return reference
        snapshot = renewed(reference, policy)
        snapshot.load(dict(tensors))
        return snapshot


def check_reference(policy: Policy, reference: Policy) -> None:
    """Raise UserError for a reference that shares weights with the policy, or has another vocabulary."""
    policy_storages = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    if any(parameter.untyped_storage().data_ptr() in policy_storages for parameter in reference.model.parameters()):
        raise UserError(
            "the reference shares weights with the policy, so its KL is always 0, and freezing it freezes the "
            "policy: give a copy, or set reference.model to null"
        )
    sizes = [model.head.linear.weight.shape[0] for model in (policy, reference)]
    vocabularies = [_vocabulary(model.tokenizer) for model in (policy, reference)]
    if sizes[0] != sizes[1] or vocabularies[0] != vocabularies[1]:
        raise UserError(
            f"reference.model has another vocabulary ({sizes[1]} tokens; the policy has {sizes[0]}): "
            "KL needs a reference with the policy's tokenizer"
        )


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """Token ids by text; empty for a caller's tokenizer object that has no `get_vocab`."""
    return dict(tokenizer.get_vocab()) if hasattr(tokenizer, "get_vocab") else {}
