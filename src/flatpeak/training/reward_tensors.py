"""From scores to rewards, and from rewards to advantages: missing scores, truncation, KL in the reward, baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flatpeak.errors import UserError
from flatpeak.functional.advantage_functions import limit_spreads, whiten
from flatpeak.functional.advantages import group_advantages, returns_to_go
from flatpeak.training.batch import mean_of_trained, of_first_tokens, on_trained_tokens, per_token
from flatpeak.training.config import DynamicSamplingConfig
from flatpeak.training.objective import KL_ESTIMATORS
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, ObjectiveConfig
from flatpeak.types import Group, PackedCompletions, Scores

OwnAdvantages = Callable[..., Tensor]
"""(rewards_PG, valid_PG, and by name what it asks for) -> advantages_PG."""
LARGEST_REWARD = 1e12
"""Bound of a total reward's size: the squares of larger ones overflow float32 when a group is standardized."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTensors:
    """The turns of a step's episodes, at most K each. A completion that is no episode has one."""

    returns_PGK: Tensor
    """float32: the reward of a turn and of all that follows it, that of the episode for the first turn."""
    taken_PGK: Tensor
    """bool: whether the episode has this turn."""
    lengths_PGK: Tensor
    """int64: the tokens of a turn, and those that were added after it."""

    def each(self, valid_PG: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The returns [P, G] of every turn, and the valid episodes that have it."""
        taken_PGK = self.taken_PGK & valid_PG[..., None]
        return zip(self.returns_PGK.unbind(-1), taken_PGK.unbind(-1), strict=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTensors:
    """Rewards as tensors over the step's P groups of G completions."""

    rewards_PG: Tensor
    """float32, 0 where missing."""
    valid_PG: Tensor
    """bool: not missing; only these enter baselines and scales."""
    trained_PG: Tensor
    """bool: valid, and not masked for being truncated; only these enter the loss and its denominators."""
    turns: TurnTensors | None = None
    """With credit by turn; else None."""

    @property
    def informative_P(self) -> Tensor:
        """bool: groups with rewards, or returns of a turn, that differ."""
        signal_P = informative(self.rewards_PG, self.valid_PG)
        for returns_PG, taken_PG in self.turns.each(self.valid_PG) if self.turns else ():
            signal_P = signal_P | informative(returns_PG, taken_PG)
        return signal_P

    def less(self, penalties_PG: Tensor) -> RewardTensors:
        """The same less a penalty at the end of each completion, which counts in the returns of all its turns."""
        turns = self.turns
        if turns is not None:
            turns = replace(turns, returns_PGK=turns.returns_PGK - penalties_PG[..., None])
        return replace(self, rewards_PG=self.rewards_PG - penalties_PG, turns=turns)


def reward_tensors(
    groups: Sequence[Group],
    scores: Scores,
    config: ObjectiveConfig,
    *,
    max_new_tokens: int,
    group_baseline: bool,
    by_turn: bool = False,
) -> RewardTensors:
    """Apply `objective.truncated` to the total scores.

    soft_penalty adds DAPO's soft overlong punishment (Yu et al. 2025, equation 13), with B the buffer and L the limit:
    0 up to L - B tokens, then (L - B - length) / B, which is -1 at L and stays -1 beyond. Under a group baseline a
    group with fewer than two valid scores counts as missing. `by_turn` adds the returns of turns.

    Raises UserError for a total that is too large, or not finite, since weights multiply scores.
    """
    _check_size(groups, scores)
    known = [[0.0 if score is None else score for score in row] for row in scores.total]
    totals_PG = torch.tensor(known, dtype=torch.float64)
    valid_PG = torch.tensor([[score is not None for score in row] for row in scores.total])
    truncated_PG = torch.tensor([[c.finish_reason == "length" for c in group.completions] for group in groups])
    if group_baseline:
        valid_PG &= valid_PG.sum(dim=1, keepdim=True) >= 2
    if config.truncated == "zero_reward":
        totals_PG = totals_PG.masked_fill(truncated_PG, 0.0)
    rewards = RewardTensors(
        rewards_PG=totals_PG.float(),
        valid_PG=valid_PG,
        trained_PG=valid_PG & ~truncated_PG if config.truncated == "mask" else valid_PG,
        turns=turn_tensors(groups, totals_PG, scores.turn_weight) if by_turn else None,
    )
    if config.truncated != "soft_penalty":
        return rewards
    lengths_PG = torch.tensor([[len(c.sampled_ids) for c in group.completions] for group in groups])
    over_PG = (lengths_PG - (max_new_tokens - config.overlong_buffer)).clamp(0, config.overlong_buffer)
    return rewards.less(valid_PG * over_PG / config.overlong_buffer)


def turn_tensors(groups: Sequence[Group], totals_PG: Tensor, weight: float) -> TurnTensors:
    """The turns of episodes with these total rewards, in which the rewards of turns have a weight.

    A turn without a reward adds nothing. What the total has beside the turns' rewards is given at the episode's end.
    """
    episodes = [completion for group in groups for completion in group.completions]
    turns = [[(turn.reward or 0.0, turn.sampled + turn.added) for turn in one.turns] for one in episodes]
    turns = [own or [(0.0, len(one.token_ids))] for own, one in zip(turns, episodes, strict=True)]
    # In float64, and with the sum that the total has: where it is all of the total, exactly nothing is left.
    sums_PG = torch.tensor([one.reward or 0.0 for one in episodes], dtype=torch.float64).view_as(totals_PG)
    padded_NK = pad_sequence([torch.tensor(own, dtype=torch.float64) for own in turns], batch_first=True)
    rewards_PGK, lengths_PGK = padded_NK.unflatten(0, totals_PG.shape).unbind(-1)
    returns_PGK = returns_to_go(weight * rewards_PGK, totals_PG - weight * sums_PG)
    returns_PGK[..., 0] = totals_PG
    if not bool((returns_PGK.abs() <= LARGEST_REWARD).all()):
        raise UserError(
            "from one turn on, the rewards of an episode add up to more than can be trained on, "
            f"{LARGEST_REWARD:g} either way: bound what step of the environment returns"
        )
    numbers_PG = torch.tensor([len(own) for own in turns]).view_as(totals_PG)
    return TurnTensors(
        returns_PGK=returns_PGK.float(),
        taken_PGK=torch.arange(returns_PGK.shape[-1]) < numbers_PG[..., None],
        lengths_PGK=lengths_PGK.long(),
    )


def _check_size(groups: Sequence[Group], scores: Scores) -> None:
    for group, row in zip(groups, scores.total, strict=True):
        for index, score in enumerate(row):
            if score is not None and not abs(score) <= LARGEST_REWARD:  # also refuses NaN
                raise UserError(
                    f"the total reward of completion {index} of prompt {group.prompt.id!r} is {score:g}, where at "
                    f"most {LARGEST_REWARD:g} either way can be trained on: bound what the reward returns, or lower "
                    "its weight"
                )


def informative(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """bool [P]: groups whose valid rewards differ; only these have a policy gradient under a group baseline."""
    highest = rewards_PG.masked_fill(~valid_PG, float("-inf")).amax(dim=1)
    lowest = rewards_PG.masked_fill(~valid_PG, float("inf")).amin(dim=1)
    return (valid_PG.sum(dim=1) >= 2) & (highest != lowest)


def in_band(rewards: RewardTensors, rates_P: Tensor, rule: DynamicSamplingConfig) -> Tensor:
    """bool [P]: groups with at least the standard deviation, unbiased, and within the pass rates of the rule.

    rates_P are the groups' pass rates; NaN is within none.
    """
    rewards_PG, valid_PG = rewards.rewards_PG, rewards.valid_PG
    count_P1 = valid_PG.sum(-1, keepdim=True)
    mean_P1 = (rewards_PG * valid_PG).sum(-1, keepdim=True) / count_P1.clamp(min=1)
    squares_P = ((rewards_PG - mean_P1) * valid_PG).square().sum(-1)
    spread_P = (squares_P / (count_P1[:, 0] - 1).clamp(min=1)).sqrt() >= rule.min_std
    if rule.pass_rate is None:
        return spread_P
    return spread_P & (rates_P >= rule.pass_rate[0]) & (rates_P <= rule.pass_rate[1])


def kl_to_go_T(completions: PackedCompletions, logprobs_T: Tensor, kl: KLConfig) -> Tensor:
    """coefficient * sum_{s >= t} discount^(s - t) KL_s(policy, reference) of each token, float32 [T].

    The sum is over trained tokens. REINFORCE++, Hu et al. 2025, arXiv 2501.03262. logprobs_T are the policy's, scored
    as the reference's were.
    """
    assert completions.reference_logprobs_T is not None
    kl_T = KL_ESTIMATORS[kl.estimator](logprobs_T, completions.reference_logprobs_T).float()
    if completions.trained_T is not None:
        kl_T = kl_T.masked_fill(~completions.trained_T, 0.0)
    to_go: list[float] = []
    for kl_L in kl_T.split(completions.lengths_N.tolist()):
        backwards = accumulate(reversed(kl_L.tolist()), lambda later, own: own + kl.discount * later)
        to_go += reversed(list(backwards))
    return kl.coefficient * torch.tensor(to_go, dtype=torch.float32, device=kl_T.device)


def kl_penalty_N(completions: PackedCompletions, logprobs_T: Tensor, kl: KLConfig) -> Tensor:
    """coefficient * sum_t KL_t(policy, reference) of each completion, float32 [N]: what a KL in the reward costs.

    logprobs_T are the policy's, scored as the reference's were: in other cuts they would differ by rounding, which a
    division by the group's standard deviation makes large where rewards are equal.
    """
    completions, logprobs_T = on_trained_tokens(completions, logprobs_T)
    assert completions.reference_logprobs_T is not None
    kl_T = KL_ESTIMATORS[kl.estimator](logprobs_T, completions.reference_logprobs_T).float()
    zeros_N = torch.zeros(len(completions.lengths_N), device=kl_T.device)
    return kl.coefficient * zeros_N.index_add(0, completions.sequence_T, kl_T)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """The function from a step's rewards to its advantages."""

    config: AdvantageConfig
    own: OwnAdvantages | None = None
    """The function in place of baseline and scale; see `user_functions`."""
    asks: frozenset[str] = frozenset()
    """The names of `ADVANTAGE_INPUTS` that this function asks for."""
    compares: bool = True
    """Whether that function compares the completions of a group, where there are several."""

    def __call__(self, rewards_PG: Tensor, valid_PG: Tensor, **inputs: Any) -> Tensor:
        """Advantages [P, G], 0 where `valid_PG` is False; UserError for what a function of the user's returns."""
        config = self.config
        if self.own is not None:
            advantages_PG = self.own(rewards_PG, valid_PG, **inputs)
        else:
            advantages_PG = group_advantages(
                rewards_PG, baseline=config.baseline, scale=config.scale, eps=config.eps, valid_PG=valid_PG
            )
        if config.limit_spreads is None:
            return advantages_PG
        return limit_spreads(advantages_PG, valid_PG, config.limit_spreads)

    def by_turn(self, rewards: RewardTensors, chosen_PG: Tensor) -> Tensor | None:
        """The advantage of each token's turn, [T] of the chosen completions; None without credit by turn.

        A turn is compared with those of the same number of its group. Under a group baseline it has the advantage 0 if
        no other episode has such a turn.
        """
        if rewards.turns is None:
            return None
        advantages_PGK = torch.stack([self(*turn) for turn in rewards.turns.each(rewards.valid_PG)], dim=-1)
        lengths_N = rewards.turns.lengths_PGK[chosen_PG].flatten()
        return advantages_PGK[chosen_PG].flatten().repeat_interleave(lengths_N)

    def of_completions(self, advantages_T: Tensor, completions: PackedCompletions, *, without_N: Tensor) -> Tensor:
        """One advantage [N] for each completion's log: that of its first token, or with credit by turn the mean."""
        if self.config.credit == "turn":
            return mean_of_trained(advantages_T, completions)
        return of_first_tokens(advantages_T, completions, without_N=without_N)

    def per_token(
        self,
        advantages_N: Tensor,
        completions: PackedCompletions,
        penalties_T: Tensor | None,
        turns_T: Tensor | None = None,
        *,
        counted_N: Tensor | None = None,
    ) -> Tensor:
        """Advantages [T] of completions, or `turns_T`, less each token's penalty, whitened over the completions that
        are counted (all by default), and limited."""
        config, trained_T = self.config, completions.trained_T
        if counted_N is None:
            counted_N = torch.ones_like(advantages_N, dtype=torch.bool)
        if config.whiten == "completions":
            advantages_N = whiten(advantages_N, counted_N.to(advantages_N.device), eps=config.eps)
        advantages_T = per_token(advantages_N, completions)
        if turns_T is not None:
            advantages_T = turns_T.to(advantages_T.device)
        if penalties_T is not None:
            advantages_T = advantages_T - penalties_T
        if config.whiten == "tokens":
            counted_T = per_token(counted_N, completions)
            counted_T = counted_T if trained_T is None else counted_T & trained_T
            advantages_T = whiten(advantages_T, counted_T, eps=config.eps)
        return advantages_T if config.limit is None else advantages_T.clamp(-config.limit, config.limit)

    def compare_groups(self, group_size: int) -> bool:
        """Whether a group with fewer than two rewards is missing, and one of equal rewards teaches nothing.

        A function of the user's is taken to compare the completions of a group wherever there are several.
        """
        return group_size > 1 and self.compares if self.own is not None else self.config.baseline != "none"
