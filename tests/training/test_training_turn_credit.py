"""Credit by turn: returns of turns, and each token's advantage, in groups of episodes written by hand.

`EPISODES` is one group of three: rewards of turns (1, 0, 2), (0, 1) and (None), so that two have a second turn and one
has a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.pipeline.evaluators import SampledLoss
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, ObjectiveConfig
from flatpeak.training.reward_tensors import RewardTensors
from flatpeak.training.trainer import Trainer
from flatpeak.types import Completion, Group, Score, Scores, Turn
from support.training import make_trainer, prompt, tiny_policy

LIMIT = 40
SAMPLED, ADDED = 2, 1
"""Tokens of each turn, and tokens that are added after all but the last one."""
Rewards = Sequence[Score]
EPISODES: tuple[Rewards, ...] = ((1.0, 0.0, 2.0), (0.0, 1.0), (None,))
TOTALS: list[Score] = [3.0, 1.0, 0.0]
PLAIN = AdvantageConfig(scale="none")


def episode(rewards: Rewards, *, finish_reason: Any = "stop", seed: int = 0) -> Completion:
    """An episode with a turn for each reward."""
    last = len(rewards) - 1
    turns = tuple(
        Turn(sampled=SAMPLED, added=ADDED * (place < last), reward=reward) for place, reward in enumerate(rewards)
    )
    trained = tuple(own for turn in turns for own in (*[True] * turn.sampled, *[False] * turn.added))
    return Completion(
        token_ids=tuple(3 + (7 * place + seed) % 20 for place in range(len(trained))),
        logprobs=(0.0,) * len(trained),
        finish_reason=finish_reason,
        trained=trained,
        turns=turns,
        reward=float(sum(reward or 0.0 for reward in rewards)),
    )


def group(*episodes: Rewards | Completion, name: str = "a") -> Group:
    completions = tuple(one if isinstance(one, Completion) else episode(one) for one in episodes)
    return Group(prompt=prompt(name, (4, 5)), completions=completions)


def trainer_of(
    groups: Sequence[Group], advantage: AdvantageConfig = PLAIN, *, credit: str = "turn", **settings: Any
) -> Trainer:
    config = advantage.model_copy(update={"credit": credit})
    return make_trainer(tiny_policy(), groups, {}, max_new_tokens=LIMIT, advantage=config, **settings)


def scores_of(totals: list[list[Score]], weight: float = 1.0) -> Scores:
    return Scores(total=totals, parts={}, turn_weight=weight)


def tokens_of(
    groups: Sequence[Group],
    totals: list[list[Score]],
    advantage: AdvantageConfig = PLAIN,
    *,
    weight: float = 1.0,
    credit: str = "turn",
    **settings: Any,
) -> tuple[list[float], list[list[float]]]:
    """The advantage of each token, and that of each completion, as logged."""
    trainer = trainer_of(groups, advantage, credit=credit, **settings)
    rewards = trainer.reward_tensors(groups, scores_of(totals, weight))
    advantages_PG, advantages_T = trainer.advantages(rewards, trainer.pack(groups, rewards))
    return advantages_T.tolist(), advantages_PG.tolist()


def by_token(*turns: Sequence[float]) -> list[float]:
    """The advantages of the turns of each episode, for each of their tokens."""
    tokens = []
    for own in turns:
        for place, advantage in enumerate(own):
            tokens += [advantage] * (SAMPLED + ADDED * (place < len(own) - 1))
    return tokens


def returns_of(rewards: RewardTensors) -> Tensor:
    assert rewards.turns is not None
    return rewards.turns.returns_PGK


def test_each_turn_is_compared_with_the_same_turn_of_the_group() -> None:
    # Returns (3, 2, 2), (1, 1), (0). First turns: mean 4/3. Second: (2, 1), mean 3/2. Third: alone.
    tokens, logged = tokens_of([group(*EPISODES)], [TOTALS])
    turns = [[5 / 3, 1 / 2, 0.0], [-1 / 3, -1 / 2], [-4 / 3]]
    assert tokens == pytest.approx(by_token(*turns))
    # Each turn has as many trained tokens.
    assert logged == [pytest.approx([np.mean(own) for own in turns])]


def test_baseline_and_scale_are_those_of_the_recipe() -> None:
    left_out = AdvantageConfig(baseline="leave_one_out", scale="none")
    tokens, _ = tokens_of([group(*EPISODES)], [TOTALS], left_out)
    assert tokens == pytest.approx(by_token([3 - 1 / 2, 2 - 1, 0.0], [1 - 3 / 2, 1 - 2], [0 - 2]))
    tokens, _ = tokens_of([group(*EPISODES)], [TOTALS], AdvantageConfig(eps=0.0))
    # Standard deviations: of (3, 1, 0) sqrt(7/3), of (2, 1) sqrt(1/2).
    first, second = (7 / 3) ** 0.5, (1 / 2) ** 0.5
    scaled = [[5 / 3 / first, 0.5 / second, 0.0], [-1 / 3 / first, -0.5 / second], [-4 / 3 / first]]
    assert tokens == pytest.approx(by_token(*scaled))
    raw = AdvantageConfig(baseline="none", scale="none")
    assert tokens_of([group(*EPISODES)], [TOTALS], raw)[0] == by_token([3, 2, 2], [1, 1], [0])


def test_the_standard_deviation_of_a_step_is_that_of_all_its_turns_of_the_same_number() -> None:
    groups = [group((1.0, 1.0), (0.0, 0.0)), group((0.0, 4.0), (0.0, 2.0), name="b")]
    tokens, _ = tokens_of(groups, [[2.0, 0.0], [4.0, 2.0]], AdvantageConfig(scale="batch_std", eps=0.0))
    first, second = np.std([2, 0, 4, 2], ddof=1), np.std([1, 0, 4, 2], ddof=1)
    expected = by_token(*[[1 / first, 0.5 / second], [-1 / first, -0.5 / second]])
    expected += by_token([1 / first, 1 / second], [-1 / first, -1 / second])
    assert tokens == pytest.approx(expected)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
def test_first_turns_have_the_advantage_of_their_episodes_bit_for_bit(baseline: Any, scale: Any) -> None:
    generator = np.random.default_rng(0)
    groups, totals = [], []
    for name in "abc":
        rows = [generator.normal(size=generator.integers(1, 5)).tolist() for _ in range(4)]
        groups.append(group(*rows, name=name))
        totals.append([0.7 * float(sum(row)) + 0.3 * index for index, row in enumerate(rows)])
    # Added from the other end, these are 2.8e-17 and not 5.6e-17.
    groups.append(group((0.1, 0.2, -0.3), (0.0,), (0.0,), (0.0,), name="d"))
    totals.append([0.7 * (0.1 + 0.2 - 0.3), 0.0, 0.0, 0.0])
    config = AdvantageConfig(baseline=baseline, scale=scale)
    turns, episodes = (tokens_of(groups, totals, config, weight=0.7, credit=one)[0] for one in ("turn", "episode"))
    place = 0
    for one in (completion for each in groups for completion in each.completions):
        assert turns[place : place + SAMPLED] == episodes[place : place + SAMPLED]
        place += len(one.token_ids)
    assert turns != episodes


@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
def test_with_rewards_in_last_turns_alone_and_equal_numbers_of_turns_credit_by_turn_is_that_by_episode(
    scale: Any,
) -> None:
    groups = [
        group((None, 0.0, 1.1), (0.0, None, 0.3), (0.0, 0.0, None)),
        group((0.0, 0.0, 2.0), (0.0, 0.0, 0.7), (0.0, 0.0, 0.1), name="b"),
    ]
    totals: list[list[Score]] = [[1.1, 0.3, 0.0], [2.0, 0.7, 0.1]]
    config = AdvantageConfig(scale=scale)
    assert tokens_of(groups, totals, config)[0] == tokens_of(groups, totals, config, credit="episode")[0]


def test_without_a_baseline_rewards_in_last_turns_alone_need_no_equal_numbers_of_turns() -> None:
    groups, raw = [group((0.0, 0.0, 1.5), (0.3,), (None, 2.0))], AdvantageConfig(baseline="none", scale="none")
    totals: list[list[Score]] = [[1.5, 0.3, 2.0]]
    assert tokens_of(groups, totals, raw)[0] == tokens_of(groups, totals, raw, credit="episode")[0]
    config = AdvantageConfig(scale="none")  # against the mean, the third turn has nothing to be compared with
    assert tokens_of(groups, totals, config)[0] != tokens_of(groups, totals, config, credit="episode")[0]


def test_what_else_is_in_the_total_is_given_at_the_end_and_counts_in_every_turn() -> None:
    # 0.5 * turns + another component of 4, 0, 2.
    trainer = trainer_of([group(*EPISODES)])
    totals: list[list[Score]] = [[0.5 * 3 + 4, 0.5 * 1, 2.0]]
    returns_PGK = returns_of(trainer.reward_tensors([group(*EPISODES)], scores_of(totals, 0.5)))
    assert returns_PGK.tolist() == [[[5.5, 5.0, 5.0], [0.5, 0.5, 0.0], [2.0, 2.0, 2.0]]]
    tokens, _ = tokens_of([group(*EPISODES)], totals, weight=0.5)
    assert tokens == pytest.approx(by_token([5.5 - 8 / 3, 2.25, 0.0], [0.5 - 8 / 3, -2.25], [2 - 8 / 3]))


def test_equal_rewards_to_come_teach_nothing_whatever_came_before_and_whatever_the_weight() -> None:
    rows = [(0.1, 0.2, -0.2), (0.7, 0.2, -0.2), (1e3, 0.2, -0.2)]
    totals: list[list[Score]] = [[0.7 * episode(row).reward + 0.1 for row in rows]]  # type: ignore[operator]
    tokens, _ = tokens_of([group(*rows)], totals, AdvantageConfig(eps=0.0), weight=0.7)
    for place in range(3):
        own = tokens[8 * place : 8 * place + 8]
        assert own[3:] == [0.0] * 5
        assert own[0] != 0.0


def test_an_extreme_group_leaves_the_others_as_they_are() -> None:
    # The largest total that is trained on, in one group; the other has the values of the first test.
    extreme = group((1e12, -1e12), (-1e12, 1e12), (1e12,), name="b")
    tokens, _ = tokens_of([group(*EPISODES), extreme], [TOTALS, [0.0, 0.0, 1e12]], AdvantageConfig(eps=0.0))
    alone, _ = tokens_of([group(*EPISODES)], [TOTALS], AdvantageConfig(eps=0.0))
    assert tokens[: len(alone)] == alone
    half = 0.5**0.5
    third = 3**-0.5
    expected = by_token([-third, -half], [-third, half], [2 * third])
    assert tokens[len(alone) :] == pytest.approx(expected)


def test_rewards_of_turns_that_are_too_large_are_refused_even_where_they_cancel() -> None:
    groups = [group((1e300, -1e300), (0.0, 0.0))]
    with pytest.raises(UserError, match=r"from one turn on, .* 1e\+12 either way: bound what step of the environment"):
        tokens_of(groups, [[0.0, 0.0]])
    assert tokens_of(groups, [[0.0, 0.0]], credit="episode")[1] == [[0.0, 0.0]]


def test_a_step_without_any_reward_has_no_tokens() -> None:
    assert tokens_of([group(*EPISODES)], [[None, None, None]]) == ([], [[0.0, 0.0, 0.0]])


def test_missing_rewards_and_failed_episodes_are_in_no_baseline_and_no_loss() -> None:
    failed = replace(episode((5.0, None)), reward=None)
    tokens, logged = tokens_of([group(*EPISODES, failed)], [[*TOTALS, None]])
    assert tokens == tokens_of([group(*EPISODES)], [TOTALS])[0]
    assert logged[0][3] == 0.0
    # A second turn whose only companion failed is alone.
    tokens, _ = tokens_of([group((0.0, 1.0), (2.0,), failed)], [[1.0, 2.0, None]])
    assert tokens == by_token([-0.5, 0.0], [0.5])


def test_a_group_with_one_reward_is_missing_under_a_baseline() -> None:
    groups = [group(*EPISODES), group((1.0, 1.0), (0.0,), (0.0,), name="b")]
    tokens, logged = tokens_of(groups, [TOTALS, [2.0, None, None]])
    assert tokens == tokens_of([group(*EPISODES)], [TOTALS])[0]
    assert logged[1] == [0.0] * 3


def test_completions_without_turns_keep_their_advantage() -> None:
    bare = [replace(one, turns=(), reward=None) for one in group(*EPISODES).completions]
    totals: list[list[Score]] = [[1.0, 0.0, 0.5]]
    one, other = (tokens_of([group(*bare)], totals, weight=0.0, credit=credit)[0] for credit in ("turn", "episode"))
    assert one == other
    empty = [replace(bare[0], token_ids=(), logprobs=(), trained=None), *bare[1:]]
    one, other = (tokens_of([group(*empty)], totals, weight=0.0, credit=credit)[0] for credit in ("turn", "episode"))
    assert one == other
    assert len(one) == len(bare[1].token_ids) + len(bare[2].token_ids)


def test_a_reward_that_is_zeroed_for_a_cut_is_taken_away_at_the_end() -> None:
    cut = [group(episode((1.0, 0.0), finish_reason="length"), (0.0, 2.0))]
    trainer = trainer_of(cut, objective=ObjectiveConfig(truncated="zero_reward"))
    # The cut takes away the 1 that the first turn earned: to the second turn it costs that.
    rewards = trainer.reward_tensors(cut, scores_of([[1.0, 2.0]]))
    assert returns_of(rewards).tolist() == [[[0.0, -1.0], [2.0, 2.0]]]
    assert rewards.rewards_PG.tolist() == [[0.0, 2.0]]


def test_a_punishment_of_length_and_a_kl_in_the_reward_count_in_every_turn() -> None:
    groups = [group(*EPISODES)]
    soft = ObjectiveConfig(truncated="soft_penalty", overlong_buffer=LIMIT - 1)
    rewards = trainer_of(groups, objective=soft).reward_tensors(groups, scores_of([TOTALS]))
    # 6, 4 and 2 trained tokens, of which all but the first are in the buffer.
    over = np.array([5, 3, 1]) / (LIMIT - 1)
    expected = np.array([[3, 2, 2], [1, 1, 0], [0, 0, 0]]) - over[:, None]
    np.testing.assert_allclose(returns_of(rewards)[0].numpy(), expected, rtol=1e-6)
    assert returns_of(rewards)[..., 0].tolist() == rewards.rewards_PG.tolist()

    kl = KLConfig(coefficient=0.5, estimator="k2", placement="reward")
    trainer = trainer_of(groups, kl=kl, reference=tiny_policy(seed=1))
    rewards = trainer.reward_tensors(groups, scores_of([TOTALS]))
    completions = trainer.pack(groups, rewards)
    own_T = trainer.learner.score(trainer.learner.policy, completions)
    assert completions.reference_logprobs_T is not None
    assert completions.trained_T is not None
    kl_T = ((own_T - completions.reference_logprobs_T) ** 2 / 2 * completions.trained_T).double()
    cost = [0.5 * float(part.sum()) for part in kl_T.split([8, 5, 2])]
    assert min(cost) > 1e-3
    _, advantages_T = trainer.advantages(rewards, completions)
    returns = [[total - spent for total in own] for own, spent in zip([[3, 2, 2], [1, 1], [0]], cost, strict=True)]
    first, second = np.mean([own[0] for own in returns]), np.mean([own[1] for own in returns[:2]])
    expected_T = by_token(
        [returns[0][0] - first, returns[0][1] - second, 0.0],
        [returns[1][0] - first, returns[1][1] - second],
        [returns[2][0] - first],
    )
    assert advantages_T.tolist() == pytest.approx(expected_T, abs=1e-5)


def test_whitening_and_limits_act_on_turns() -> None:
    groups, turns = [group(*EPISODES)], by_token([5 / 3, 1 / 2, 0.0], [-1 / 3, -1 / 2], [-4 / 3])
    trained = [own for one in groups[0].completions for own in one.trained or ()]
    counted = np.array(turns)[trained]
    tokens, _ = tokens_of(groups, [TOTALS], AdvantageConfig(scale="none", whiten="tokens", eps=0.0))
    white = np.where(trained, (np.array(turns) - counted.mean()) / counted.std(ddof=1), 0.0)
    np.testing.assert_allclose(tokens, white, rtol=1e-5, atol=1e-6)
    tokens, _ = tokens_of(groups, [TOTALS], AdvantageConfig(scale="none", limit=0.4))
    assert tokens == pytest.approx(np.clip(turns, -0.4, 0.4).tolist())
    # By the spread of the turns of the same number: of (5/3, -1/3, -4/3) sqrt(7/3), of (1/2, -1/2) sqrt(1/2).
    tokens, _ = tokens_of(groups, [TOTALS], AdvantageConfig(scale="none", limit_spreads=0.5))
    first, second = 0.5 * (7 / 3) ** 0.5, 0.5 * 0.5**0.5
    assert tokens == pytest.approx(by_token([first, second, 0.0], [-1 / 3, -second], [-first]))


def test_a_kl_to_go_is_subtracted_from_each_token() -> None:
    groups = [group(*EPISODES)]
    kl = KLConfig(coefficient=0.5, estimator="k2", placement="reward_to_go")
    plain, _ = tokens_of(groups, [TOTALS])
    by_turn, _ = tokens_of(groups, [TOTALS], kl=kl, reference=tiny_policy(seed=1))
    by_episode, _ = tokens_of(groups, [TOTALS], kl=kl, reference=tiny_policy(seed=1), credit="episode")
    without, _ = tokens_of(groups, [TOTALS], credit="episode")
    penalties = np.array(without) - np.array(by_episode)
    assert penalties.min() >= 0 < penalties.max()
    np.testing.assert_allclose(np.array(plain) - np.array(by_turn), penalties, rtol=1e-4, atol=1e-6)


def test_groups_inform_by_their_turns_where_totals_are_equal() -> None:
    groups = [group((1.0, 0.0), (0.0, 1.0)), group((1.0, 0.0), (1.0, 0.0), name="b"), group((1.0,), (0, 1), name="c")]
    scores = scores_of([[1.0, 1.0]] * 3)
    trainer = trainer_of(groups)
    assert trainer.reward_tensors(groups, scores).informative_P.tolist() == [True, False, False]
    assert trainer.has_signal(groups, scores) == [True, False, False]
    assert trainer_of(groups, credit="episode").has_signal(groups, scores) == [False] * 3
    # And what is logged says so, so that no notice of steps without signal is given.
    _, logged = tokens_of(groups, [[1.0, 1.0]] * 3)
    assert logged == [[-0.25, 0.25], [0.0, 0.0], [0.0, 0.0]]


def test_cut_episodes_that_are_masked_stay_in_the_baselines_of_turns() -> None:
    cut = episode((0.0, 3.0), finish_reason="length")
    groups = [group(cut, (1.0, 1.0), (0.0, 0.0))]
    totals: list[list[Score]] = [[3.0, 2.0, 0.0]]
    mask = ObjectiveConfig(truncated="mask")
    tokens, _ = tokens_of(groups, totals, objective=mask)
    turns = [[4 / 3, 5 / 3], [1 / 3, -1 / 3], [-5 / 3, -4 / 3]]
    assert tokens == pytest.approx(by_token(*turns))
    trainer = trainer_of(groups, objective=mask)
    rewards = trainer.reward_tensors(groups, scores_of(totals))
    completions = trainer.pack(groups, rewards)
    _, advantages_T = trainer.advantages(rewards, completions)
    ((batch,),) = trainer.minibatches(1, completions, rewards, advantages_T)
    assert batch.advantages_T.tolist() == pytest.approx(by_token(*turns[1:]))


def test_the_loss_of_sharpness_has_the_advantages_of_training() -> None:
    groups = [group(*EPISODES, episode((9.0, 9.0), finish_reason="length"))]
    totals: list[list[Score]] = [[*TOTALS, 18.0]]
    objective = ObjectiveConfig(truncated="mask")
    trainer = trainer_of(groups, objective=objective)
    loss = SampledLoss(
        policy=trainer.learner.policy,
        objective=trainer.learner.objective,
        advantages=trainer.group_advantages,
        temperature=1.0,
        max_new_tokens=LIMIT,
    )
    tokens, _ = tokens_of(groups, totals, objective=objective)
    assert loss.batch(groups, scores_of(totals)).advantages_T.tolist() == pytest.approx(tokens[:15])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_raises_good_turns_and_lowers_bad_ones_of_one_episode(dtype: torch.dtype) -> None:
    """The first turn of the first episode is good and its second one bad; by episodes both are worth the same."""
    groups = [group(episode((1.0, -1.0)), episode((-1.0, 1.0), seed=5), episode((0.0, 0.0), seed=11))]
    totals: list[list[Score]] = [[0.0, 0.0, 0.0]]
    by_turn, _ = tokens_of(groups, totals)
    assert by_turn == pytest.approx(by_token([0.0, -1.0], [0.0, 1.0], [0.0, 0.0]))
    assert set(tokens_of(groups, totals, credit="episode")[0]) == {0.0}

    policy = tiny_policy()
    policy.model.to(dtype)
    config = PLAIN.model_copy(update={"credit": "turn"})
    plain = ObjectiveConfig(loss="policy_gradient")
    trainer = make_trainer(policy, groups, {}, max_new_tokens=LIMIT, advantage=config, objective=plain)
    rewards = trainer.reward_tensors(groups, scores_of(totals))
    completions = trainer.pack(groups, rewards)
    _, advantages_T = trainer.advantages(rewards, completions)
    before_T = trainer.learner.score(policy, completions)
    for batches in trainer.minibatches(1, completions, rewards, advantages_T):
        trainer.learner.update(*batches, rate=0.2)
    change_T = (trainer.learner.score(policy, completions) - before_T).float()
    second = slice(SAMPLED + ADDED, 2 * SAMPLED + ADDED)
    (first_L, second_L, _) = change_T.split(completions.lengths_N.tolist())
    assert float(first_L[second].sum()) < -0.01
    assert float(second_L[second].sum()) > 0.01
