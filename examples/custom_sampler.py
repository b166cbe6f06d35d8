"""A custom sampler that uses the model in training: it makes the completions of a group differ.

    python examples/custom_sampler.py

A sampler is any object with `generate(prompts, *, group_size, sampling, seed)` that returns one `Group` per prompt. A
sampler that uses the model in training cannot exist before the run has loaded the model. So `train` also accepts a
factory: a function that gets the policy and returns the sampler.

    flatpeak.train(config, sampler=lambda policy: Distinct(NativeEngine(policy)))

`NativeEngine(policy)` decodes with the trainer's weights. Other code must call the model inside
`with policy.plain_attention() as model:`, which restores transformers' attention. `PlainSampler(policy, max_rows=64)`
of `flatpeak.pipeline.rollout_engines` does this with `generate`, for models that the native engine does not support.

A sampler must return log-probabilities of the policy at `sampling.temperature`, over the whole vocabulary, because
importance ratios use them. `rollout/logprob_gap_mean` shows their error.
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
    """Samples more completions than a group needs, and prefers those with new texts.

    Equal completions have equal rewards, so a group of different completions has more to compare. The cost: training
    sees frequent completions less often than the policy samples them, and the importance ratio does not correct this.
    """

    def __init__(self, sampler: Sampler, *, surplus: int = 2) -> None:
        self.sampler = sampler
        self.surplus = surplus

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order; greedy answers do not change."""
        drawn = group_size if sampling.temperature == 0 else self.surplus * group_size
        groups = self.sampler.generate(prompts, group_size=drawn, sampling=sampling, seed=seed)
        return [replace(group, completions=distinct_first(group.completions)[:group_size]) for group in groups]


def distinct_first(completions: Iterable[Completion]) -> tuple[Completion, ...]:
    """The first completion of each text, then the repetitions, both in the order of sampling."""
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
    """Run the demo with this sampler, shortened to ten steps of SFT and of RL."""
    config = {"extends": "flatpeak:demo", "run": {"name": "custom-sampler"}}
    settings = {"sft.steps": 10, "sft.stop_at": None, "training.steps": 10}
    result = flatpeak.train(config, sampler=make_sampler, settings=settings, overwrite=True)
    print(f"report: {result.report}")


if __name__ == "__main__":
    main()
