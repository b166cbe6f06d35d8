"""Rollouts of several ranks by servers: the first rank alone asks them, and all ranks learn the completions.

Servers have one set of weights, and one client balances their load and knows which of them are away; so the requests,
their random numbers and what follows a failure are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from flatpeak.distributed.ranks import Ranks
from flatpeak.protocols import AheadSampler, MeasuredSampler, Sampler
from flatpeak.types import Completion, Group, Prompt, SamplingParams

Own = TypeVar("Own", bound=Sampler)
Drawn = list[tuple[tuple[Completion, ...], int | None]]
"""The completions of each prompt, and the version of the policy that drew them."""


class ServedSampler(Generic[Own]):
    """A sampler that the first rank has, and that draws for all ranks."""

    def __init__(self, own: Own | None, ranks: Ranks, *, weights: Callable[[], AbstractContextManager[object]]) -> None:
        """`own` is the first rank's sampler, None on the others; `weights` a context with the policy whole, which all
        ranks enter."""
        self.own = own
        self.ranks = ranks
        self.weights = weights

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order; an error of the first rank's sampler is raised on every rank."""

        def draw() -> Drawn:
            assert self.own is not None
            groups = self.own.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
            return [(group.completions, group.version) for group in groups]

        with self.weights():
            drawn = self.ranks.first(draw)
        return [
            Group(prompt=prompt, completions=completions, version=version)
            for prompt, (completions, version) in zip(prompts, drawn, strict=True)
        ]

    def measured(self) -> Mapping[str, float]:
        """The metrics of the first rank's sampler, on that rank: a step's metrics are its own."""
        return self.own.measured() if isinstance(self.own, MeasuredSampler) else {}


class ServedAheadSampler(ServedSampler[AheadSampler]):
    """The same with a sampler that draws ahead: on the first rank, beside the updates that all ranks make."""

    def use_version(self, version: int) -> None:
        """Set the version of the policy as it is now."""
        if self.own is not None:
            self.own.use_version(version)

    @contextmanager
    def ahead(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[None]:
        """A context, left when the first rank has drawn a later request by the policy as it was on entry.

        The policy is whole on entry alone, which is when servers get its weights.
        """
        with ExitStack() as drawing:

            def begin() -> None:
                assert self.own is not None
                drawing.enter_context(self.own.ahead(prompts, group_size=group_size, sampling=sampling, seed=seed))

            with self.weights():
                self.ranks.first(begin)
            yield

    def drawn(self) -> dict[str, Any] | None:
        """The drawn request, on the first rank, which writes checkpoints."""
        return None if self.own is None else self.own.drawn()

    def restore(self, drawn: dict[str, Any] | None) -> None:
        """Put back what a checkpoint has of it."""
        if self.own is not None:
            self.own.restore(drawn)
