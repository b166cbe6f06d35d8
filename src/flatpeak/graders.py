"""From a recipe, or what a caller brings, to the rewards of a run: built, fitted to the evaluation, made ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatpeak.checks import check_accuracy, check_metric
from flatpeak.config.run_config import RunConfig
from flatpeak.evaluation.evaluate import Grader, TextAnswers
from flatpeak.protocols import Progress, Reward
from flatpeak.rewards.build import as_reward, build_reward
from flatpeak.rewards.config import RewardConfig
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.types import Prompt

SHOWN_TO_REWARDS = 16
"""Examples that rewards may check themselves on."""


def open_workers(config: RunConfig) -> WorkerPool | None:
    """The processes that grade; each starts when there is something to grade. None where the recipe wants none."""
    size, memory = config.run.grading_workers, config.run.grading_memory
    if size == 0:
        return None
    return WorkerPool(
        2 if size is None else size,
        timeout=config.run.grading_timeout,
        memory_bytes=None if memory is None else int(memory * 2**30),
    )


def main_reward(config: RunConfig, given: Any, *, workers: WorkerPool | None, progress: Progress) -> Grader:
    """The recipe's rewards, or the caller's own. UserError where they do not fit the evaluation."""
    if given is None:
        reward = _build(config, config.rewards, workers=workers, progress=progress)
    else:
        rules = config.run.grading_workers is not None
        found = as_reward(
            given,
            name=config.evaluation.accuracy,
            workers=workers,
            rules=rules,
            budget=config.run.grading_budget,
            notice=progress.notice,
        )
        if not isinstance(found, RewardSet):
            return TextAnswers(found)
        reward = found
    check_accuracy(config.evaluation, reward)
    check_metric(config.evaluation, reward)
    return reward


def first_reward(config: RunConfig, *, workers: WorkerPool | None, progress: Progress) -> RewardSet | None:
    """The rewards of the curriculum's first task, where it has its own."""
    if config.curriculum is None or config.curriculum.rewards is None:
        return None
    reward = _build(config, config.curriculum.rewards, workers=workers, progress=progress)
    check_accuracy(config.evaluation, reward)
    return reward


def _build(
    config: RunConfig, rewards: Mapping[str, RewardConfig], *, workers: WorkerPool | None, progress: Progress
) -> RewardSet:
    rules = config.run.grading_workers is not None
    return build_reward(rewards, workers=workers, rules=rules, budget=config.run.grading_budget, notice=progress.notice)


def prepare(reward: Grader | Reward, prompts: Sequence[Prompt]) -> None:
    """Let rewards that can check themselves do so, on the first examples: UserError where one is unfit."""
    if isinstance(reward, RewardSet):
        reward.prepare([prompt.example for prompt in prompts[:SHOWN_TO_REWARDS]])
