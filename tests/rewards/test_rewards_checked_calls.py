from __future__ import annotations

import asyncio
import re
import signal
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from flatpeak.errors import UserError
from flatpeak.rewards.functions import FunctionReward
from flatpeak.utils.user_code import one_line


class Stubborn:
    """Neither a number nor anything that can be shown."""

    item = None

    def __repr__(self):
        raise RuntimeError("no")


def scores_of(function, groups):
    return FunctionReward(function).score(groups).scores


@pytest.mark.parametrize(
    ("value", "score"),
    [
        *((True, 1.0), (False, 0.0), (2, 2.0), (0.5, 0.5), (Fraction(1, 4), 0.25), (Decimal("0.5"), 0.5), (None, None)),
        *((np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.bool_(True), 1.0), (np.array([0.5]), 0.5)),
        *((torch.tensor(0.5), 0.5), (torch.tensor([2]), 2.0), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5)),
    ],
)
def test_every_kind_of_real_number_becomes_a_float(group, value, score):
    result = scores_of(lambda completion: value, [group("a")])[0][0]
    assert result == score and type(result) is type(score)


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), "1.0", b"1", [1.0], {"score": 1.0}, 1j, 10**400, Decimal("nan"), Decimal("snan")),
        *(np.float64("nan"), np.array([1.0, 2.0]), np.str_("1"), torch.tensor(float("-inf")), torch.tensor([1.0, 2.0])),
        *(pytest.param(10**5000, id="huge"), Stubborn()),
    ],
)
def test_anything_that_is_no_finite_number_names_function_and_index(group, value):
    def mine(completions):
        return [0.0, 0.0, value]

    scored = FunctionReward(mine).score([group("a", "b"), group("c")])
    assert (scored.scores, scored.failed) == ([[0.0, 0.0], [None]], 1)
    said = one_line(scored.first_error)
    assert re.match(r"reward function 'mine' returned .* for completion 2: return a finite number, or None", said)


@pytest.mark.parametrize(
    "function",
    [
        lambda group: [float(completion.text) for completion in group.completions],
        lambda completion: float(completion),
        lambda completions: [float(text) for text in completions],
    ],
)
def test_the_index_counts_completions_across_groups(group, function):
    scored = FunctionReward(function).score([group("1", "2"), group("3", "nan")])
    assert (scored.scores, scored.failed) == ([[1.0, 2.0], [3.0, None]], 1)
    assert "returned float nan for completion 3:" in one_line(scored.first_error)


@pytest.mark.parametrize("container", [list, tuple, np.array, torch.tensor, iter, lambda values: np.array([values]).T])
def test_scores_may_come_as_any_sequence(group, container):
    assert scores_of(lambda group: container([0.5, 1.0]), [group("a", "b")]) == [[0.5, 1.0]]


@pytest.mark.parametrize(("returned", "expected"), [([1.0], 3), ([1.0] * 4, 3), ([], 3)])
def test_a_wrong_number_of_scores_names_the_function_and_both_numbers(group, returned, expected):
    def mine(completions):
        return returned

    scored = FunctionReward(mine).score([group("a", "b"), group("c")])
    assert (scored.scores, scored.failed) == ([[None, None], [None]], 3)
    assert f"'mine' returned {len(returned)} scores for {expected} completions" in one_line(scored.first_error)


@pytest.mark.parametrize("returned", [None, 1.0, "01", {0: 1.0, 1: 1.0}, np.float64(1), torch.tensor(1.0)])
def test_a_result_that_is_no_list_is_described(group, returned):
    def mine(group):
        return returned

    scored = FunctionReward(mine).score([group("a", "b")])
    assert (scored.scores, scored.failed) == ([[None, None]], 2)
    assert re.search(r"'mine' returned .*: return a list of 2 scores", one_line(scored.first_error))


def test_a_completion_whose_call_raises_is_missing_and_counted(group):
    def mine(completion):
        return 1 / len(completion)

    scored = FunctionReward(mine).score([group("a", ""), group("", "bb")])
    assert scored.scores == [[1.0, None], [None, 0.5]]
    assert scored.failed == 2
    assert isinstance(scored.first_error, ZeroDivisionError)


