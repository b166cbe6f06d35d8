"""One optimizer update from one minibatch, the same for supervised and reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.errors import RunError
from flatpeak.functional.exact_kl import ExactKL
from flatpeak.gradreg.guard import Report
from flatpeak.gradreg.shards import full_tensor
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import marked_layers
from flatpeak.protocols import SavesModel
from flatpeak.training.batch import (
    UNDIVIDED,
    DataParallel,
    at_trained_tokens,
    count_micro_batches,
    micro_batches,
    on_trained_tokens,
)
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.objective import Objective, TokenStatistics, with_old_logprobs
from flatpeak.training.optimizer import BaseLearner, UpdateStatistics
from flatpeak.types import Batch, PackedCompletions
from flatpeak.utils.out_of_memory import MemoryBound
from flatpeak.utils.peak_memory import PeakMemory

MICRO_BATCH_TOKENS = "training.micro_batch_tokens"
"""The setting that bounds the tokens in memory at once."""
ABSURD_GAP = 1.0
"""Nats per token: another dtype or an older version is far below, another template or model above."""
JUDGED_TOKENS = 16
"""The fewest tokens of an update by which a sampler is judged: of fewer, one that is unlikely decides the mean."""


@dataclass(kw_only=True, slots=True)
class PolicyStatistics(UpdateStatistics):
    """Statistics of one update of a policy."""

    tokens: list[TokenStatistics] = field(default_factory=list)
    """Sums over the tokens of each micro-batch."""
    regularization: Report | None = None
    """Report of gradient regularization, where it is on."""
    g1_norm: float | None = None
    """The gradient's norm over the parameters that regularization would perturb, before clipping, where it is off."""


