from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flatpeak.protocols import Sampler
from flatpeak.rewards.numeric_answer import NumberReward
from flatpeak.rewards.reward_set import CallersReward, RewardSet, as_reward
from flatpeak.rollout.config import RolloutConfig
from flatpeak.training import collect as training_collect
from flatpeak.training.collect import Rollouts, collect
from flatpeak.training.config import DynamicSamplingConfig, TrainingConfig
from flatpeak.training.curriculum import Phase, Stream
from flatpeak.training.objective_config import AdvantageConfig, ObjectiveConfig
from flatpeak.training.trainer import Trainer
from flatpeak.training.user_functions import make_advantages
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams, Score, Scores
from support.models import EOS
from support.regularized_training import Repeated
from support.training import FixedSampler, completion, make_trainer, prompt, tiny_policy

ALIVE, DEAD = [0.0, 1.0], [1.0, 1.0]


class RecordingSampler(Sampler):
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


def scripted(table: Callable[[str], list[Score]]) -> CallersReward:
    def reward(groups: Sequence[Group]) -> Scores:
        rows = [table(group.prompt.id) for group in groups]
        return Scores(
            total=rows,
            parts={"correctness": rows, "length": [[2.0 * len(rows)] * 2 for _ in rows]},
            logged={"correctness/number": [float(group.prompt.id[1:].partition("@")[0]) for group in groups]},
        )

    return CallersReward(reward)


def differ(groups: Sequence[Group], scores: Scores) -> list[bool]:
    """Whether each group has two different known scores."""
    return [len({score for score in row if score is not None}) > 1 for row in scores.total]


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
        has_signal=differ,
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


def test_the_pass_rate_is_that_of_all_groups_drawn() -> None:
    names = order(6)
    table: dict[str, list[Score]] = {name: [1.0, 1.0] for name in names}
    table[names[2]], table[names[5]] = [0.0, 1.0], [None, 0.0]
    rollouts, _ = run(lambda id: table[id], max_resamples=1, wanted=3)
    # Three groups, of which one is kept, and two more, of which none is: 9 of 10 right.
    assert (rollouts.drawn, ids(rollouts)) == (5, [names[2], names[0], names[1]])
    assert rollouts.pass_rate == 0.9
    assert run(lambda id: table[id], wanted=6)[0].pass_rate == pytest.approx(9 / 11)
    assert run(lambda id: [None, None])[0].pass_rate == 0.0


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


class StreamingSampler(RecordingSampler):
    """Answers are the group's place in the data, right in one of two completions; the last group comes first."""

    def __init__(self, right: set[str] | None = None) -> None:
        super().__init__()
        self.right = right
        self.streamed = 0

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Group]:
        return [
            Group(prompt=group.prompt, completions=tuple(self._answered(group, place) for place in range(2)))
            for group in super().generate(prompts, **settings)
        ]

    def stream(self, prompts: Sequence[Prompt], **settings: Any) -> Iterator[tuple[int, Group]]:
        self.streamed += 1
        yield from reversed(list(enumerate(self.generate(prompts, **settings))))

    def _answered(self, group: Group, place: int) -> Completion:
        right = place == 0 and (self.right is None or group.prompt.id in self.right)
        return replace(group.completions[place], text=group.prompt.example.gold if right else "0.5")


class AtOnce:
    """Workers without processes: calls are made when they are asked for."""

    def __init__(self) -> None:
        self.graded: list[str] = []

    def submit_each(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], **settings: Any
    ) -> Future[list[Any]]:
        self.graded.append(calls[0][-1][0].prompt.id)
        done: Future[list[Any]] = Future()
        done.set_result([function(*arguments) for arguments in calls])
        return done


def numbered(sampler: RecordingSampler, reward: RewardSet, *, max_resamples: int = 0) -> Rollouts:
    prompts = [
        Prompt(id=f"p{i}", token_ids=(2,), text="", example=Example(id=f"p{i}", question="q", gold=f"{i}"))
        for i in range(20)
    ]
    return collect(
        sampler,
        Phase(task="t", prompts=Stream(items=prompts, seed=1), reward=reward, accuracy="correctness"),
        RolloutConfig(prompts_per_step=3, group_size=2),
        cursor=0,
        seed=9,
        has_signal=differ,
        max_resamples=max_resamples,
    )


