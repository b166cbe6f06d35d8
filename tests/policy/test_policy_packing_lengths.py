from __future__ import annotations

import random

import pytest

from flatpeak.policy.packing import LARGEST_WASTE, SIMILAR, SMALL, by_length


def some_lengths(seed: int) -> list[int]:
    draw = random.Random(seed)
    most = draw.choice([1, 20, 100, 5000])
    return [draw.randint(1, most) for _ in range(draw.randint(1, 300))] + [draw.randint(1, 9000)] * (seed % 2)


@pytest.mark.parametrize("similar", [True, False])
def test_groups_hold_every_index_once_in_order_and_pad_little(similar: bool) -> None:
    for seed in range(40):
        lengths = some_lengths(seed)
        groups = by_length(lengths, similar=similar)
        assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
        assert all(group == sorted(group) for group in groups)
        previous = None
        for group in groups:
            members = [lengths[index] for index in group]
            longest = max(members)
            assert len(members) * longest <= max(SMALL, LARGEST_WASTE * sum(members))
            assert not similar or longest - min(members) <= max(SIMILAR, longest / 4)
            assert previous is None or longest <= previous
            previous = min(members)


def test_lengths_that_differ_little_stay_together_and_one_long_one_stands_apart() -> None:
    assert by_length([3, SIMILAR, 1, 20]) == [[0, 1, 2, 3]]
    assert by_length([1000, 750, 749]) == [[0, 1], [2]]
    assert by_length([20, 1500, 20, 21]) == [[1], [0, 2, 3]]
    assert by_length([20, 1500, 20], similar=False) == [[0, 1, 2]]  # SMALL is room enough
    assert [len(group) for group in by_length([1] * 100 + [SIMILAR])] == [SMALL // SIMILAR, 101 - SMALL // SIMILAR]
    assert by_length([]) == []
