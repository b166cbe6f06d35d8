"""The learner with gradient regularization: the same update, its gradient computed in two passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatpeak import functional as F
from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.errors import UserError
from flatpeak.gradreg.config import GradientRegularizationConfig, RatioMode
from flatpeak.gradreg.gradients import backward
from flatpeak.gradreg.parameters import choose_parameters
from flatpeak.gradreg.regularizer import GradientRegularizer
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import gradients_of
from flatpeak.training.batch import take
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.learner import Learner, PolicyStatistics, weighted_sum
from flatpeak.training.objective import Objective, with_old_logprobs
from flatpeak.training.optimizer import split_prefix, with_prefix
from flatpeak.types import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstPass:
    """Results of a micro-batch's first pass that its second pass needs."""

    logprobs_T: Tensor
    coefficients_T: Tensor
    """d policy loss / d log-probability of each token, before weights."""
    capped_T: Tensor
    """bool: tokens whose ratio CISPO's cap had replaced."""


def record_first_pass(objective: Objective, logprobs_T: Tensor, batch: Batch) -> FirstPass:
    """Record a first pass, without another pass through the model."""
    leaf_T = logprobs_T.detach().requires_grad_()
    with torch.enable_grad():
        (coefficients_T,) = torch.autograd.grad(objective.policy_loss(leaf_T, batch).sum(), leaf_T)
    capped = objective.loss.with_curvature is not None
    return FirstPass(
        logprobs_T=leaf_T.detach(),
        coefficients_T=coefficients_T,
        capped_T=objective.clipped(leaf_T.detach(), batch) if capped else torch.zeros_like(leaf_T, dtype=torch.bool),
    )


def second_pass_loss(
    objective: Objective, first: FirstPass, logprobs_T: Tensor, entropy_T: Tensor, batch: Batch, *, mode: RatioMode
) -> Tensor:
    """The loss of every token in the second pass. KL and entropy terms are evaluated as they are written."""
    if mode == "importance_clipped" or (mode == "importance" and objective.loss.couples_tokens):
        loss_T = objective.policy_loss(logprobs_T, batch, curvature=True)
    else:
        loss_T = F.frozen_policy_loss(logprobs_T, first.coefficients_T)
        if mode == "importance":
            by_token = objective.config.ratio == "token"
            reweighted_T = F.reweighted_policy_loss(
                logprobs_T,
                first.logprobs_T,
                first.coefficients_T,
                sequence_T=None if by_token else batch.sequence_T,
                num_sequences=len(batch.lengths_N),
            )
            loss_T = torch.where(first.capped_T, loss_T, reweighted_T)
    others_T = objective.other_terms(logprobs_T, entropy_T, batch)
    return loss_T if others_T is None else loss_T + others_T


PREFIX = "gradreg."
"""Prefix of the regularizer's tensors in a checkpoint."""


