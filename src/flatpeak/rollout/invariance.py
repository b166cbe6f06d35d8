"""The start-up test that says whether a decoder's results depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence

from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import Prompt, SamplingParams


def batch_invariant(
    engine: NativeEngine, prompts: Sequence[Prompt], *, group_size: int = 4, max_new_tokens: int = 16, seed: int = 0
) -> bool:
    """Whether prompts decoded alone and together give the same tokens and bitwise the same log-probs.

    True is evidence and not proof: a matrix product may round differently at a shape that was not tried. Where it is
    False log-probs agree to rounding, and a token may rarely differ. Each prompt is sampled alone (one row), as a group
    alone, and among all of them; give prompts of different lengths.
    """
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
        together = engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
        for prompt, group in zip(prompts, together, strict=True):
            for size in (1, group_size):
                (alone,) = engine.generate([prompt], group_size=size, sampling=sampling, seed=seed)
                if alone.completions != group.completions[:size]:
                    return False
    return True
