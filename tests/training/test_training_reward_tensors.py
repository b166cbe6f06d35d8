"""From scores to rewards: missing scores, truncated completions, and a KL penalty in the reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from flatpeak.errors import UserError
from flatpeak.functional.advantages import group_advantages
from flatpeak.training.batch import collate
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, ObjectiveConfig
from flatpeak.training.reward_tensors import RewardTensors, informative, kl_penalty_N, reward_tensors
from flatpeak.types import Group, Score, Scores
from support.models import EOS
from support.training import completion, make_batch, make_trainer, prompt, tiny_policy

LIMIT = 10
LENGTHS = [(5, 6, 8, 10), (10, 9, 7, 3)]
"""Those of length 10 are cut at the limit."""
TRUNCATED = [[False, False, False, True], [True, False, False, False]]
REWARDS: list[list[Score]] = [[1.0, 0.0, 0.5, 1.0], [2.0, None, -1.0, 0.25]]


def make_groups(lengths: Sequence[Sequence[int]] = LENGTHS) -> list[Group]:
    return [
        Group(
            prompt=prompt(f"group {index}", (3, 4)),
            completions=tuple(completion([5] * (n - 1) + [5 if n == LIMIT else EOS], limit=LIMIT) for n in row),
        )
        for index, row in enumerate(lengths)
    ]


def shape(
    rewards: list[list[Score]] = REWARDS,
    *,
    lengths: Sequence[Sequence[int]] = LENGTHS,
    group_baseline: bool = True,
    **settings: Any,
) -> RewardTensors:
    return reward_tensors(
        make_groups(lengths),
        Scores(total=rewards, parts={}),
        ObjectiveConfig(**settings),
        max_new_tokens=LIMIT,
        group_baseline=group_baseline,
    )


VALID = [[True, True, True, True], [True, False, True, True]]


@pytest.mark.parametrize("value", [1e300, -1.1e12, float("inf"), float("nan")])
def test_a_total_that_cannot_be_standardized_is_refused_by_name(value: float) -> None:
    rewards: list[list[Score]] = [[1.0, 0.0, 0.5, 1.0], [2.0, None, value, 0.25]]
    with pytest.raises(UserError, match=r"total reward of completion 2 of prompt .* at most 1e\+12 either way"):
        shape(rewards)


def test_the_largest_total_is_standardized_without_overflow() -> None:
    rewards = shape([[1e12, -1e12, 0.0, 0.0], [2.0, None, -1.0, 0.25]])
    advantages_PG = group_advantages(rewards.rewards_PG, valid_PG=rewards.valid_PG)
    assert advantages_PG[0].tolist() == pytest.approx([(3 / 2) ** 0.5, -((3 / 2) ** 0.5), 0.0, 0.0])


def test_the_fixtures_are_truncated_where_they_say_so() -> None:
    reasons = [[c.finish_reason == "length" for c in group.completions] for group in make_groups()]
    assert reasons == TRUNCATED


def test_keep_trains_on_truncated_completions_as_they_are() -> None:
    shaped = shape(truncated="keep")
    assert shaped.rewards_PG.tolist() == [[1.0, 0.0, 0.5, 1.0], [2.0, 0.0, -1.0, 0.25]]
    assert shaped.valid_PG.tolist() == VALID
    assert shaped.trained_PG.tolist() == VALID


def test_mask_takes_them_out_of_the_loss_and_leaves_them_in_the_baseline() -> None:
    shaped = shape(truncated="mask")
    assert shaped.rewards_PG.tolist() == [[1.0, 0.0, 0.5, 1.0], [2.0, 0.0, -1.0, 0.25]]
    assert shaped.valid_PG.tolist() == VALID
    assert shaped.trained_PG.tolist() == [[True, True, True, False], [False, False, True, True]]


def test_zero_reward_replaces_their_score() -> None:
    shaped = shape(truncated="zero_reward")
    assert shaped.rewards_PG.tolist() == [[1.0, 0.0, 0.5, 0.0], [0.0, 0.0, -1.0, 0.25]]
    assert shaped.trained_PG.tolist() == VALID


def test_zero_reward_does_not_give_a_missing_score_a_value() -> None:
    shaped = shape([[1.0, 0.0, 0.5, None], [1.0, 0.0, 0.5, 0.5]], truncated="zero_reward")
    assert shaped.valid_PG.tolist() == [[True, True, True, False], [True] * 4]


def test_soft_penalty_grows_over_the_buffer_and_reaches_one_at_the_limit() -> None:
    # L - B = 6: lengths 5 6 8 10 cost 0 0 2/4 4/4, and 10 9 7 3 cost 4/4 (3/4, but missing) 1/4 0.
    shaped = shape(truncated="soft_penalty", overlong_buffer=4)
    assert shaped.rewards_PG.tolist() == [[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, -1.25, 0.25]]
    assert shaped.valid_PG.tolist() == VALID
    assert shaped.trained_PG.tolist() == VALID


def test_the_soft_penalty_of_a_completion_beyond_the_limit_stays_one() -> None:
    shaped = shape([[0.0, 0.0]], lengths=[(11, 14)], truncated="soft_penalty", overlong_buffer=4)
    assert shaped.rewards_PG.tolist() == [[-1.0, -1.0]]


def test_missing_scores_are_not_valid_and_never_a_zero_reward() -> None:
    shaped = shape([[0.0, None, 1.0, None], [None, None, None, None]])
    assert shaped.valid_PG.tolist() == [[True, False, True, False], [False] * 4]
    assert shaped.trained_PG.tolist() == shaped.valid_PG.tolist()


@pytest.mark.parametrize(("group_baseline", "valid"), [(True, False), (False, True)])
def test_one_valid_score_is_missing_under_a_group_baseline_only(group_baseline: bool, valid: bool) -> None:
    shaped = shape([[None, 1.0, None, None], [1.0, 0.0, None, None]], group_baseline=group_baseline)
    assert shaped.valid_PG.tolist() == [[False, valid, False, False], [True, True, False, False]]


def test_whole_number_and_boolean_scores_are_rewards_like_any_other() -> None:
    shaped = shape([[1, 0, 3, 0], [True, False, None, True]])
    assert shaped.rewards_PG.dtype == torch.float32
    assert shaped.rewards_PG.tolist() == [[1.0, 0.0, 3.0, 0.0], [1.0, 0.0, 0.0, 1.0]]


def test_groups_inform_if_two_valid_rewards_differ() -> None:
    rewards_PG = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.2, 1.2, 1.2]])
    valid_PG = torch.tensor([[True] * 3, [True] * 3, [True, True, False], [True, False, False], [True] * 3])
    assert informative(rewards_PG, valid_PG).tolist() == [False, True, False, False, False]


def test_a_group_without_valid_rewards_does_not_inform() -> None:
    assert informative(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool)).tolist() == [False]


def test_the_kl_penalty_of_a_completion_is_the_sum_over_its_tokens() -> None:
    batch = replace(
        make_batch([2, 1, 3], prompts=[(3,)], prompt_N=[0, 0, 0]),
        reference_logprobs_T=torch.tensor([-1.5, -1.0, -0.5, -2.0, -1.25, -3.0]),
    )
    logprobs_T = torch.tensor([-1.0, -2.0, -0.5, -1.0, -1.0, -3.0])
    k1 = kl_penalty_N(batch, logprobs_T, KLConfig(estimator="k1", coefficient=0.5, placement="reward"))
    assert k1.tolist() == [0.5 * (0.5 - 1.0), 0.0, 0.5 * (1.0 + 0.25)]
    k2 = kl_penalty_N(batch, logprobs_T, KLConfig(estimator="k2", coefficient=0.5, placement="reward"))
    assert k2.tolist() == [0.5 * (0.125 + 0.5), 0.0, 0.5 * (0.5 + 0.03125)]
    k3 = kl_penalty_N(batch, logprobs_T, KLConfig(estimator="k3", coefficient=0.5, placement="reward"))
    # exp(-0.5) - 0.5 = 0.10653, exp(1) - 2 = 0.71828; exp(-1) = 0.36788, exp(-0.25) - 0.75 = 0.02880.
    assert k3.tolist() == pytest.approx([0.5 * (0.106531 + 0.718282), 0.0, 0.5 * (0.367879 + 0.028801)], abs=1e-6)


def test_kl_in_the_reward_is_taken_off_before_the_baseline() -> None:
    groups = make_groups([(1, 2, 1), (2, 1, 2)])
    rewards: list[list[Score]] = [[1.0, 0.0, 0.0], [None, 0.5, 0.5]]
    shaped = reward_tensors(
        groups, Scores(total=rewards, parts={}), ObjectiveConfig(), max_new_tokens=LIMIT, group_baseline=True
    )
    # log p - log ref of the tokens of the five valid completions: sums 1, 1, -2 | 3, 0.
    distances_T = torch.tensor([1.0, 0.5, 0.5, -2.0, 3.0, 0.5, -0.5])
    trainer = make_trainer(
        tiny_policy(),
        groups,
        {},
        max_new_tokens=LIMIT,
        kl=KLConfig(coefficient=0.1, estimator="k1", placement="reward"),
        advantage=AdvantageConfig(scale="none"),
    )
    batch = collate(groups, shaped.valid_PG, device=torch.device("cpu"))
    logprobs_T = trainer.learner.score(trainer.learner.policy, batch)
    advantages_PG, _ = trainer.advantages(shaped, replace(batch, reference_logprobs_T=logprobs_T - distances_T))
    # Rewards 0.9, -0.1, 0.2 with mean 1/3, and 0.2, 0.5 with mean 0.35.
    expected = [[0.9 - 1 / 3, -0.1 - 1 / 3, 0.2 - 1 / 3], [0.0, -0.15, 0.15]]
    torch.testing.assert_close(advantages_PG, torch.tensor(expected), rtol=0, atol=1e-6)


def test_the_kl_of_the_loss_is_not_taken_off_the_reward() -> None:
    groups = make_groups([(1, 1)])
    trainer = make_trainer(
        tiny_policy(),
        groups,
        {"group 0": (1.0, 0.0)},
        max_new_tokens=LIMIT,
        kl=KLConfig(coefficient=0.1),
        advantage=AdvantageConfig(scale="none"),
        reference=tiny_policy(seed=5),
    )
    trainer.train_step(1)
    assert trainer.recorder.advantages == {"group 0": [0.5, -0.5]}
