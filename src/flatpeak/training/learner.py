"""One optimizer update from one minibatch, the same for supervised and reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flatpeak.gradreg.regularizer import Report
from flatpeak.policy.model import Policy
from flatpeak.rewards.calls import passes_power_of_ten
from flatpeak.training.batch import micro_batches
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.objective import Objective, TokenStatistics, with_old
from flatpeak.training.optimizer import (
    MasterWeights,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
    split_masters,
)
from flatpeak.types import Batch, PackedCompletions


@dataclass(kw_only=True, slots=True)
class UpdateStatistics:
    """What one update did, over all its micro-batches."""

    loss: float = 0.0
    grad_norm: float = 0.0
    skipped: bool = False
    """The gradient was not finite, so the weights were left as they were."""
    tokens: list[TokenStatistics] = field(default_factory=list)
    regularization: Report | None = None
    """What gradient regularization did, where it is on."""


class Learner:
    """Holds the optimizer; `update` accumulates a minibatch's gradient, clips it once and steps."""

    twice_differentiable = False
    """Whether passes can be differentiated twice; see Policy.token_logprobs."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        optimizer: OptimizerConfig,
        *,
        temperature: float,
        micro_batch_tokens: int | None,
    ) -> None:
        self.policy = policy
        self.objective = objective
        self.config = optimizer
        self.masters = MasterWeights(policy.masters())
        self.optimizer = build_optimizer(self.masters.stepped, optimizer)
        self.temperature = temperature
        self.micro_batch_tokens = token_budget(micro_batch_tokens, policy.device)
        self.updates = 0
        """Number of updates that have begun to change weights and optimizer."""
        self.updating = False
        """Whether an update is under way, or was left by an error."""

    def divide(self, minibatch: Batch) -> tuple[Batch, ...]:
        """The parts of a minibatch that an update cuts into micro-batches by themselves, in their order; here one.

        Not to be divided again: dividing may draw random numbers.
        """
        return (minibatch,)

    def update(self, *parts: Batch, rate: float) -> UpdateStatistics:
        """One step of the optimizer on a minibatch, whole or already divided.

        A gradient that is not finite changes nothing and is reported as skipped.
        """
        self.updating = True
        set_learning_rate(self.optimizer, rate)
        self.zero_grad()
        statistics = self.accumulate_gradients(*parts)
        self.masters.take_gradients()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.masters.stepped, self.config.max_grad_norm or float("inf"))
        statistics.grad_norm = float(grad_norm)
        statistics.skipped = not bool(torch.isfinite(grad_norm))
        if not statistics.skipped:
            self.updates += 1
            self.optimizer.step()
            self.masters.write()
        self.updating = False
        return statistics

    def zero_grad(self) -> None:
        """Forget all gradients, the weights' and the masters'."""
        self.optimizer.zero_grad()
        self.masters.zero_grad()

    def accumulate_gradients(self, *parts: Batch) -> UpdateStatistics:
        """Add the gradient of sum_i w_i sum_t loss_it to `.grad`, one micro-batch at a time."""
        statistics = UpdateStatistics()
        for part in parts:
            for loss in self.losses(part, statistics):
                loss.backward()
        return statistics

    def losses(self, minibatch: Batch, statistics: UpdateStatistics) -> Iterator[Tensor]:
        """The weighted loss of each micro-batch, to be backpropagated before the next is drawn."""
        for micro in self.micro_batches(minibatch):
            logprobs_T, entropy_T = self.token_logprobs(micro)
            loss_T, tokens = self.objective(logprobs_T, entropy_T, with_old(micro, logprobs_T))
            loss = weighted_sum(loss_T, micro)
            yield loss
            statistics.loss += float(loss.detach())
            statistics.tokens.append(tokens)

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """For every pass of an update. The plain model, which exact curvature goes through, pads."""
        padded = not self.policy.native or self.twice_differentiable
        return micro_batches(batch, self.micro_batch_tokens, padded=padded)

    def token_logprobs(self, micro: Batch) -> tuple[Tensor, Tensor]:
        """The policy's log-probabilities and entropies, the same way in every pass of an update."""
        return self.policy.token_logprobs(
            micro, temperature=self.temperature, twice_differentiable=self.twice_differentiable
        )

    def score(self, model: Policy, batch: PackedCompletions) -> Tensor:
        """The log-probabilities [T] that an update's passes over this batch would find with `model`, bit for bit."""
        return score(
            model,
            batch,
            temperature=self.temperature,
            micro_batch_tokens=self.micro_batch_tokens,
            twice_differentiable=self.twice_differentiable,
        )

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps in tensors."""
        return optimizer_tensors(self.optimizer) | self.masters.tensors()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides."""
        return {}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from a saved `state` and `tensors`."""
        masters, others = split_masters(tensors)
        self.masters.load(masters)
        # A fork may have left gradient regularization, whose tensors have names of their own.
        load_optimizer_tensors(self.optimizer, {name: t for name, t in others.items() if name[0].isdecimal()})


def token_budget(wanted: int | None, device: torch.device) -> int:
    """`training.micro_batch_tokens`, chosen by the device where the recipe leaves it open."""
    return wanted or (4096 if device.type == "cpu" else 16384)


def weighted_sum(loss_T: Tensor, batch: Batch) -> Tensor:
    """sum_i w_i sum_t loss_it."""
    return (loss_T * batch.weights_N.index_select(0, batch.sequence_T)).sum()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Dropout's random numbers as a function of the step, so that a resumed run draws the same; the caller's stay."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def score(
    policy: Policy,
    batch: PackedCompletions,
    *,
    temperature: float,
    micro_batch_tokens: int,
    twice_differentiable: bool = False,
) -> Tensor:
    """A model's log-probabilities of a whole batch, float32 [T], one micro-batch at a time and detached."""
    pieces, padded = [], twice_differentiable or not policy.native
    for micro in micro_batches(batch, micro_batch_tokens, padded=padded):
        with policy.scoring():
            logprobs_T, _ = policy.token_logprobs(
                micro, temperature=temperature, twice_differentiable=twice_differentiable
            )
        pieces.append(logprobs_T.detach())
    return torch.cat(pieces) if pieces else torch.zeros(0, device=batch.tokens_T.device)