def test_groups_are_graded_as_they_come_and_kept_in_order() -> None:
    sampler, workers = StreamingSampler(), AtOnce()
    rollouts = numbered(sampler, as_reward(NumberReward(), name="correctness", workers=workers))  # type: ignore[arg-type]
    assert workers.graded == order(3)[::-1]
    assert ids(rollouts) == order(3)
    assert rollouts.scores == Scores(total=[[1.0, 0.0]] * 3, parts={"correctness": [[1.0, 0.0]] * 3})
    assert sampler.streamed == 1


def test_without_workers_groups_are_graded_once_all_are_sampled() -> None:
    rollouts = numbered(StreamingSampler(), as_reward(NumberReward(), name="correctness"))
    assert ids(rollouts) == order(3)
    assert rollouts.scores.total == [[1.0, 0.0]] * 3


def test_a_sampler_that_does_not_stream_still_has_its_groups_graded_by_workers() -> None:
    workers = AtOnce()
    numbered(RecordingSampler(), as_reward(NumberReward(), name="correctness", workers=workers))  # type: ignore[arg-type]
    assert workers.graded == order(3)


def test_streaming_replaces_the_same_groups() -> None:
    names = order(8)
    for max_resamples in (1, 5):
        plain, streamed = (
            numbered(
                StreamingSampler(right={names[1], names[3], names[6]}),
                as_reward(NumberReward(), name="correctness", workers=workers),  # type: ignore[arg-type]
                max_resamples=max_resamples,
            )
            for workers in (None, AtOnce())
        )
        without_times = {"rollout_seconds": 0.0, "reward_seconds": 0.0}
        assert replace(streamed, **without_times) == replace(plain, **without_times)
    assert ids(streamed) == [names[1], names[3], names[6]]
    assert (streamed.drawn, streamed.cursor) == (7, 7)


def test_grading_while_sampling_counts_as_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(training_collect, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(AtOnce):
        def submit_each(self, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Future[list[Any]]:
            now[0] += 2.0
            return super().submit_each(function, *arguments, **settings)

    def late(completions: list[str]) -> list[float]:
        now[0] += 5.0
        return [0.0, 1.0] * 3

    reward = as_reward({"correctness": NumberReward(), "late": late}, workers=Slow())  # type: ignore[arg-type]
    streamed = numbered(StreamingSampler(), reward)
    assert (streamed.rollout_seconds, streamed.reward_seconds) == (6.0, 5.0)


LIMIT = 4
LONG, SHORT = (5, 5, 5, 5), (5, 5, EOS)
"""The first is cut off."""


def dynamic_trainer(table: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Score]]], **settings: Any) -> Trainer:
    """Two prompts a step and at most three more rounds; `table` has each prompt's completions and their scores."""
    groups = [
        Group(prompt=prompt(name, (3, 4)), completions=tuple(completion(tokens, limit=LIMIT) for tokens in both))
        for name, (*both, _) in table.items()
    ]
    trainer = make_trainer(
        tiny_policy(),
        groups,
        {name: scores for name, (_, _, scores) in table.items()},
        max_new_tokens=LIMIT,
        objective=ObjectiveConfig(**settings),
        training=TrainingConfig(steps=1, dynamic_sampling=DynamicSamplingConfig(max_resamples=3)),
    )
    trainer.sampler = FixedSampler(())
    trainer.sampler.groups = Repeated((group.prompt.id, group) for group in groups)
    stream = Stream(items=tuple(group.prompt for group in groups), seed=0)
    phase = replace(trainer.phases[0], prompts=stream, max_steps=5, until_pass_rate=0.8)
    trainer.phases = (phase, phase)
    trainer.config = replace(trainer.config, rollout=trainer.config.rollout.model_copy(update={"prompts_per_step": 2}))
    return trainer


