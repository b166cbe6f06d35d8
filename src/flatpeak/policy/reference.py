"""The reference model of the KL terms, a frozen copy of the policy or another model, and its resets."""

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
    """A frozen copy of a policy, adapters included, that can be updated in place.

    It shares the weights that training does not change: under adapters the whole base is in memory only once. The copy
    of a sharded policy is whole, shares nothing, and all ranks make and update it together.
    """

    def __init__(self, policy: Policy) -> None:
        self.trained = frozenset(name for name, weight in policy.model.named_parameters() if weight.requires_grad)
        """Names of the weights that training changes; all others always equal the policy's."""
        self.shares = policy.gathered is None
        """Whether it shares the other weights; the whole copy of a sharded policy exists only for a while."""
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
        """The copied weights; shared weights stay where the policy needs them."""
        return [weight for name, weight in self.model.named_parameters() if not self.shares or name in self.trained]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that may differ from the policy's, tied weights once; not copied."""
        return self._movable(self.model)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values of such tensors into this model's."""
        own = self.tensors()
        assert own.keys() == tensors.keys()
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def follow(self, policy: Policy) -> None:
        """Copy the current weights of the policy that this is a copy of."""
        with policy.whole() as whole:
            self.load(self._movable(whole.model))

    def _movable(self, model: Any) -> dict[str, Tensor]:
        # Buffers that a model does not save, such as rotary tables, are derived and not part of its state.
        saved = model.state_dict().keys()
        weights = {name: weight for name, weight in model.named_parameters() if name in self.trained}
        return weights | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def snapshot(policy: Policy) -> Snapshot:
    """A frozen copy of the current policy."""
    return Snapshot(policy)


def renewed(reference: Policy, policy: Policy) -> Snapshot:
    """A frozen copy of the current policy, in the memory of the reference if that is such a copy too.

    Otherwise it is a new copy: another model may differ in more than its weights, even if they have the same shapes. It
    is offloaded if the reference is.
    """
    if isinstance(reference, Snapshot):
        reference.follow(policy)
        return reference
    copied = Snapshot(policy)
    if reference.offloaded:
        copied.offload()
    return copied


class ReferenceResets:
    """The rule by which the reference is reset, and how often it was.

    KL to a fixed reference holds the policy near its start for good. After a reset it is the recent policy, so that
    training can go any distance, in steps that stay small (ProRL, arXiv 2505.24864; arXiv 2602.18037).
    """

    def __init__(self, rule: ReferenceConfig) -> None:
        self.rule = rule
        self.count = 0

    def due(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether a step with these metrics ends with a reset."""
        every, bound = self.rule.reset_every, self.rule.reset_at_kl
        # A step that trained on no token has measured no KL.
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
        """The reference of the next step: the same, or the policy as it is now."""
        if not self.due(step, metrics):
            return reference
        assert reference is not None  # a recipe with resets keeps a reference
        self.count += 1
        if self.rule.reset_optimizer:
            optimizer.state.clear()
        return renewed(reference, policy)

    def metrics(self) -> dict[str, float]:
        """The resets so far, where there is a rule for them."""
        return {"reference/resets": float(self.count)} if self.rule.resets else {}

    def tensors(self, reference: Policy | None) -> dict[str, Tensor]:
        """The reference for a checkpoint; nothing before the first reset, as it is still that of the beginning."""
        if not self.count or reference is None:
            return {}
        assert isinstance(reference, Snapshot)  # as every reset leaves it
        return reference.tensors()

    def load(
        self, count: int, tensors: Mapping[str, Tensor], *, reference: Policy | None, policy: Policy
    ) -> Policy | None:
        """Continue from a saved `count` and `tensors`; returns the reference of that time."""
        if reference is None:  # a fork may have left KL behind, and another may take it up again
            return None
        self.count = count
        if not count:
            return reference
        snapshot = renewed(reference, policy)
        snapshot.load(dict(tensors))
        return snapshot


def check_reference(policy: Policy, reference: Policy) -> None:
    """Raise a UserError for a reference that shares weights with the policy, or has another vocabulary."""
    policy_storages = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    if any(parameter.untyped_storage().data_ptr() in policy_storages for parameter in reference.model.parameters()):
        raise UserError(
            "the reference shares weights with the policy, so KL to it is always 0 and freezing it freezes the "
            "policy: give a copy, or leave reference.model null"
        )
    sizes = [model.head.linear.weight.shape[0] for model in (policy, reference)]
    vocabularies = [_vocabulary(model.tokenizer) for model in (policy, reference)]
    if sizes[0] != sizes[1] or vocabularies[0] != vocabularies[1]:
        raise UserError(
            f"reference.model has another vocabulary ({sizes[1]} tokens, the policy {sizes[0]}): "
            "KL needs a reference with the policy's tokenizer"
        )


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """Token ids by text; empty for a caller's tokenizer object that has no `get_vocab`."""
    return dict(tokenizer.get_vocab()) if hasattr(tokenizer, "get_vocab") else {}
