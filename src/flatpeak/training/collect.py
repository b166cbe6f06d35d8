"""The rollout half of a step: draw prompts, sample groups, score them, replace those without signal."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flatpeak.protocols import Sampler
from flatpeak.rewards.base import GradingBudget, join_logged
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.rollout.config import RolloutConfig
from flatpeak.rollout.randomness import derive_seed
from flatpeak.training.curriculum import Phase, next_prompts, question_of
from flatpeak.types import Completion, Group, Prompt, Score, Scores

_Drawn = tuple[Group, int, Scores]
"""A group, its index in its round of rollouts, and the scores of that round."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Everything sampled and scored for one step."""

    groups: list[Group]
    scores: Scores
    cursor: int
    """Position in the data at which the next step begins."""
    drawn: int
    """Groups sampled, replaced ones included."""
    pass_rate: float
    """Mean of the phase's accuracy component over all groups sampled, since those that dynamic sampling keeps are never
    solved; 0 where nothing says right or wrong."""
    rollout_seconds: float
    reward_seconds: float
    """Grading time after the last group was sampled."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """By reward component, the completions without a score because something failed, of all that were drawn; without
    components that have none."""
    timed_out: Mapping[str, int] = field(default_factory=dict)
    """By reward component, the answers scored for having run out of time or memory; likewise."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Metrics that reward and sampler report of themselves: what functions log, a judge's calls and cost, a server's
    weight updates."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weights of the reward's components."""
    greedy: Sequence[Score] = ()
    """The reward of a greedy completion of each group's prompt, as trained, where the advantages ask for it."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """The pass rate of each question that was asked, or the mean reward where nothing says right or wrong."""

    def advantage_inputs(self, names: Collection[str]) -> dict[str, Any]:
        """The values that an advantage function asks for beside the rewards; see `ADVANTAGE_INPUTS`."""
        return advantage_inputs(names, self.groups, self.scores, weights=self.weights, greedy=self.greedy)


def collect(
    sampler: Sampler,
    phase: Phase,
    config: RolloutConfig,
    *,
    cursor: int,
    seed: int,
    has_signal: Callable[[Sequence[Group], Scores], Sequence[bool]],
    max_resamples: int,
    skips: Callable[[Prompt], bool] | None = None,
) -> Rollouts:
    """Sample and score `prompts_per_step` groups.

    With a resample budget (dynamic sampling, DAPO), groups without signal are replaced by fresh prompts, at most
    `max_resamples` more rounds; what the budget cannot replace stays and counts in the loss's denominators.
    """
    kept, without_signal, scored = list[_Drawn](), list[_Drawn](), list[Scores]()
    rollout_seconds, reward_seconds = 0.0, 0.0
    before, budget = failures(phase.reward), phase.reward.step_budget()
    for round_ in range(max_resamples + 1):
        wanted = config.prompts_per_step - len(kept)
        prompts, cursor = next_prompts(phase.prompts, cursor, wanted, skips=skips)
        groups, scores, seconds = roll_out(
            sampler, phase.reward, prompts, config, seed=rollout_seed(seed, round_), budget=budget
        )
        scored.append(scores)
        rollout_seconds, reward_seconds = rollout_seconds + seconds[0], reward_seconds + seconds[1]
        informative = has_signal(groups, scores) if max_resamples else [True] * len(groups)
        for index, group in enumerate(groups):
            (kept if informative[index] else without_signal).append((group, index, scores))
        if len(kept) == config.prompts_per_step:
            break
    chosen = kept + without_signal[: config.prompts_per_step - len(kept)]
    scores = _scores(chosen)
    return Rollouts(
        groups=[group for group, _, _ in chosen],
        scores=scores,
        cursor=cursor,
        drawn=len(kept) + len(without_signal),
        pass_rate=_pass_rate(phase, scored),
        rollout_seconds=rollout_seconds,
        reward_seconds=reward_seconds,
        measured={**_logged(scored), **phase.reward.measured(scores), **sampler.measured()},
        timed_out=_timed_out(scored),
        weights=phase.reward.weights,
        rates=_rates(phase, [*kept, *without_signal]),
        failed=_failed_since(before, phase.reward),
    )


def with_greedy(
    rollouts: Rollouts,
    sampler: Sampler,
    phase: Phase,
    config: RolloutConfig,
    *,
    seed: int,
    as_trained: Callable[[Sequence[Group], Scores], Sequence[Score]],
) -> Rollouts:
    """The rollouts with a greedy completion of each prompt: its reward as trained, its time and its failures."""
    before = failures(phase.reward)
    prompts, once = [group.prompt for group in rollouts.groups], {"group_size": 1, "temperature": 0.0}
    groups, scores, seconds = roll_out(
        sampler,
        phase.reward,
        prompts,
        config.model_copy(update=once),
        seed=seed,
        budget=phase.reward.step_budget(),
    )
    return replace(
        rollouts,
        greedy=as_trained(groups, scores),
        rollout_seconds=rollouts.rollout_seconds + seconds[0],
        reward_seconds=rollouts.reward_seconds + seconds[1],
        failed=Counter(rollouts.failed) + Counter(_failed_since(before, phase.reward)),
    )


def advantage_inputs(
    names: Collection[str],
    groups: Sequence[Group],
    scores: Scores,
    *,
    weights: Mapping[str, float],
    greedy: Sequence[Score] = (),
) -> dict[str, Any]:
    """The values that an advantage function asks for beside the rewards; see `ADVANTAGE_INPUTS`."""
    inputs: dict[str, Any] = {}
    completions = [group.completions for group in groups]
    if "lengths_PG" in names:
        lengths = [[len(c.sampled_ids) for c in row] for row in completions]
        inputs["lengths_PG"] = torch.tensor(lengths)
    if "parts" in names:
        known = {name: [[score or 0.0 for score in row] for row in rows] for name, rows in scores.parts.items()}
        inputs["parts"] = {name: torch.tensor(rows, dtype=torch.float32) for name, rows in known.items()}
    if "part_weights" in names:
        inputs["part_weights"] = dict(weights)
    if "old_logprobs_PGL" in names:
        longest = max(len(c.sampled_ids) for row in completions for c in row)
        padded = [[_padded(c, longest) for c in row] for row in completions]
        inputs["old_logprobs_PGL"] = torch.tensor(padded, dtype=torch.float32)
    if "greedy_P" in names:
        inputs["greedy_P"] = torch.tensor([float("nan") if score is None else score for score in greedy])
    return inputs


def _padded(completion: Completion, length: int) -> list[float]:
    """The log-probabilities of the tokens that the policy sampled, with zeros up to this length."""
    sampled = completion.trained or (True,) * len(completion.logprobs)
    own = [logprob for logprob, chosen in zip(completion.logprobs, sampled, strict=True) if chosen]
    return [*own, *[0.0] * (length - len(own))]


def _pass_rate(phase: Phase, scored: Sequence[Scores]) -> float:
    """The mean of the phase's accuracy component over all rounds; 0 where nothing says right or wrong."""
    known = [score for scores in scored for score in known_scores(scores.parts.get(phase.accuracy or "", ()))]
    return sum(known) / len(known) if known else 0.0


