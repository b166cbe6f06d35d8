from __future__ import annotations

from collections import Counter

import pytest

from flatpeak.rollout.randomness import completion_keys
from flatpeak.training.curriculum import Stream, take_prompts
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
