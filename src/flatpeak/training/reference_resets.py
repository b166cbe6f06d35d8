"""Reference resets: now and then the policy replaces the model that KL is measured against."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flatpeak.policy.config import ReferenceConfig
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import Snapshot, renewed
from flatpeak.training.learner import Learner
from flatpeak.training.optimizer import with_prefix

PREFIX = "reference."
"""Prefix of the reference's tensors in a checkpoint."""


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
        self, step: int, metrics: Mapping[str, float], *, reference: Policy | None, learner: Learner
    ) -> Policy | None:
        """The reference of the next step: the same, or the policy as it is now."""
        if not self.due(step, metrics):
            return reference
        assert reference is not None  # a recipe with resets keeps a reference
        self.count += 1
        if self.rule.reset_optimizer:
            learner.optimizer.state.clear()
        return renewed(reference, learner.policy)

    def metrics(self) -> dict[str, float]:
        """The resets so far, where there is a rule for them."""
        return {"reference/resets": float(self.count)} if self.rule.resets else {}

    def tensors(self, reference: Policy | None) -> dict[str, Tensor]:
        """The reference for a checkpoint; nothing before the first reset, as it is still that of the beginning."""
        if not self.count or reference is None:
            return {}
        assert isinstance(reference, Snapshot)  # as every reset leaves it
        return with_prefix(PREFIX, reference.tensors())

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