GAP_BOUND = 0.1
"""Nats per token: a mean distance of sampler and trainer above it is no rounding."""


def trainer_is_old(policy: Policy) -> bool:
    """Whether the old log-probabilities are the trainer's own rather than the sampler's; decided here and nowhere else.

    Whoever adds samplers that are not the trainer's own weights (another engine, another machine) says so here.
    """
    return policy.below_float32


def with_comparisons(
    learner: Learner, minibatches: Iterable[Batch], *, reference: Policy | None
) -> Iterator[tuple[Batch, ...]]:
    """The step's minibatches of all epochs, each in the parts that an update takes, with old and reference log-probs.

    Where the trainer's own are the old ones, those of the first minibatch are left to the update itself, whose pass
    finds them for nothing; all others are computed before the first is given away, while no weight has changed.
    """
    if not trainer_is_old(learner.policy):
        yield from map(learner.divide, minibatches)
        return
    divided = [learner.divide(minibatch) for minibatch in minibatches]
    yield from [
        tuple(_scored(learner, part, reference=reference, first=index == 0) for part in parts)
        for index, parts in enumerate(divided)
    ]


def _scored(learner: Learner, part: Batch, *, reference: Policy | None, first: bool) -> Batch:
    return replace(
        part,
        old_logprobs_T=None if first else learner.score(learner.policy, part),
        reference_logprobs_T=None if reference is None else learner.score(reference, part),
    )


class LogprobGapMonitor:
    """Tells of steps in which the sampler's log-probabilities are not the trainer's, rounding aside."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.count = 0
        self._notice = notice

    def see(self, metrics: Mapping[str, float]) -> None:
        """Count the step if it is one; the first is told of, and then the 10th, the 100th, ..."""
        gap = metrics.get("rollout/logprob_gap_mean", 0.0)
        if not gap > GAP_BOUND:  # or is not a number
            return
        self.count += 1
        if passes_power_of_ten(self.count - 1, self.count):
            steps = "1 step" if self.count == 1 else f"{self.count} steps"
            self._notice(
                f"in {steps} so far the sampler's log-probabilities were more than {GAP_BOUND} nats per token from the "
                f"trainer's before any update (now {gap:.3g} on average): the sampler has other weights, another "
                "temperature, or log-probabilities after top-p or top-k, or model.dropout is on; in float32 every "
                "importance ratio is off by as much, below it completions count as the policy's own"
            )