def test_a_group_whose_call_raises_is_missing_as_a_whole(group):
    scored = FunctionReward(lambda group, level: [1 / level] * 2).score(
        [group("a", "b", level=0), group("c", "d", level=2)]
    )
    assert scored.scores == [[None, None], [0.5, 0.5]]
    assert scored.failed == 2


def test_a_batch_whose_call_raises_is_missing_as_a_whole(group):
    scored = FunctionReward(lambda completions: [1 / 0]).score([group("a", "b"), group("c")])
    assert scored.scores == [[None, None], [None]]
    assert scored.failed == 3


def test_scores_that_raise_as_they_are_read_are_missing(group):
    scored = FunctionReward(lambda group: (1 / len(one.text) for one in group.completions)).score([group("a", "")])
    assert (scored.scores, scored.failed) == ([[None, None]], 2)
    assert "its scores cannot be read: ZeroDivisionError" in one_line(scored.first_error)


def test_a_none_that_is_returned_is_missing_but_no_failure(group):
    scored = FunctionReward(lambda completion: None).score([group("a")])
    assert (scored.scores, scored.failed, scored.first_error) == ([[None]], 0, None)


@pytest.mark.parametrize("stop", [UserError("set the key"), KeyboardInterrupt(), SystemExit(143)])
def test_user_errors_and_interrupts_pass_through(group, stop):
    def mine(completion):
        raise stop

    async def mine_async(completion):
        raise stop

    with pytest.raises(type(stop)):
        FunctionReward(mine).score([group("a")])
    if isinstance(stop, UserError):
        with pytest.raises(UserError, match="set the key"):
            FunctionReward(mine_async).score([group("a")])


def test_nothing_is_called_for_no_completions():
    assert FunctionReward(lambda completions: 1 / 0).score([]).scores == []


def test_async_functions_of_every_signature_are_awaited(group):
    async def batch(completions):
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    async def whole_group(group):
        return [float(len(completion.text)) for completion in group.completions]

    async def single(completion):
        return float(len(completion))

    groups = [group("a", "bb"), group("ccc")]
    assert [scores_of(f, groups) for f in (batch, whole_group, single)] == [[[1.0, 2.0], [3.0]]] * 3


def test_async_calls_wait_for_each_other_side_by_side_and_fail_apart(group):
    arrived = []

    async def mine(completion):
        arrived.append(completion)
        while len(arrived) < 3:  # none could go on if they ran one after the other
            await asyncio.sleep(0.001)
        if completion == "b":
            raise TimeoutError("too slow")
        return 1.0

    scored = FunctionReward(mine).score([group("a", "b", "c")])
    assert scored.scores == [[1.0, None, 1.0]]
    assert scored.failed == 1 and str(scored.first_error) == "too slow"


@pytest.mark.parametrize("stop", ["error", "signal"])
def test_when_async_scoring_is_stopped_the_calls_under_way_are_cancelled(group, stop):
    def interrupt(*_):
        raise KeyboardInterrupt

    cancelled = threading.Event()

    async def mine(completion):
        if completion == "b":
            if stop == "error":
                raise UserError("set the key")
            await asyncio.sleep(0.2)  # by then the main thread waits for the scores
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(UserError if stop == "error" else KeyboardInterrupt):
            FunctionReward(mine).score([group("a", "b")])
        assert cancelled.wait(timeout=10)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_async_functions_keep_their_event_loop_and_work_inside_a_running_one(group):
    loops = []

    async def mine(completion):
        loops.append(asyncio.get_running_loop())
        return 1.0

    reward = FunctionReward(mine)

    async def notebook():
        return reward.score([group("a")]).scores

    assert reward.score([group("a")]).scores == [[1.0]]
    assert asyncio.run(notebook()) == [[1.0]]
    assert loops[0] is loops[1] and not loops[0].is_closed()