class RegularizedLearner(Learner):
    """Descends L + strength / 2 * ||grad L||^2."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        optimizer: OptimizerConfig,
        config: GradientRegularizationConfig,
        *,
        temperature: float,
        micro_batch_tokens: int | None,
        notice: Callable[[str], None],
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(
            policy, objective, optimizer, temperature=temperature, micro_batch_tokens=micro_batch_tokens, ranks=ranks
        )
        self.regularizer = GradientRegularizer(
            policy.model,
            config,
            masters=policy.masters(),
            compute_dtype=policy.compute_dtype,
            seed=seed,
            notice=notice,
            average=ranks.average,
        )
        perturbed = set(self.regularizer.parameters)
        self.outside = [p for p in self.regularizer.trainable if p not in perturbed]
        self.twice_differentiable = config.difference == "exact"

    @property
    def penalized(self) -> Objective:
        """The loss whose gradient is penalized."""
        return self.objective if self.regularizer.config.kl_in_penalty else self.objective.without_regularizers()

    def divide(self, minibatch: Batch) -> tuple[Batch, ...]:
        """The groups with a penalty and, where `gradient_regularization.group_fraction` leaves any, the others."""
        chosen, rest, _ = split_groups(minibatch, self.regularizer.config.group_fraction, self.parallel.ranks)
        return (chosen,) if rest is None else (chosen, rest)

    def accumulate_gradients(self, *batches: Batch) -> PolicyStatistics:
        """Leave the gradient of loss and penalty in `.grad`, before any clipping."""
        statistics = PolicyStatistics()
        recorded: list[FirstPass] = []
        chosen, *others = batches if len(batches) > 1 else self.divide(*batches)
        rest = others[0] if others else None
        scale = 1.0 if rest is None else (count_groups(chosen) + count_groups(rest)) / count_groups(chosen)
        statistics.regularization = self.regularizer.accumulate(
            lambda: self.first_pass(chosen, statistics, recorded),
            again=lambda: self.second_pass(chosen, recorded),
            rest=None if rest is None else lambda: self.first_pass(rest, statistics, []),
            scale=scale,
            informative=bool(chosen.advantages_T.any()),
        )
        if self.penalized is not self.objective:
            for batch in (chosen, *others):
                backward(self.other_losses(batch, statistics))
        return self.joined(statistics)

    def first_pass(self, batch: Batch, statistics: PolicyStatistics, recorded: list[FirstPass]) -> Iterator[Tensor]:
        """The losses of the plain update; appends to `recorded` the results that the second pass needs."""
        for micro_batch, logprobs_T, entropy_T in self.forward(batch):
            micro_batch = with_old_logprobs(micro_batch, logprobs_T)
            loss_T, tokens = self.penalized(logprobs_T, entropy_T, micro_batch)
            recorded.append(record_first_pass(self.penalized, logprobs_T, micro_batch))
            loss = weighted_sum(loss_T, micro_batch)
            yield self.parallel.scale(loss)
            statistics.loss += float(loss.detach())
            statistics.tokens.append(tokens)

    def second_pass(self, batch: Batch, recorded: list[FirstPass]) -> Iterator[Tensor]:
        """The same function of the weights again, by the ratio mode."""
        config = self.regularizer.config
        # The output layer's gradient, which stays g1, is a good part of the second pass's cost.
        with gradients_of(self.outside, required=False):
            for (micro_batch, logprobs_T, entropy_T), first in zip(self.forward(batch), recorded, strict=True):
                micro_batch = with_old_logprobs(micro_batch, first.logprobs_T)
                loss_T = second_pass_loss(
                    self.penalized, first, logprobs_T, entropy_T, micro_batch, mode=config.ratio_mode
                )
                yield self.parallel.scale(weighted_sum(loss_T, micro_batch))

    def other_losses(self, batch: Batch, statistics: PolicyStatistics) -> Iterator[Tensor]:
        """The KL and entropy terms by themselves, where the penalty is to leave them out."""
        for micro_batch, logprobs_T, entropy_T in self.forward(batch):
            others_T = self.objective.other_terms(logprobs_T, entropy_T, with_old_logprobs(micro_batch, logprobs_T))
            if others_T is None:
                return
            loss = weighted_sum(others_T, micro_batch)
            yield self.parallel.scale(loss)
            statistics.loss += float(loss.detach())

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Undo passes whose gradient is computed again: their update is counted once."""
        super().rewind(state)
        self.regularizer.schedule.load(state)
        self.regularizer.guard.load(state)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the optimizer and of the regularizer."""
        return super().tensors() | with_prefix(PREFIX, self.regularizer.tensors())

    def state(self) -> dict[str, Any]:
        """The state of the regularizer, as JSON."""
        return self.regularizer.state()

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state` and `tensors`."""
        own, others = split_prefix(PREFIX, tensors)
        super().load(state, others)
        if state:  # a fork's run may have had no regularization
            self.regularizer.load(state, own)


def build_learner(
    policy: Policy,
    objective: Objective,
    optimizer: OptimizerConfig,
    regularization: GradientRegularizationConfig,
    *,
    temperature: float,
    micro_batch_tokens: int | None,
    notice: Callable[[str], None],
    seed: int = 0,
    ranks: Ranks = ALONE,
) -> Learner:
    """Build the learner, the plain one at strength 0, which only measures the gradient that would be penalized.

    `seed` is that of random directions.
    """
    shared: dict[str, Any] = {"temperature": temperature, "micro_batch_tokens": micro_batch_tokens, "ranks": ranks}
    if regularization.enabled:
        return RegularizedLearner(policy, objective, optimizer, regularization, notice=notice, seed=seed, **shared)
    measured = parameters_to_measure(policy.model, regularization)
    return Learner(policy, objective, optimizer, measured=measured, **shared)


def parameters_to_measure(model: nn.Module, config: GradientRegularizationConfig) -> list[nn.Parameter]:
    """The parameters that regularization would perturb; none where it would be refused: it is off, and no error."""
    try:
        return choose_parameters(model, config)
    except UserError:
        return []


def split_groups(batch: Batch, fraction: float, ranks: Ranks = ALONE) -> tuple[Batch, Batch | None, float]:
    """(some whole groups, the others, all groups per chosen one); drawn from torch's own generator.

    The first rank draws for all: dropout, and rewards that it alone computes, move the generators of ranks apart.
    """
    groups = torch.unique(batch.prompt_N)
    count = max(1, round(fraction * len(groups)))
    if count >= len(groups):
        return batch, None, 1.0
    order = torch.tensor(ranks.first(lambda: torch.randperm(len(groups)).tolist()), device=groups.device)
    chosen_N = torch.isin(batch.prompt_N, groups[order[:count]])
    return take(batch, chosen_N.nonzero()[:, 0]), take(batch, (~chosen_N).nonzero()[:, 0]), len(groups) / count


def count_groups(batch: Batch) -> int:
    """Number of groups with a completion in the batch."""
    return len(torch.unique(batch.prompt_N))
