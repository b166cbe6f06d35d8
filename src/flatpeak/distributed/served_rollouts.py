"""Rollouts of several ranks by servers: only the first rank asks them, and sends the completions to all ranks.

Servers have one set of weights, and one client balances their load and tracks which are unreachable; so requests,
random numbers and the handling of failures are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from flatpeak.distributed.ranks import Ranks
from flatpeak.protocols import Sampler, WrappedSampler
from flatpeak.types import Completion, Group, Prompt, SamplingParams

Drawn = list[tuple[tuple[Completion, ...], int | None]]
"""The completions of each prompt, and the version of the policy that drew them."""


class ServedSampler(WrappedSampler):
    """A sampler of the first rank that draws for all ranks; only that rank has its metrics and its state."""

    def __init__(
        self,
        sampler: Sampler,
        ranks: Ranks,
        *,
        weights: Callable[[], AbstractContextManager[object]],
        draws_ahead: bool = False,
    ) -> None:
        """`sampler` is the first rank's; the other ranks have one that does nothing. `weights` is a context with the
        whole policy, which all ranks enter."""
        super().__init__(sampler)
        self.ranks = ranks
        self.weights = weights
        self.draws_ahead = draws_ahead

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order; an error of the first rank's sampler is raised on every rank."""

        def draw() -> Drawn:
            groups = self.sampler.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
            return [(group.completions, group.version) for group in groups]

        with self.weights():
            drawn = self.ranks.first(draw)
        return [
            Group(prompt=prompt, completions=completions, version=version)
            for prompt, (completions, version) in zip(prompts, drawn, strict=True)
        ]

    @contextmanager
    def ahead(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[None]:
        """A context in which the first rank draws a later request with the policy as it was on entry.

        The policy is whole only on entry, when servers get its weights.
        """
        with ExitStack() as drawing:

            def begin() -> None:
                drawing.enter_context(self.sampler.ahead(prompts, group_size=group_size, sampling=sampling, seed=seed))

            if self.draws_ahead:
                with self.weights():
                    self.ranks.first(begin)
            yield
