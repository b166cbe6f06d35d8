"""The state of a caller's sampler on several ranks: each gets its own back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.distributed.shared_rollouts import SharedSampler, checked_sampler_state
from flatpeak.errors import UserError
from flatpeak.protocols import Sampler
from flatpeak.types import Group, Prompt


class Counting(Sampler):
    """A sampler that counts the prompts of its share."""

    def __init__(self) -> None:
        self.count = 0

    def generate(self, prompts: Sequence[Prompt], **request: Any) -> list[Group]:
        self.count += len(prompts)
        return []

    def state(self) -> Mapping[str, Any]:
        return {"count": self.count} if self.count else {}

    def load(self, state: Mapping[str, Any]) -> None:
        self.count = state.get("count", 0)


class TwoRanks(Ranks):
    """The second of two ranks; the first has a sampler with the count 5."""

    def gather(self, value: Any) -> list[Any]:
        return [{"count": 5} if value else {}, value]


def shared(count: int) -> SharedSampler:
    sampler = SharedSampler(Counting(), TwoRanks(rank=1, size=2))
    sampler.sampler.count = count  # type: ignore[attr-defined]
    return sampler


def test_the_states_of_all_ranks_are_saved_and_each_gets_its_own_back() -> None:
    state = shared(3).state()
    assert state == {"ranks": [{"count": 5}, {"count": 3}]}
    resumed = shared(0)
    resumed.load(checked_sampler_state(state, resumed.ranks))
    assert resumed.sampler.count == 3  # type: ignore[attr-defined]


def test_samplers_without_a_state_leave_none() -> None:
    assert shared(0).state() == {}
    assert checked_sampler_state({}, ALONE) == {}


@pytest.mark.parametrize(("size", "saved"), [(1, 2), (4, 2)])
def test_states_of_another_number_of_processes_are_refused(size: int, saved: int) -> None:
    with pytest.raises(UserError, match=rf"in {saved} processes, but this run has {size}: resume it with {saved}"):
        checked_sampler_state({"ranks": [{"count": 1}] * saved}, Ranks(size=size))
