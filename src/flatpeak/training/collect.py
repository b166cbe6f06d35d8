"""The rollout half of a step: draw prompts, sample groups, score them, replace those that teach nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from flatpeak.protocols import Sampler
from flatpeak.rollout.config import RolloutConfig
from flatpeak.rollout.randomness import derive_seed
from flatpeak.training.curriculum import Phase
from flatpeak.training.data import take_prompts
from flatpeak.training.shaping import informative
from flatpeak.types import Group, Scores


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Everything sampled and scored for one step."""

    groups: list[Group]
    scores: Scores
    cursor: int
    """Where the next step goes on in the data."""
    drawn: int
    """Groups sampled, replaced ones included."""
    rollout_seconds: float
    reward_seconds: float


def collect(
    sampler: Sampler, phase: Phase, config: RolloutConfig, *, cursor: int, seed: int, max_resamples: int
) -> Rollouts:
    """Sample and score `prompts_per_step` groups.

    With a resample budget (dynamic sampling, DAPO), groups whose rewards are all equal are replaced by fresh prompts,
    at most `max_resamples` more rounds; what the budget cannot replace stays and counts in the loss's denominators.
    """
    kept: list[tuple[Group, int, Scores]] = []
    dead: list[tuple[Group, int, Scores]] = []
    drawn, rollout_seconds, reward_seconds = 0, 0.0, 0.0
    for round_ in range(max_resamples + 1):
        wanted = config.prompts_per_step - len(kept)
        prompts = take_prompts(phase.prompts, cursor, wanted)
        cursor, drawn = cursor + wanted, drawn + wanted
        started = time.perf_counter()
        groups = sampler.generate(
            prompts,
            group_size=config.group_size,
            sampling=config.sampling(),
            seed=derive_seed(seed, "rollout", round_),
        )
        sampled = time.perf_counter()
        scores = phase.reward(groups)
        rollout_seconds += sampled - started
        reward_seconds += time.perf_counter() - sampled
        for index, group in enumerate(groups):
            alive = max_resamples == 0 or _informative(scores, index)
            (kept if alive else dead).append((group, index, scores))
        if len(kept) == config.prompts_per_step:
            break
    chosen = kept + dead[: config.prompts_per_step - len(kept)]
    return Rollouts(
        groups=[group for group, _, _ in chosen],
        scores=Scores(
            total=[scores.total[index] for _, index, scores in chosen],
            parts={name: [scores.parts[name][index] for _, index, scores in chosen] for name in chosen[0][2].parts},
        ),
        cursor=cursor,
        drawn=drawn,
        rollout_seconds=rollout_seconds,
        reward_seconds=reward_seconds,
    )


def _informative(scores: Scores, index: int) -> bool:
    known = [0.0 if score is None else score for score in scores.total[index]]
    row = torch.tensor([known], dtype=torch.float32)
    valid = torch.tensor([[score is not None for score in scores.total[index]]])
    return bool(informative(row, valid))
