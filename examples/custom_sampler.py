"""A sampler of your own that draws from the model being trained: groups whose completions differ.

    python examples/custom_sampler.py

A sampler is any object with `generate(prompts, *, group_size, sampling, seed)` that returns one `Group` per prompt. One
that uses the model being trained cannot exist before the run has loaded it, so `train` takes a factory as well: a
function that is called with the policy and returns the sampler.

    flatpeak.train(config, sampler=lambda policy: Distinct(NativeEngine(policy)))

`NativeEngine(policy)` decodes with the trainer's own weights. Other code that calls the model does so inside
`with policy.plain_attention() as model:`, which gives it transformers' own attention back; `PlainSampler(policy,
max_rows=64)` of `flatpeak.pipeline.rollout_engines` does just that with `generate`, for models that the native engine
does not serve.

The log-probabilities that a sampler returns are those of the policy at `sampling.temperature`, over the whole
vocabulary: the importance ratio is taken to them, and `rollout/logprob_gap_mean` shows how far off they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import flatpeak
from flatpeak.policy.model import Policy
from flatpeak.protocols import Sampler
from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import Completion, Group, Prompt, SamplingParams


class Distinct:
    """Draws more completions than a group needs, and prefers those whose text no earlier one has.

    Equal completions have equal rewards, so a group of different ones more often has something to compare. The price:
    frequent completions are trained on less often than the policy draws them, which the importance ratio does not see.
    """

    def __init__(self, sampler: Sampler, *, surplus: int = 2) -> None:
        self.sampler = sampler
        self.surplus = surplus

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order; greedy answers are left alone."""
        drawn = group_size if sampling.temperature == 0 else self.surplus * group_size
        groups = self.sampler.generate(prompts, group_size=drawn, sampling=sampling, seed=seed)
        return [replace(group, completions=distinct_first(group.completions)[:group_size]) for group in groups]


def distinct_first(completions: Iterable[Completion]) -> tuple[Completion, ...]:
    """The first completion of each text, then the repetitions, each in the order in which they were drawn."""
    first: dict[str, Completion] = {}
    repeated = []
    for completion in completions:
        if completion.text in first:
            repeated.append(completion)
        else:
            first[completion.text] = completion
    return (*first.values(), *repeated)


def make_sampler(policy: Policy) -> Distinct:
    """The factory that `train` calls."""
    return Distinct(NativeEngine(policy))


def main() -> None:
    """The demo with this sampler, cut to ten steps of SFT and of RL."""
    config = {"extends": "flatpeak:demo", "run": {"name": "custom-sampler"}}
    settings = {"sft.steps": 10, "sft.stop_at": None, "training.steps": 10}
    result = flatpeak.train(config, sampler=make_sampler, settings=settings, overwrite=True)
    print(f"report: {result.report}")


if __name__ == "__main__":
    main()
