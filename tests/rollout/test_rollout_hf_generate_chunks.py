from __future__ import annotations

import pytest

from flatpeak.rollout.hf_generate import Chunk, plan_chunks


def test_long_prompts_come_first_and_stand_together() -> None:
    chunks = plan_chunks([5, 90, 7, 80, 6], group_size=4, max_rows=8)
    assert chunks == [
        Chunk(prompts=(1, 3), copies=range(4)),
        Chunk(prompts=(2, 4), copies=range(4)),
        Chunk(prompts=(0,), copies=range(4)),
    ]


def test_prompts_of_equal_length_keep_their_order() -> None:
    assert [chunk.prompts for chunk in plan_chunks([3] * 5, group_size=1, max_rows=2)] == [(0, 1), (2, 3), (4,)]


def test_a_group_is_cut_only_where_it_alone_is_too_large() -> None:
    assert plan_chunks([3, 4], group_size=5, max_rows=2) == [
        Chunk(prompts=(p,), copies=copies) for p in (1, 0) for copies in (range(2), range(2, 4), range(4, 5))
    ]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_every_completion_is_in_one_chunk_and_no_chunk_is_too_large(max_rows: int, group_size: int) -> None:
    chunks = plan_chunks([4, 9, 1, 9, 2], group_size=group_size, max_rows=max_rows)
    entries = [(p, g) for chunk in chunks for p in chunk.prompts for g in chunk.copies]
    assert sorted(entries) == [(p, g) for p in range(5) for g in range(group_size)]
    assert max(len(chunk.prompts) * len(chunk.copies) for chunk in chunks) <= max_rows


def test_no_prompts_need_no_chunks() -> None:
    assert plan_chunks([], group_size=3, max_rows=8) == []
