"""The rewards of a run, the recipe's or the caller's own, and the checks that they fit the evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.evaluation.config import EvaluationConfig, is_verdict
from flatpeak.protocols import Progress
from flatpeak.rewards.reward_set import RewardSet, as_reward, build_reward
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.runs.config import RunSectionConfig
from flatpeak.training.curriculum import Phase
from flatpeak.training.history import Unanswered
from flatpeak.types import Prompt

REWARD_CHECK_EXAMPLES = 16
"""The number of examples that rewards may check themselves on."""
GREEDY_METRICS = ("accuracy", "reward", "length", "truncated", "accuracy/not_near_train")
SAMPLED_METRICS = ("reward", "accuracy", "length", "truncated")


@dataclass(frozen=True, kw_only=True)
class RunRewards:
    """The rewards of a run's tasks."""

    main: RewardSet
    first: RewardSet
    """Those of the curriculum's first task: the main ones where it has none of its own."""


def open_rewards(config: RunConfig, callers_own: Any, resources: ExitStack, *, progress: Progress) -> RunRewards:
    """The rewards of the recipe, or the caller's own; their processes end with `resources`.

    UserError where they do not fit the evaluation.
    """
    workers = _open_workers(config)
    if workers is not None:
        resources.callback(workers.close)
    shared: dict[str, Any] = {
        "workers": workers,
        "rules": config.run.grading_workers is not None,
        "budget": config.run.grading_budget,
        "notice": progress.notice,
    }
    if callers_own is None:
        main = build_reward(config.rewards, **shared)
    else:
        main = as_reward(callers_own, name=config.evaluation.accuracy_part, **shared)
    resources.callback(main.close)
    if main.weights:  # else a caller's own: the names of its components come with its scores
        _check_accuracy(config.evaluation, main)
        _check_metric(config.evaluation, main)
    if config.curriculum is None or config.curriculum.rewards is None:
        return RunRewards(main=main, first=main)
    first = build_reward(config.curriculum.rewards, **shared)
    resources.callback(first.close)
    _check_accuracy(config.evaluation, first)
    return RunRewards(main=main, first=first)


def _open_workers(config: RunConfig) -> WorkerPool | None:
    """The pool of grading processes, each started when there is something to grade; None where the recipe has none."""
    return None if config.run.grading_workers == 0 else open_pool(config.run, timeout=config.run.grading_timeout)


def open_pool(run: RunSectionConfig, *, timeout: float) -> WorkerPool:
    """A pool of the recipe's size, two without one, in which a call may take so many seconds."""
    memory = run.grading_memory
    return WorkerPool(
        run.grading_workers or 2, timeout=timeout, memory_bytes=None if memory is None else int(memory * 2**30)
    )


def prepare_reward(reward: RewardSet, prompts: Sequence[Prompt]) -> None:
    """Let rewards that can check themselves do so, on the first examples: UserError where one is unfit."""
    reward.prepare([prompt.example for prompt in prompts[:REWARD_CHECK_EXAMPLES]])


def _check_accuracy(config: EvaluationConfig, reward: RewardSet) -> None:
    """UserError where `evaluation.accuracy` is none of the rewards."""
    name = config.accuracy_part
    if name is not None and name not in reward.weights:
        raise UserError(
            f"evaluation.accuracy={name} names no reward: choose one of {', '.join(reward.weights)}, or null where "
            "none says right or wrong"
        )


def _check_metric(config: EvaluationConfig, reward: RewardSet) -> None:
    """UserError where no evaluation has `evaluation.metric`."""
    known = [*GREEDY_METRICS, *reward.weights] if config.greedy else []
    if config.samples:
        known += [f"sampled/{name}" for name in (*SAMPLED_METRICS, *reward.weights)]
        known += [f"{name}@{k}" for k in config.k for name in ("pass", "maj")]
    if config.accuracy is None:
        known = [name for name in known if not is_verdict(name)]
    if config.metric not in known:
        hint = "" if config.samples else " (pass@k and maj@k need evaluation.samples)"
        raise UserError(f"evaluation.metric={config.metric}: choose one of {', '.join(known)}{hint}")


def rewards_of(phases: Sequence[Phase]) -> list[RewardSet]:
    """The rewards of these phases, each once."""
    return list(dict.fromkeys(phase.reward for phase in phases))


def unanswered(phases: Sequence[Phase], name: str | None) -> Unanswered | None:
    """A test of whether the reward component of that name extracts an answer; None where none reads answers.

    None also where the first task has rewards of its own: one task's grader may refuse the other's questions.
    """
    reward = phases[-1].reward
    if name is None or not reward.weights or any(phase.reward is not reward for phase in phases):
        return None
    return lambda group: [reward.answer(name, one, group.prompt) is None for one in group.completions]
