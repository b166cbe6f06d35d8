"""The metrics of a training step. Every name is defined in docs/metrics.md."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

import torch

from flatpeak.functional import effective_sample_size, kl_k3
from flatpeak.training.batch import on_trained_tokens
from flatpeak.training.collect import Rollouts, known_scores
from flatpeak.training.learner import PolicyStatistics
from flatpeak.training.reward_tensors import RewardTensors
from flatpeak.types import Completion, Group, PackedCompletions


class Clock:
    """Stopwatch that starts when it is made."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self.started


def step_metrics(
    rollouts: Rollouts,
    rewards: RewardTensors,
    updates: Sequence[PolicyStatistics],
    *,
    clock: Clock,
    learning_rate: float,
) -> dict[str, float]:
    """Rewards, policy, rollouts, optimizer and time of one step."""
    seconds = clock.seconds()
    completions = [completion for group in rollouts.groups for completion in group.completions]
    lengths = [len(completion.sampled_ids) for completion in completions]
    truncated = [completion.finish_reason == "length" for completion in completions]
    repetition = [repeated_fraction(completion.sampled_ids) for completion in completions]
    known = rewards.rewards_PG[rewards.valid_PG]
    missing = [score is None for row in rollouts.scores.total for score in row]
    return {
        "reward/mean": float(known.mean()) if len(known) else float("nan"),
        "reward/std": float(known.std()) if len(known) > 1 else float("nan"),
        "reward/missing_fraction": _mean(missing),
        **task_rewards(rollouts.groups, rewards),
        **{f"reward/{name}": _mean(known_scores(scores)) for name, scores in rollouts.scores.parts.items()},
        **{f"reward/{name}/failed": float(count) for name, count in rollouts.failed.items()},
        **{f"reward/{name}/timeouts": float(count) for name, count in rollouts.timed_out.items()},
        **rollouts.measured,
        "groups/informative_fraction": float(rewards.informative_P.float().mean()),
        "groups/drawn": float(rollouts.drawn),
        **policy_metrics(updates),
        **regularization_metrics(updates, step_seconds=seconds),
        **sampler_gap_metrics(updates),
        "rollout/length_mean": _mean(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated_fraction": _mean(truncated),
        "rollout/repetition": _mean(repetition),
        **episode_metrics(completions),
        "optimizer/learning_rate": learning_rate,
        "optimizer/updates": float(len(updates)),
        "time/rollout": rollouts.rollout_seconds,
        "time/reward": rollouts.reward_seconds,
        "time/train": seconds - rollouts.rollout_seconds - rollouts.reward_seconds,
        "time/step": seconds,
        "throughput/response_tokens_per_second": sum(lengths) / seconds,
    }


def task_rewards(groups: Sequence[Group], rewards: RewardTensors) -> dict[str, float]:
    """The mean reward of each task of a mixture that the step has prompts of."""
    tasks = [group.prompt.example.task for group in groups]
    metrics = {}
    for task in dict.fromkeys(name for name in tasks if name):
        rows = [index for index, name in enumerate(tasks) if name == task]
        metrics[f"reward/{task}/mean"] = _mean(rewards.rewards_PG[rows][rewards.valid_PG[rows]].tolist())
    return metrics


def policy_metrics(updates: Sequence[PolicyStatistics]) -> dict[str, float]:
    """Means over the updates of a step, and over all the tokens that had a pass."""
    tokens = [statistics for update in updates for statistics in update.tokens]
    count = sum(statistics.tokens for statistics in tokens)
    metrics = {
        "policy/loss": _mean([update.loss for update in updates]),
        "policy/grad_norm": _mean([update.grad_norm for update in updates if not update.skipped]),
        "optimizer/skipped": float(sum(update.skipped for update in updates)),
    }
    if count:
        metrics["policy/entropy"] = sum(float(s.entropy) for s in tokens) / count
        metrics["policy/ratio_mean"] = sum(float(s.ratio) for s in tokens) / count
        metrics["policy/ratio_max_gap"] = max(float(s.max_ratio_gap) for s in tokens)
        metrics["policy/clip_fraction"] = sum(float(s.clipped) for s in tokens) / count
        if all(s.weight is not None for s in tokens):
            metrics["policy/token_weight"] = sum(float(s.weight) for s in tokens if s.weight is not None) / count
        if all(s.kl is not None for s in tokens):
            metrics["policy/kl_reference"] = sum(float(s.kl) for s in tokens if s.kl is not None) / count
    return metrics


def sampler_gap_metrics(updates: Sequence[PolicyStatistics]) -> dict[str, float]:
    """Distance of the sampler's log-probabilities from the trainer's, and the weights that correct it, over the tokens
    of the step's first update.

    Later updates train other weights than those that sampled.
    """
    first = next((update.tokens for update in updates if update.tokens), [])
    sampler = [statistics.sampler for statistics in first if statistics.sampler is not None]
    if not sampler:
        return {}
    count = sum(statistics.tokens for statistics in first)
    metrics = {
        "rollout/logprob_gap_mean": sum(float(s.gap) for s in sampler) / count,
        "rollout/logprob_gap_max": max(float(s.max_gap) for s in sampler),
        "rollout/kl_sampler_trainer": sum(float(s.kl) for s in sampler) / count,
    }
    weights = [(float(s.weight), float(s.capped)) for s in sampler if s.weight is not None and s.capped is not None]
    if weights:
        metrics["rollout/correction_mean"] = sum(weight for weight, _ in weights) / count
        metrics["rollout/correction_capped"] = sum(capped for _, capped in weights) / count
        squares = sum(float(s.squares) for s in sampler if s.squares is not None)
        total = sum(weight for weight, _ in weights)
        metrics["rollout/correction_effective_share"] = effective_sample_size(total, squares, count)
        depths = sum((s.by_depth.cpu() for s in sampler if s.by_depth is not None), torch.zeros(2, 4))
        for quarter, (tokens, gaps) in enumerate(depths.T.tolist(), start=1):
            metrics[f"rollout/logprob_gap_quarter_{quarter}"] = gaps / tokens if tokens else float("nan")
    return metrics


def staleness_metrics(groups: Sequence[Group], *, version: int) -> dict[str, float]:
    """Mean age of the step's groups, in versions of the policy; empty where no group has one."""
    ages = [version - group.version for group in groups if group.version is not None]
    return {"rollout/staleness": _mean(ages)} if ages else {}


def kl_metrics(completions: PackedCompletions) -> dict[str, float]:
    """The KL of the policy that sampled to the reference, over all completions; empty where either has no score.

    kl_reference is the mean over tokens of k3, kl_sequence the mean over completions of sum_t log p - log p_ref, both
    unbiased (Schulman 2020, http://joschu.net/blog/kl-approx.html). Whatever the loss leaves out takes part.
    """
    (completions,) = on_trained_tokens(completions)
    sampled_T, reference_T = completions.sampler_logprobs_T, completions.reference_logprobs_T
    if sampled_T is None or reference_T is None or not len(sampled_T):
        return {}
    sampled_T, reference_T = sampled_T.double(), reference_T.double()
    return {
        "rollout/kl_reference": float(kl_k3(sampled_T, reference_T).mean()),
        "rollout/kl_sequence": float((sampled_T - reference_T).sum()) / len(completions.lengths_N),
    }


def regularization_metrics(updates: Sequence[PolicyStatistics], *, step_seconds: float) -> dict[str, float]:
    """Means over the updates of a step that had a penalty, skips counted; without one, the gradient's norm at most."""
    norms = [update.g1_norm for update in updates if update.g1_norm is not None and not update.skipped]
    if norms:
        return {"gradreg/g1_norm": _mean(norms)}
    reports = [update.regularization for update in updates if update.regularization is not None]
    rows = [row for row in (report.metrics() for report in reports) if row]
    if not rows:
        return {}
    names = dict.fromkeys(name for row in rows for name in row)
    # One update that is skipped for an infinite gradient does not make the step's mean infinite.
    metrics = {name: _mean([row[name] for row in rows if math.isfinite(row.get(name, math.nan))]) for name in names}
    metrics["gradreg/skipped"] = sum(row["gradreg/skipped"] for row in rows)
    metrics["gradreg/time_share"] = sum(report.seconds for report in reports) / step_seconds
    return metrics


def episode_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """`episodes/*`: turns, calls and added tokens of an episode, and the shares of failures and of reasons to end.

    `failed/KIND` is a share of all calls, `ended/REASON` one of all episodes. Empty without episodes.
    """
    episodes = [completion for completion in completions if completion.turns]
    if not episodes:
        return {}
    turns = [turn for completion in episodes for turn in completion.turns]
    calls = [call for turn in turns for call in turn.calls]
    failures = Counter(call.failure for call in calls if call.failure is not None)
    ended = Counter(completion.stop_reason for completion in episodes)
    return {
        "episodes/turns": len(turns) / len(episodes),
        "episodes/calls": len(calls) / len(episodes),
        "episodes/added_tokens": sum(turn.added for turn in turns) / len(episodes),
        **{f"episodes/failed/{kind}": count / len(calls) for kind, count in sorted(failures.items())},
        **{f"episodes/ended/{reason}": count / len(episodes) for reason, count in sorted(ended.items(), key=str)},
    }


def repeated_fraction(token_ids: Sequence[int], *, n: int = 4) -> float:
    """The fraction of n-grams that occurred before in the same completion; 0 for short ones."""
    grams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
