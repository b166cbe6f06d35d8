"""Whose log-probabilities the importance ratio and the KL terms compare a pass with.

In float32 they are the sampler's, and what the reference scored of the whole batch at once: both equal a training
pass's to about 1e-6. In a lower precision another way through the model rounds otherwise, and so does another cut of
the batch, by up to 0.1 nats a token, of which a narrow clip (GSPO's) and a division by a standard deviation of 0 would
make a signal. There, what is compared is computed in the same way: in the very cuts that an update trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from flatpeak.policy.policy import Policy
from flatpeak.rewards.calls import passes_power_of_ten
from flatpeak.training.learner import Learner
from flatpeak.types import Batch

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


class SamplerGaps:
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