class Learner(BaseLearner[Batch, PolicyStatistics]):
    """Trains a policy on minibatches of completions, by the objective's loss."""

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
        measured: Sequence[nn.Parameter] = (),
        ranks: Ranks = ALONE,
        undivided_work: float = 0.0,
    ) -> None:
        """Build the optimizer. `measured` are the parameters whose gradient's norm is reported by itself.

        `undivided_work`: the floating-point operations of an update, 6 per weight and token, up to which the ranks do
        not divide it.
        """
        super().__init__(policy.masters(), optimizer, compute_dtype=policy.compute_dtype)
        weights = sum(weight.numel() for weight in policy.model.parameters())
        self.parallel = DataParallel(ranks=ranks, undivided_tokens=undivided_work / (6 * weights))
        self.policy = policy
        self.layers = marked_layers(policy.model)
        self.objective = objective
        self.reference: Policy | None = None
        """The reference of the KL terms as it is now; None: there is none."""
        self.measured = measured
        self.temperature = temperature
        self.bound = MemoryBound(MICRO_BATCH_TOKENS, token_budget(micro_batch_tokens, policy.device))
        self.memory = PeakMemory(policy.device)
        """The peak of memory in each phase of a step."""

    @property
    def scored_reference(self) -> Policy | None:
        """The reference, where a step scores it once: an exact KL needs its output in each pass of an update."""
        return None if self.objective.kl.estimator == "exact" else self.reference

    @property
    def computed_by(self) -> dict[str, Any]:
        """Whether the policy is trained packed rather than padded, and the kernels of its passes."""
        return {"native": self.policy.native, "kernels": self.policy.computed_with}

    def save_model(self, directory: Path) -> None:
        """Write the policy's model and tokenizer in Hugging Face format."""
        self.policy.save(directory)

    @contextmanager
    def whole(self) -> Iterator[SavesModel]:
        """A context with the means to save the policy; see BaseLearner.whole."""
        with self.policy.whole() as policy:
            yield policy.save

    def divide(self, minibatch: Batch) -> tuple[Batch, ...]:
        """The subsets of a minibatch that an update cuts into micro-batches by themselves, in their order; here one.

        Not to be divided again: dividing may draw random numbers.
        """
        return (minibatch,)

    def accumulate_gradients(self, *batches: Batch) -> PolicyStatistics:
        """Add the gradient of sum_i w_i sum_t loss_it to `.grad`, one micro-batch at a time."""
        statistics = PolicyStatistics()
        for batch in batches:
            for loss in self.losses(batch, statistics):
                loss.backward()
        if self.measured:
            grads = [p.grad for p in self.measured if p.grad is not None]
            statistics.g1_norm = float(full_tensor(torch.nn.utils.get_total_norm(grads)))
        return self.joined(statistics)

    def joined(self, statistics: PolicyStatistics) -> PolicyStatistics:
        """An update's statistics over all ranks."""
        statistics.loss, statistics.tokens = self.parallel.joined(statistics.loss, statistics.tokens)
        return statistics

    def losses(self, minibatch: Batch, statistics: PolicyStatistics) -> Iterator[Tensor]:
        """The weighted loss of each micro-batch, to be backpropagated before the next is drawn."""
        for micro_batch, logprobs_T, entropy_T in self.forward(minibatch):
            loss_T, tokens = self.objective(logprobs_T, entropy_T, with_old_logprobs(micro_batch, logprobs_T))
            loss = weighted_sum(loss_T, micro_batch)
            yield self.parallel.scale(loss)
            statistics.loss += float(loss.detach())
            statistics.tokens.append(tokens)

    def update(self, *batches: Batch, rate: float) -> PolicyStatistics:
        """Step the optimizer once, with the gradient of all the batches of a minibatch together."""
        return super().update(*self.weighted(*batches), rate=rate)

    def weighted(self, *batches: Batch) -> tuple[Batch, ...]:
        """The batches of a minibatch with the weights of their tokens, where the objective has some.

        One more pass measures all of them as the minibatch begins, on all ranks together: no cut into micro-batches and
        no division among ranks changes the weights.
        """
        if not self.objective.weighs_minibatches:
            return batches
        scored = [on_trained_tokens(batch, *self.measure(self.policy, batch)) for batch in batches]
        weights = self.objective.minibatch_weights(
            scored, seed=lambda: self.parallel.ranks.first(lambda: int(torch.randint(2**62, ())))
        )
        counts, penalty_T = [len(logprobs_T) for _, logprobs_T, _ in scored], weights.penalty_T
        policy = weights.policy_T.split(counts)
        penalties = [None] * len(counts) if penalty_T is None else penalty_T.split(counts)
        return tuple(
            replace(
                batch,
                policy_weights_T=at_trained_tokens(batch, policy_T),
                penalty_weights_T=None if penalty is None else at_trained_tokens(batch, penalty),
            )
            for batch, policy_T, penalty in zip(batches, policy, penalties, strict=True)
        )

    def check(self, statistics: PolicyStatistics) -> None:
        """Raise RunError where a correction is asked of a sampler that is another model altogether."""
        if not self.objective.corrects_sampler:
            return
        gap = sum(float(each.sampler.gap) for each in statistics.tokens if each.sampler is not None)
        count = sum(each.tokens for each in statistics.tokens)
        if count >= JUDGED_TOKENS and (mean := gap / count) > ABSURD_GAP:
            raise RunError(
                f"the sampler's log-probabilities are {mean:.3g} nats per token from the trainer's on average, more "
                f"than the {ABSURD_GAP:g} up to which objective.sampler_correction can weigh what it draws: give it "
                "the same prompt template, the same weights and dtype and the same temperature, and let it return "
                "log-probabilities over the whole vocabulary at that temperature"
            )

    def clip_gradients(self, *batches: Batch) -> Tensor:
        """Clip the gradient of an update, once; its norm before that.

        Of an update that the first rank has computed by itself the gradient is gathered: the norm of a whole tensor has
        other last digits than one of its shards, and SFT would go another way than in one process.
        """
        if not all(map(self.parallel.is_undivided, batches)):
            return super().clip_gradients(*batches)
        weights = [weight for weight in self.masters.weights if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm([full_tensor(cast(Tensor, weight.grad)) for weight in weights])
        torch.nn.utils.clip_grads_with_norm_(weights, self.largest_norm, norm)
        return norm

    def micro_batch_count(self, tokens: int, *batches: Batch) -> int:
        """The number of micro-batches of an update, for micro-batches of at most so many tokens."""
        return sum(
            count_micro_batches(batch, tokens, padded=pads(self.policy, self.twice_differentiable)) for batch in batches
        )

    def forward(self, batch: Batch) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Each micro-batch's trained tokens with the policy's log-probabilities and entropies, alike in every pass.

        Gradients are averaged over the ranks after the last one's backward pass. The plain model, which exact curvature
        goes through, pads.
        """
        padded = pads(self.policy, self.twice_differentiable)
        for micro_batch in micro_batches(batch, self.micro_batch_tokens, padded=padded, parallel=self.parallel):
            self.before_pass()
            yield on_trained_tokens(*self._outputs(micro_batch))
        self.parallel.average_gradients(self.policy.parameters())

    def _outputs(self, batch: Batch) -> tuple[Batch, Tensor, Tensor]:
        """The batch, the log-probabilities and the entropies; the batch with the exact KL, where the loss has that."""
        settings: dict[str, Any] = {"temperature": self.temperature, "twice_differentiable": self.twice_differentiable}
        if self.reference is None or self.scored_reference is not None:
            return batch, *self.policy.token_logprobs(batch, **settings)
        with self.reference.on_device(), self.reference.scoring():
            scores = self.reference.read(batch, lambda outputs: outputs.scores(), **settings)
        kl = ExactKL(reference=scores, top_k=self.objective.kl.top_k)
        scored, kl_T = self.policy.read(batch, lambda outputs: (outputs.logprobs(), outputs.kl(kl)), **settings)
        return replace(batch, kl_T=kl_T), *scored

    def score(self, model: Policy, batch: PackedCompletions) -> Tensor:
        """The log-probabilities [T] that an update's passes over this batch would compute with `model`, bit for bit."""
        return self.measure(model, batch)[0]

    def measure(self, model: Policy, batch: PackedCompletions) -> tuple[Tensor, Tensor]:
        """The log-probabilities [T] of `score` and the entropies [T]."""
        phase = "update" if model is self.policy else "reference"
        padded = pads(model, self.twice_differentiable)
        for attempt in self.bound.attempts(lambda tokens: count_micro_batches(batch, tokens, padded=padded)):
            with attempt, self.memory.phase(phase), self.checked_layers():
                measured = measure(
                    model,
                    batch,
                    temperature=self.temperature,
                    micro_batch_tokens=self.micro_batch_tokens,
                    twice_differentiable=self.twice_differentiable,
                    parallel=self.parallel,
                    before_pass=self.before_pass,
                )
        return measured


def token_budget(wanted: int | None, device: torch.device) -> int:
    """`training.micro_batch_tokens`, chosen by the device where the recipe leaves it open."""
    return wanted or (4096 if device.type == "cpu" else 16384)


def pads(policy: Policy, twice_differentiable: bool) -> bool:
    """Whether a model's passes pad their micro-batches: without a native engine, and for exact curvature."""
    return twice_differentiable or not policy.native


def weighted_sum(loss_T: Tensor, batch: Batch) -> Tensor:
    """sum_i w_i sum_t loss_it."""
    return (loss_T * batch.weights_N.index_select(0, batch.sequence_T)).sum()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Dropout's random numbers as a function of the step, so that a resumed run draws the same; the caller's stay."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def score(policy: Policy, batch: PackedCompletions, **settings: Any) -> Tensor:
    """The log-probabilities of `measure`."""
    return measure(policy, batch, **settings)[0]


def measure(
    policy: Policy,
    batch: PackedCompletions,
    *,
    temperature: float,
    micro_batch_tokens: int,
    twice_differentiable: bool = False,
    parallel: DataParallel = UNDIVIDED,
    before_pass: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """A model's log-probabilities and entropies of a batch, float32 [T], one micro-batch at a time and detached."""
    scores, padded = list[tuple[Tensor, Tensor]](), pads(policy, twice_differentiable)
    with policy.on_device():
        for micro_batch in micro_batches(batch, micro_batch_tokens, padded=padded, parallel=parallel):
            before_pass()
            with policy.scoring():
                logprobs_T, entropy_T = policy.token_logprobs(
                    micro_batch, temperature=temperature, twice_differentiable=twice_differentiable
                )
            scores.append((logprobs_T.detach(), entropy_T.detach()))
    none = torch.zeros(0, device=batch.tokens_T.device)
    logprobs, entropies = zip(*scores, strict=True) if scores else ((none,), (none,))
    return parallel.in_order(batch, torch.cat(logprobs)), parallel.in_order(batch, torch.cat(entropies))


def uses_trainer_logprobs(learner: Learner) -> bool:
    """Whether the old log-probabilities are the trainer's own rather than the sampler's; decided here and nowhere else.

    A correction of the sampler weighs by the distance of the two, so that the ratio has to be without it.
    """
    return learner.policy.below_float32 or learner.objective.corrects_sampler


def score_minibatches(learner: Learner, minibatches: Iterable[Batch]) -> list[tuple[Batch, ...]]:
    """The step's minibatches of all epochs, each in the subsets that an update takes, with old and reference log-probs.

    The old ones are the trainer's own. Those of the first minibatch are left to the update itself, whose pass computes
    them anyway; all others are computed here, while no weight has changed.
    """
    divided, reference = [learner.divide(minibatch) for minibatch in minibatches], learner.scored_reference
    with nullcontext() if reference is None else reference.on_device():  # once for all of them
        return [
            tuple(_scored(learner, batch, reference=reference, first=index == 0) for batch in batches)
            for index, batches in enumerate(divided)
        ]


def _scored(learner: Learner, batch: Batch, *, reference: Policy | None, first: bool) -> Batch:
    return replace(
        batch,
        old_logprobs_T=None if first else learner.score(learner.policy, batch),
        reference_logprobs_T=None if reference is None else learner.score(reference, batch),
    )
