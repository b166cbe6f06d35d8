from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from flatpeak.rollout.config import RolloutConfig
from flatpeak.training.collect import Rollouts, collect
from flatpeak.training.curriculum import Phase
from flatpeak.training.data import Stream
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams, Score, Scores

ALIVE, DEAD = [0.0, 1.0], [1.0, 1.0]


class RecordingSampler:
    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int, int]] = []

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        self.calls.append(([prompt.id for prompt in prompts], group_size, seed))
        completion = Completion(token_ids=(1,), logprobs=(-1.0,), finish_reason="stop")
        return [Group(prompt=prompt, completions=(completion,) * group_size) for prompt in prompts]

    @property
    def drawn(self) -> list[str]:
        return [id for ids, _, _ in self.calls for id in ids]


def scripted(table: Callable[[str], list[Score]]) -> Callable[[Sequence[Group]], Scores]:
    def reward(groups: Sequence[Group]) -> Scores:
        rows = [table(group.prompt.id) for group in groups]
        return Scores(total=rows, parts={"correctness": rows, "length": [[2.0 * len(rows)] * 2 for _ in rows]})

    return reward


def run(
    table: Callable[[str], list[Score]], *, size: int = 20, wanted: int = 3, max_resamples: int = 0, cursor: int = 0
) -> tuple[Rollouts, RecordingSampler]:
    prompts = [
        Prompt(
            id=f"p{index}",
            token_ids=(2,),
            text="same text",
            example=Example(id=f"p{index}", question="q", gold="g", columns={}),
        )
        for index in range(size)
    ]
    phase = Phase(
        task="t", prompts=Stream(items=prompts, seed=1), reward=scripted(table), accuracy="correctness", max_steps=None
    )
    sampler = RecordingSampler()
    rollouts = collect(
        sampler,
        phase,
        RolloutConfig(prompts_per_step=wanted, group_size=2),
        cursor=cursor,
        seed=9,
        max_resamples=max_resamples,
    )
    return rollouts, sampler


def ids(rollouts: Rollouts) -> list[str]:
    return [group.prompt.id for group in rollouts.groups]


def order(count: int) -> list[str]:
    """The order in which the prompts come."""
    return run(lambda id: ALIVE, wanted=count)[1].drawn


def test_without_a_budget_groups_are_kept_whatever_their_rewards() -> None:
    rollouts, sampler = run(lambda id: DEAD)
    assert (ids(rollouts), rollouts.drawn, rollouts.cursor) == (order(3), 3, 3)
    assert len(sampler.calls) == 1


def test_dead_groups_are_replaced_by_the_next_prompts() -> None:
    first, second, third, fourth, fifth = order(5)
    rollouts, sampler = run(lambda id: DEAD if id in (first, third) else ALIVE, max_resamples=5)
    assert [called for called, _, _ in sampler.calls] == [[first, second, third], [fourth, fifth]]
    assert ids(rollouts) == [second, fourth, fifth]
    assert (rollouts.drawn, rollouts.cursor) == (5, 5)
    assert rollouts.scores.total == [ALIVE] * 3


def test_what_the_budget_cannot_replace_stays() -> None:
    names = order(9)
    rollouts, _ = run(lambda id: ALIVE if id == names[4] else DEAD, max_resamples=1)
    assert ids(rollouts) == [names[4], names[0], names[1]]
    assert rollouts.scores.total == [ALIVE, DEAD, DEAD]
    assert (rollouts.drawn, rollouts.cursor) == (6, 6)


def test_the_scores_of_every_part_go_with_their_group() -> None:
    names = order(5)
    rollouts, _ = run(lambda id: DEAD if id == names[0] else [0.0, float(id[1:]) + 1], max_resamples=3)
    assert rollouts.scores.parts["correctness"] == [[0.0, float(id[1:]) + 1] for id in ids(rollouts)]
    # The part "length" counts the groups of its call: two of the first round, one of the second.
    assert rollouts.scores.parts["length"] == [[6.0, 6.0], [6.0, 6.0], [2.0, 2.0]]


@pytest.mark.parametrize("row", [[None, None], [None, 1.0], [1.0, 1.0]])
def test_a_group_without_two_different_known_rewards_is_replaced(row: list[Score]) -> None:
    names = order(4)
    rollouts, _ = run(lambda id: row if id == names[1] else ALIVE, max_resamples=1)
    assert ids(rollouts) == [names[0], names[2], names[3]]


def test_every_round_has_randomness_of_its_own() -> None:
    _, sampler = run(lambda id: DEAD, max_resamples=3)
    assert len({seed for _, _, seed in sampler.calls}) == 4


def test_the_next_step_goes_on_where_the_last_one_ended() -> None:
    rollouts, _ = run(lambda id: ALIVE)
    assert ids(run(lambda id: ALIVE, cursor=rollouts.cursor)[0]) == order(6)[3:]


def test_a_step_longer_than_the_data_makes_groups_with_ids_of_their_own() -> None:
    rollouts, _ = run(lambda id: ALIVE, size=2, wanted=5)
    assert len(set(ids(rollouts))) == 5
    assert {group.prompt.example.id for group in rollouts.groups} == {"p0", "p1"}


def test_groups_of_one_text_are_not_merged() -> None:
    rollouts, _ = run(lambda id: ALIVE)
    assert len({group.prompt.text for group in rollouts.groups}) == 1
    assert len(rollouts.groups) == len(set(ids(rollouts))) == 3
