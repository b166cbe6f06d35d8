from __future__ import annotations

from collections import Counter

import pytest

from flatpeak.rollout.randomness import completion_keys
from flatpeak.training.curriculum import MixedStream, Stream, take_prompts
from flatpeak.types import Example, Prompt


def stream(size: int, *, seed: int = 0) -> Stream[str]:
    return Stream(items=[f"item-{index}" for index in range(size)], seed=seed)


def prompts(*ids: str, text: str = "2+2=") -> list[Prompt]:
    return [
        Prompt(id=id, token_ids=(5, 6), text=text, example=Example(id=id, question=text, gold="4", columns={}))
        for id in ids
    ]


def test_a_pass_draws_every_item_exactly_once() -> None:
    drawn = stream(7).take(0, 21)
    for epoch in range(3):
        assert {item for number, item in drawn if number == epoch} == {f"item-{index}" for index in range(7)}
    assert Counter(number for number, _ in drawn) == {0: 7, 1: 7, 2: 7}


def test_each_pass_has_an_order_of_its_own() -> None:
    drawn = [item for _, item in stream(20).take(0, 60)]
    assert drawn[:20] != drawn[20:40] != drawn[40:] != drawn[:20]
    assert drawn[:20] != [f"item-{index}" for index in range(20)]


@pytest.mark.parametrize("cuts", [[21], [1] * 21, [2, 3, 7, 1, 8], [6, 6, 6, 3]])
def test_however_the_steps_are_cut_position_k_is_the_same_item(cuts: list[int]) -> None:
    whole = stream(7, seed=3).take(0, 21)
    pieces, cursor = [], 0
    for count in cuts:
        pieces += stream(7, seed=3).take(cursor, count)
        cursor += count
    assert pieces == whole


def test_the_order_is_a_function_of_the_seed() -> None:
    assert stream(30, seed=1).take(5, 50) == stream(30, seed=1).take(5, 50)
    assert stream(30, seed=1).take(0, 30) != stream(30, seed=2).take(0, 30)


def test_one_step_may_be_longer_than_the_data() -> None:
    drawn = stream(2).take(0, 5)
    assert [epoch for epoch, _ in drawn] == [0, 0, 1, 1, 2]
    assert len({item for _, item in drawn}) == 2


def test_a_prompt_drawn_again_in_a_later_pass_has_an_id_of_that_pass() -> None:
    drawn = take_prompts(Stream(items=prompts("a", "b"), seed=0), 0, 6)
    assert sorted(prompt.id for prompt in drawn[:2]) == ["a", "b"]
    assert sorted(prompt.id for prompt in drawn[2:4]) == ["a@1", "b@1"]
    assert sorted(prompt.id for prompt in drawn[4:]) == ["a@2", "b@2"]
    assert {prompt.example.id for prompt in drawn} == {"a", "b"}


def test_the_same_prompt_twice_in_one_step_has_distinct_randomness() -> None:
    drawn = take_prompts(Stream(items=prompts("only"), seed=0), 0, 3)
    keys = completion_keys(7, [prompt.id for prompt in drawn], 4)
    assert len(set(keys.tolist())) == 12


def test_equal_texts_under_different_ids_stay_two_prompts() -> None:
    drawn = take_prompts(Stream(items=prompts("first", "second"), seed=0), 0, 2)
    assert sorted(prompt.id for prompt in drawn) == ["first", "second"]
    assert len(set(completion_keys(7, [prompt.id for prompt in drawn], 4).tolist())) == 8


def mixed(*sizes_and_weights: tuple[int, float]) -> MixedStream[str]:
    streams = [
        Stream(items=[f"{task}{index}" for index in range(size)], seed=number)
        for number, (task, (size, _)) in enumerate(zip("abcdefghij", sizes_and_weights, strict=False))
    ]
    return MixedStream(items=(), seed=0, streams=streams, weights=[weight for _, weight in sizes_and_weights])


@pytest.mark.parametrize("weights", [(0.7, 0.3), (7, 3), (0.05, 0.95), (1, 1, 1), (5, 3, 2), (0.3, 0.1, 0.4, 0.2)])
def test_a_mixture_draws_each_task_by_its_share(weights: tuple[float, ...]) -> None:
    stream = mixed(*[(50, weight) for weight in weights])
    shares = [weight / sum(weights) for weight in weights]
    tasks = [item[0] for _, item in stream.take(0, 1000)]
    for task, share in zip("abcd", shares, strict=False):
        assert abs(tasks.count(task) - 1000 * share) <= 1
        # Every step has the share too, up to rounding.
        assert all(abs(tasks[at : at + 20].count(task) - 20 * share) < 2 for at in range(0, 1000, 20))


def test_each_task_of_a_mixture_has_its_own_passes() -> None:
    drawn = mixed((70, 0.7), (5, 0.3)).take(0, 100)
    by_pass = Counter((item[0], number) for number, item in drawn)
    assert by_pass == {("a", 0): 70, **{("b", number): 5 for number in range(6)}}
    assert len(set(drawn)) == 100


@pytest.mark.parametrize("cuts", [[1] * 60, [7, 13, 1, 39], [59, 1]])
def test_a_mixture_goes_on_from_any_position_with_the_same_items(cuts: list[int]) -> None:
    stream, pieces, cursor = mixed((9, 5), (4, 3), (30, 2)), [], 0
    for count in cuts:
        pieces += stream.take(cursor, count)
        cursor += count
    assert pieces == stream.take(0, 60)
