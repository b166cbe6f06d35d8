"""Rollouts of several ranks: each samples a share of the groups, the first grades, and all ranks get all results.

Multiple-choice evaluations that rank letters are divided in the same way. The first rank asks servers for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeVar

from flatpeak.distributed.ranks import Ranks
from flatpeak.errors import UserError
from flatpeak.protocols import Sampler, WrappedSampler
from flatpeak.rewards.base import GradingBudget
from flatpeak.rewards.checked_calls import Failures
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.rewards.workers.grading import Grading
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams, Scores

Result = TypeVar("Result")
Weights = Callable[[], AbstractContextManager[object]]
"""Returns a context with the weights for sampling, which all ranks enter."""
STATES: Final = "ranks"
"""Key in a checkpoint for the states of a caller's sampler, one per rank."""


def checked_sampler_state(state: Mapping[str, Any], ranks: Ranks) -> Mapping[str, Any]:
    """A checkpoint's sampler state; UserError if it has states of a caller's sampler for another number of ranks."""
    saved = len(state[STATES]) if STATES in state else ranks.size
    if saved != ranks.size:
        raise UserError(
            f"the checkpoint has the states of the caller's sampler in {saved} processes, but this run has "
            f"{ranks.size}: resume it with {saved}"
        )
    return state


def divided(
    compute: Callable[[Sequence[Prompt]], list[Result]],
    prompts: Sequence[Prompt],
    *,
    ranks: Ranks,
    weights: Weights = nullcontext,
) -> list[Result]:
    """The results of all prompts in order; rank p % (number of ranks) computes the result of prompt p."""
    share = prompts[ranks.rank :: ranks.size]
    with weights(), ranks.together():
        # Callers' samplers need not support requests without prompts, which a single process never makes.
        own = compute(share) if share else []
    parts = ranks.gather(own)
    return [parts[p % ranks.size][p // ranks.size] for p in range(len(prompts))]


class SharedSampler(WrappedSampler):
    """A sampler whose requests are divided among the ranks.

    The random numbers of a completion depend on the seed, its prompt's id and its index in the group, so every rank
    would draw the same completion.
    """

    def __init__(self, sampler: Sampler, ranks: Ranks, *, weights: Weights = nullcontext) -> None:
        super().__init__(sampler)
        self.ranks = ranks
        self.weights = weights

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order; each rank draws its share."""

        def draw(share: Sequence[Prompt]) -> list[tuple[Prompt, tuple[Completion, ...]]]:
            groups = self.sampler.generate(share, group_size=group_size, sampling=sampling, seed=seed)
            return [(group.prompt, group.completions) for group in groups]  # an environment may word the prompt

        drawn = divided(draw, prompts, ranks=self.ranks, weights=self.weights)
        groups = [Group(prompt=prompt, completions=completions) for prompt, completions in drawn]
        self.sampler.observe(groups)
        return groups

    def state(self) -> Mapping[str, Any]:
        """The state of the sampler; for a caller's sampler the states of all ranks, which have different prompts."""
        own = self.sampler.state()
        if self.sampler.alike:
            return own
        states = self.ranks.gather(dict(own))
        return {STATES: states} if any(states) else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state: this rank's, if it has states of all ranks."""
        self.sampler.load(state[STATES][self.ranks.rank] if STATES in state else state)


class ServedSampler(WrappedSampler):
    """A sampler of the first rank that draws for all ranks; only the first has metrics and a state."""

    def __init__(self, sampler: Sampler, ranks: Ranks, *, weights: Weights, draws_ahead: bool = False) -> None:
        """`sampler` is the first rank's; other ranks have one that does nothing."""
        super().__init__(sampler)
        self.ranks = ranks
        self.weights = weights
        self.draws_ahead = draws_ahead

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order; all ranks raise an error of the first rank's sampler."""

        with self.weights():
            groups: list[Group] = self.ranks.first(
                lambda: self.sampler.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
            )
        return groups

    @contextmanager
    def ahead(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[None]:
        """A context in which the first rank draws a later request with the policy as it was on entry.

        The policy is whole only on entry, when the servers get its weights.
        """
        with ExitStack() as drawing:
            if self.draws_ahead:
                later = self.sampler.ahead(prompts, group_size=group_size, sampling=sampling, seed=seed)
                with self.weights():
                    self.ranks.first(lambda: drawing.enter_context(later))
            yield


class SharedReward(RewardSet):
    """A reward set that only the first rank calls, with its processes, budgets and judges; all ranks get the scores."""

    delegates = True

    def __init__(self, reward: RewardSet, ranks: Ranks) -> None:
        super().__init__([])
        self._own = reward
        self._ranks = ranks
        self._failed: dict[str, Failures] = {}

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each component."""
        return self._own.weights

    @property
    def judges(self) -> list[str]:
        """The names of the components that are judges."""
        return self._own.judges

    def is_function(self, name: str) -> bool:
        """Whether the component of that name is a user's function."""
        return self._own.is_function(name)

    @property
    def failures(self) -> dict[str, Failures]:
        """The failures of each component so far."""
        return self._failed

    def step_budget(self) -> GradingBudget | None:
        """The seconds that a training step may lose to answers without a verdict."""
        return self._own.step_budget()

    def grading(self) -> Grading | None:
        """None: groups are graded after all ranks have sampled."""
        return None

    def finish(
        self, groups: Sequence[Group], grading: Grading | None, *, budget: GradingBudget | None = None
    ) -> Scores:
        """The scores of a call."""

        def score() -> tuple[Scores, dict[str, Failures]]:
            return self._own(groups, budget=budget), self._own.failures

        scores, self._failed = self._ranks.first(score)
        return scores

    def prepare(self, examples: Sequence[Example]) -> None:
        """Let components check themselves; only the first rank calls it, before it creates the run directory."""
        self._own.prepare(examples)

    def check(self) -> None:
        """Let components check themselves again."""
        self._ranks.first(self._own.check)

    def attach(
        self, directory: Path, *, stopping: Callable[[], bool], at_once: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Let the first rank's components write into a run directory."""
        if self._ranks.is_first:
            self._own.attach(directory, stopping=stopping, at_once=at_once)

    def measured(self, scores: Scores) -> dict[str, float]:
        """The components' metrics since the last call."""
        return self._ranks.first(lambda: self._own.measured(scores))

    def answer(self, name: str, completion: Completion, prompt: Prompt) -> str | None:
        """The answer that a component extracts from a completion."""
        return self._own.answer(name, completion, prompt)

    def close(self) -> None:
        """Release the components' processes and connections."""
        self._own.close()
