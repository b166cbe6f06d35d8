from __future__ import annotations

import random
from collections import Counter

import pytest

from flatpeak.rollout.scheduler import Schedule, longest_first


class Run:
    """Decodes a schedule the way the engine does, with random ends, and checks what must hold at every step.

    `slots` and `entries` stand for the cache's memory: what is in it is only ever put there, read, or moved.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_prompts, self.group_size = rng.randint(1, 7), rng.randint(1, 6)
        self.order = rng.sample(range(self.num_prompts), self.num_prompts)
        self.num_slots = rng.randint(1, self.num_prompts * self.group_size + 3)
        step = rng.choice([1, 4])
        self.batch_sizes = list(range(step, self.num_slots + step, step))
        self.schedule = Schedule(
            self.order,
            group_size=self.group_size,
            num_slots=self.num_slots,
            batch_sizes=self.batch_sizes,
            compact_below=rng.choice([0.0, 0.5, 0.85, 1.0]),
        )
        self.left = {row: rng.randint(0, 12) for row in range(self.num_prompts * self.group_size)}
        self.slots: dict[int, int] = {}
        self.place_of_slot: dict[int, int] = {}
        self.entries: dict[int, int] = {}
        self.in_use: set[int] = set()
        """Places of prompts that were read and have completions to come or under way."""
        self.begun: list[int] = []
        self.read: list[int] = []
        self.ended: list[int] = []
        self.complete: list[int] = []
        self.compactions = 0

    def __call__(self) -> Run:
        for _ in range(10_000):
            if self.schedule.done:
                break
            self.admit()
            self.end()
        assert self.schedule.done
        return self

    def admit(self) -> None:
        while admission := self.schedule.admit(sampling=self.rng.choice([None, self.rng.randint(0, len(self.slots))])):
            assert admission.completions
            assert len(admission.completions) == len(admission.slots) == len(admission.entries)
            for prompt, place in admission.new_prompts.items():
                assert 0 <= place < self.num_prompts
                assert place not in self.in_use
                self.entries[place] = prompt
                self.in_use.add(place)
                self.read.append(prompt)
            for row, slot, place in zip(admission.completions, admission.slots, admission.entries, strict=True):
                assert slot not in self.slots
                assert 0 <= slot < min(self.num_slots, self.schedule.batch_size)
                assert self.entries[place] == row // self.group_size
                self.slots[slot], self.place_of_slot[slot] = row, place
                self.begun.append(row)
            self.check()
            self.end()  # a first token may end a completion

    def end(self) -> None:
        over = [slot for slot, row in self.slots.items() if self.left[row] == 0]
        for row in self.slots.values():
            self.left[row] -= 1
        self.rng.shuffle(over)
        ended = [self.slots.pop(slot) for slot in over]
        place_of_row = dict(zip(ended, [self.place_of_slot.pop(slot) for slot in over], strict=True))
        self.ended += ended
        result = self.schedule.end(over)
        open_groups = Counter(row // self.group_size for row in range(len(self.left)) if row not in self.ended)
        assert set(result) == {row // self.group_size for row in ended} - set(open_groups)
        self.complete += result
        self.in_use -= {place for row, place in place_of_row.items() if row // self.group_size in result}
        if over:
            self.compact()
        self.check()

    def compact(self) -> None:
        before = self.schedule.batch_size
        compaction = self.schedule.compact()
        if compaction is None:
            assert self.schedule.batch_size == before
            return
        self.compactions += 1
        assert len(self.begun) == len(self.left)  # nobody waits
        assert self.schedule.batch_size < before
        assert self.schedule.batch_size in self.batch_sizes
        sources, targets = compaction.slots
        assert not set(targets) & set(self.slots)
        for held in (self.slots, self.place_of_slot):
            held |= {target: held.pop(source) for source, target in zip(sources, targets, strict=True)}
        sources, targets = compaction.entries
        assert not set(targets) & self.in_use
        now_at = dict(zip(sources, targets, strict=True))
        self.entries |= {target: self.entries[source] for source, target in now_at.items()}
        self.place_of_slot = {slot: now_at.get(place, place) for slot, place in self.place_of_slot.items()}
        self.in_use = (self.in_use - set(sources)) | set(targets)
        assert sorted(self.slots) == list(range(len(self.slots)))
        assert sorted(self.in_use) == list(range(len(self.in_use)))
        assert compaction.idle == list(range(len(self.slots), self.schedule.batch_size))

    def check(self) -> None:
        assert self.schedule.completion_in == self.slots
        assert len(set(self.slots.values())) == len(self.slots)
        assert all(slot < self.schedule.batch_size for slot in self.slots)
        for slot, row in self.slots.items():
            assert self.entries[self.place_of_slot[slot]] == row // self.group_size


@pytest.mark.parametrize("seed", range(100))
def test_whatever_the_ends_every_row_is_decoded_once_in_a_slot_and_a_place_of_its_own(seed: int) -> None:
    run = Run(random.Random(seed))()
    rows = run.num_prompts * run.group_size
    assert run.begun == [p * run.group_size + g for p in run.order for g in range(run.group_size)]
    assert sorted(run.ended) == list(range(rows))
    assert run.read == run.order
    assert sorted(run.complete) == list(range(run.num_prompts))


def test_the_random_runs_compact_wait_and_leave_slots_idle() -> None:
    runs = [Run(random.Random(seed))() for seed in range(100)]
    assert sum(run.compactions > 1 for run in runs) > 15
    assert sum(run.num_slots * 2 < len(run.left) for run in runs) > 15
    assert sum(run.num_slots % 4 > 0 and run.batch_sizes[0] == 4 for run in runs) > 15


def test_the_longest_expected_come_first_and_unknown_ones_stand_in_the_middle() -> None:
    assert longest_first([1, 1, 1, 1], [5.0, 50.0, None, 7.0]) == [1, 2, 3, 0]  # 2 stands at 7.0
    assert longest_first([1, 1, 1, 1, 1], [30.0, None, 10.0, 20.0, None]) == [0, 1, 3, 4, 2]  # at 20.0
    assert longest_first([1, 3, 2], [None, None, 4.0]) == [1, 2, 0]  # among equals the longer prompt


def test_without_any_expectation_prompts_stand_by_their_own_length_then_as_given() -> None:
    assert longest_first([3, 9, 9, 1], [None] * 4) == [1, 2, 0, 3]
    assert longest_first([2, 2, 2], [4.0, 4.0, 4.0]) == [0, 1, 2]
    assert longest_first([], []) == []


def test_an_expected_length_of_zero_is_known() -> None:
    assert longest_first([1, 1, 9, 1], [0.0, 0.0, None, 8.0]) == [3, 2, 0, 1]


def schedule(order: list[int], *, group_size: int = 2, num_slots: int = 4, step: int = 1, **settings) -> Schedule:
    batch_sizes = list(range(step, num_slots + step, step))
    return Schedule(
        order, group_size=group_size, num_slots=num_slots, batch_sizes=batch_sizes, **{"compact_below": 1.0, **settings}
    )


def test_rows_begin_in_the_order_of_their_prompts_and_each_prompt_is_read_once() -> None:
    plan = schedule([2, 0, 1], num_slots=3)
    first = plan.admit()
    assert first is not None
    assert (first.completions, first.slots, first.entries, first.new_prompts) == (
        [4, 5, 0],
        [0, 1, 2],
        [0, 0, 1],
        {2: 0, 0: 1},
    )
    assert plan.admit() is None
    assert plan.end([0, 1]) == [2]
    second = plan.admit()
    assert second is not None
    # The second row of prompt 0 finds it at place 1; prompt 1 takes over the place of prompt 2, which is complete.
    assert (second.completions, second.slots, second.entries, second.new_prompts) == ([1, 2], [0, 1], [1, 0], {1: 0})


def test_slots_are_refilled_once_an_eighth_of_them_is_free_or_the_rest_of_the_queue_fits() -> None:
    plan = schedule(list(range(40)), group_size=1, num_slots=32)
    assert plan.admit() is not None
    for slot in range(3):
        plan.end([slot])
        assert plan.admit() is None
    plan.end([3])
    admission = plan.admit()
    assert admission is not None
    assert admission.completions == [32, 33, 34, 35]
    short = schedule(list(range(34)), group_size=1, num_slots=32)
    short.admit()
    short.end([7])
    assert short.admit() is None
    short.end([9])
    admission = short.admit()
    assert admission is not None
    assert (admission.completions, admission.slots) == ([32, 33], [7, 9])


def test_freed_slots_are_refilled_at_once_when_no_slot_is_left() -> None:
    plan = schedule(list(range(5)), group_size=1, num_slots=1)
    for row in range(5):
        admission = plan.admit()
        assert admission is not None
        assert admission.completions == [row]
        assert not plan.done
        plan.end([0])
    assert plan.done


def test_a_step_decodes_the_smallest_bucket_that_holds_the_rows() -> None:
    plan = Schedule([0], group_size=5, num_slots=64, batch_sizes=[1, 2, 4, 8, 16, 64], compact_below=1.0)
    assert plan.batch_size == 8  # for 5 rows; no more slots than rows are ever used
    assert [plan.batch_size_for(count) for count in (1, 2, 3, 4, 5, 9, 17)] == [1, 2, 4, 4, 8, 16, 64]
    plan.admit()
    plan.end([0, 3])
    compaction = plan.compact()
    assert compaction is not None
    assert plan.batch_size == 4
    assert compaction.slots == ([4], [0])
    assert compaction.idle == [3]
    assert plan.completion_in == {0: 4, 1: 1, 2: 2}


def test_nothing_is_compacted_while_rows_wait_while_too_many_are_left_or_for_the_same_bucket() -> None:
    waiting = schedule([0, 1], num_slots=3)
    waiting.admit()
    waiting.end([0])
    assert waiting.compact() is None
    many = schedule([0, 1, 2, 3], num_slots=8, compact_below=0.75)
    many.admit()
    many.end([0])
    assert many.compact() is None
    many.end([1])  # 6 of 8
    assert many.compact() is not None
    assert many.batch_size == 6
    twice = schedule([0, 1, 2, 3], num_slots=8, compact_below=0.5)
    twice.admit()
    twice.end([0, 1, 2, 3])
    assert twice.compact() is not None
    twice.end([0])
    assert twice.compact() is None  # 3 of the 4 that are decoded now
    same = schedule([0, 1, 2, 3], num_slots=8, step=4)
    same.admit()
    same.end([0, 5, 6])
    assert same.compact() is None
    same.end([7])
    compaction = same.compact()
    assert compaction is not None
    assert compaction.slots == ([4], [0])
    assert compaction.idle == []


def test_prompts_that_are_left_move_to_the_first_places() -> None:
    plan = schedule([0, 1, 2], num_slots=6)
    admission = plan.admit()
    assert admission is not None
    assert admission.entries == [0, 0, 1, 1, 2, 2]
    assert plan.end([0, 1, 4]) == [0]
    compaction = plan.compact()
    assert compaction is not None
    assert compaction.slots == ([3, 5], [0, 1])
    assert compaction.entries == ([2], [0])
    assert plan.completion_in == {2: 2, 0: 3, 1: 5}
    assert plan.end([1]) == [2]
    assert plan.end([0, 2]) == [1]
    assert plan.compact() is None  # nothing is left
    assert plan.done


def test_slots_that_do_not_sample_hold_up_no_completion_that_waits_for_a_slot() -> None:
    schedule = Schedule([0], group_size=64, num_slots=32, batch_sizes=[32], compact_below=0.5)
    assert len(schedule.admit().slots) == 32  # type: ignore[union-attr]
    schedule.end([7, 9])
    assert schedule.admit() is None
    assert schedule.admit(sampling=22) is None  # two are fewer than an eighth of 24
    admission = schedule.admit(sampling=16)
    assert admission is not None and admission.slots == [7, 9]
    assert schedule.admit(sampling=0) is None
    schedule.end([30])
    assert schedule.admit(sampling=0) is not None