@pytest.mark.parametrize(
    ("settings", "alive"),
    [
        ({"truncated": "keep"}, {"right, cut": False, "cut, wrong": True, "both cut": True, "both right": False}),
        # Trained as [1, 0], [0, 0], [0, 0] and [1, 1].
        (
            {"truncated": "zero_reward"},
            {"right, cut": True, "cut, wrong": False, "both cut": False, "both right": False},
        ),
        # The cut ones lose 1, so [1, 0], [0, 0], [0, -1] and [1, 1].
        (
            {"truncated": "soft_penalty", "overlong_buffer": 1},
            {"right, cut": True, "cut, wrong": False, "both cut": True, "both right": False},
        ),
        # As scored, but nothing of a group is trained on where all of it was cut.
        ({"truncated": "mask"}, {"right, cut": False, "cut, wrong": True, "both cut": False, "both right": False}),
    ],
    ids=["keep", "zero_reward", "soft_penalty", "mask"],
)
def test_dynamic_sampling_looks_at_rewards_as_they_are_trained(settings: Any, alive: dict[str, bool]) -> None:
    trainer = dynamic_trainer(
        {
            "right, cut": (SHORT, LONG, [1.0, 1.0]),
            "cut, wrong": (LONG, SHORT, [1.0, 0.0]),
            "both cut": (LONG, LONG, [1.0, 0.0]),
            "both right": (SHORT, SHORT, [1.0, 1.0]),
        },
        **settings,
    )
    wanted = {name for name, has_signal in alive.items() if has_signal}
    assert set(ids(trainer.collect(1))[: len(wanted)]) == wanted  # what stays although it is dead comes last


def test_dynamic_sampling_keeps_groups_whose_components_differ_where_the_advantages_look_at_them() -> None:
    both = (SHORT, SHORT, [1.0, 1.0])
    trainer = dynamic_trainer({"a": both, "b": both})
    groups = [Group(prompt=prompt("a", (3, 4)), completions=(completion(SHORT, limit=LIMIT),) * 2)]
    scores = Scores(total=[[1.0, 1.0]], parts={"correctness": [[1.0, 0.0]], "style": [[0.0, 1.0]]})
    assert trainer.has_signal(groups, scores) == [False]
    rewards: Any = SimpleNamespace(weights={"correctness": 1.0, "style": 0.5})
    trainer.phases = tuple(replace(phase, reward=rewards) for phase in trainer.phases)
    trainer.group_advantages = make_advantages(AdvantageConfig(function="gdpo"))
    assert trainer.has_signal(groups, scores) == [True]


def test_a_greedy_completion_is_rewarded_as_completions_are_trained() -> None:
    trainer = dynamic_trainer({"a": (LONG, SHORT, [1.0, 0.5])}, truncated="zero_reward")
    trainer.group_advantages = make_advantages(AdvantageConfig(function="remax"), group_size=2)
    assert trainer.collect(1).greedy == [0.0, 0.0]  # right, and cut


def test_a_curriculum_moves_on_by_the_pass_rate_of_all_groups_drawn() -> None:
    solved = (SHORT, SHORT, [1.0, 1.0])
    trainer = dynamic_trainer({"a": (SHORT, SHORT, [0.0, 1.0]), "b": solved, "c": solved, "d": solved})
    metrics = trainer.train_step(1)
    assert metrics["groups/drawn"] == 5  # one of them twice
    assert metrics["reward/correctness"] == 0.75  # of the two groups that stay
    assert trainer.progression.phase == 1  # 9 of 10 are right, and 0.8 was asked for


def test_logged_values_are_averaged_over_the_step_with_replaced_groups() -> None:
    dead = set(order(3)[1:])
    rollouts, sampler = run(lambda id: DEAD if id in dead else ALIVE, max_resamples=2)
    numbers = [float(id[1:]) for id in sampler.drawn]
    assert len(numbers) == 5
    assert rollouts.measured == {"reward/correctness/number": sum(numbers) / 5}