def _rates(phase: Phase, drawn: Sequence[_Drawn]) -> dict[str, float]:
    """The pass rate of each question that has one."""
    rates = {question_of(group.prompt): pass_rates(phase, scores)[index] for group, index, scores in drawn}
    return {question: rate for question, rate in rates.items() if not math.isnan(rate)}


def rollout_seed(seed: int, round_: int = 0) -> int:
    """The seed of a round of rollouts in the step with this seed."""
    return derive_seed(seed, "rollout", round_)


def _scores(drawn: Sequence[_Drawn]) -> Scores:
    """The scores of groups of several rounds; which of them timed out is counted by round."""
    return Scores(
        total=[scores.total[index] for _, index, scores in drawn],
        parts={name: [scores.parts[name][index] for _, index, scores in drawn] for name in drawn[0][2].parts},
        turn_weight=drawn[0][2].turn_weight,
    )


def _logged(scored: Sequence[Scores]) -> dict[str, float]:
    """The means of the values that reward functions have logged in all rounds, as metrics."""
    joined = join_logged(scores.logged for scores in scored)
    return {f"reward/{name}": sum(values) / len(values) for name, values in joined.items()}


def _timed_out(scored: Sequence[Scores]) -> dict[str, int]:
    counts = Counter[str]()
    for scores in scored:
        counts.update({name: sum(map(sum, flags)) for name, flags in scores.timed_out.items()})
    return dict(counts)


def failures(reward: RewardSet) -> dict[str, int]:
    """Number of completions that each reward component has failed on so far."""
    return {name: failure.count for name, failure in reward.failures.items()}


def _failed_since(before: Mapping[str, int], reward: RewardSet) -> dict[str, int]:
    """The completions that each component has failed on since then, without components that have none."""
    return {name: more for name, count in failures(reward).items() if (more := count - before.get(name, 0))}


def roll_out(
    sampler: Sampler,
    reward: RewardSet,
    prompts: Sequence[Prompt],
    config: RolloutConfig,
    *,
    seed: int,
    budget: GradingBudget | None,
) -> tuple[list[Group], Scores, tuple[float, float]]:
    """Sample a group for each prompt and score it: while others are sampled, where sampler and reward can.

    Returns the groups, their scores, and the seconds until the last group was sampled, and after that.
    """
    started, grading = time.perf_counter(), reward.grading()
    sampled: dict[int, Group] = {}
    stream = sampler.stream(prompts, group_size=config.group_size, sampling=config.sampling(), seed=seed)
    for index, group in stream:
        sampled[index] = group
        if grading is not None:
            grading.add(index, group)
    sampled_at = time.perf_counter()
    groups = [sampled[index] for index in range(len(prompts))]
    scores = reward.finish(groups, grading, budget=budget)
    return groups, scores, (sampled_at - started, time.perf_counter() - sampled_at)


def pass_rates(phase: Phase, scores: Scores) -> list[float]:
    """The pass rate of each group, or its mean reward where nothing says right or wrong; NaN without a score."""
    rows = scores.parts.get(phase.accuracy or "", scores.total)
    known = [known_scores([row]) for row in rows]
    return [sum(row) / len(row) if row else math.nan for row in known]


def known_scores(scores: Sequence[Sequence[Score]]) -> list[float]:
    """The scores that are not missing."""
    return [score for row in scores for score in row if score is not None]
