from __future__ import annotations

import asyncio
import functools
import signal
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from flatpeak.errors import UserError
from flatpeak.rewards.functions import FunctionReward


def scores_of(function, groups, **options):
    return FunctionReward(function, **options).score(groups).scores


def test_trl_functions_are_called_once_with_lists_over_all_completions(group):
    calls = []

    def reward(prompts, completions, completion_ids, gold, level, **kwargs):
        calls.append((prompts, completions, completion_ids, gold, level, sorted(kwargs)))
        return [0.0, 0.25, 0.5]

    groups = [group("a", "b", id="1", text="P1", gold="1", level=7), group("c", id="2", text="P2", gold="2", level=8)]
    assert scores_of(reward, groups) == [[0.0, 0.25], [0.5]]
    assert calls == [
        (
            ["P1", "P1", "P2"],
            ["a", "b", "c"],
            [[0], [0], [0]],
            ["1", "1", "2"],
            [7, 7, 8],
            ["question", "rationale"],
        )
    ]


def test_trl_functions_see_chats_as_messages(group):
    seen = {}

    def reward(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [1.0]

    scores_of(reward, [group("hi", messages=[{"role": "user", "content": "Hello"}])])
    assert seen["prompts"] == [[{"role": "user", "content": "Hello"}]]
    assert seen["completions"] == [[{"role": "assistant", "content": "hi"}]]


def test_trls_own_rewards_work_unchanged(group):
    trl_rewards = pytest.importorskip("trl.rewards")
    chat = [{"role": "user", "content": "Hello"}]
    groups = [group("<think>a</think>b", "b", messages=chat)]
    assert scores_of(trl_rewards.think_format_reward, groups) == [[1.0, 0.0]]
    assert scores_of(trl_rewards.get_soft_overlong_punishment(2, 1), groups) == [[0.0, 0.0]]


def test_group_functions_see_one_group_at_a_time(group):
    def rank(group, level):
        return [level + index / 10 for index, _ in enumerate(group.completions)]

    assert scores_of(rank, [group("a", "b", level=1), group("c", level=2)]) == [[1.0, 1.1], [2.0]]


def test_completion_functions_see_one_text_and_columns_by_name(group):
    def reward(completion, prompt, question, gold, rationale, level):
        return float((completion, prompt, question, gold, rationale, level) == ("a", "P", "How many?", "18", None, 3))

    assert scores_of(reward, [group("a", "b", text="P", level=3)]) == [[1.0, 0.0]]


def test_keyword_functions_get_every_column(group):
    def reward(completion, **columns):
        return float(sorted(columns) == ["gold", "level", "prompt", "question", "rationale"])

    assert scores_of(reward, [group("a", level=3)]) == [[1.0]]


def test_the_examples_own_fields_win_over_columns_of_their_name(group):
    groups = [group("a", gold="18", **{"question": "raw", "level": 1})]
    assert scores_of(lambda completion, question: float(question == "How many?"), groups) == [[1.0]]


def test_columns_with_a_default_may_be_missing(group):
    assert scores_of(lambda completion, level=5: level, [group("a"), group("b", level=1)]) == [[5.0], [1.0]]


def test_in_lists_a_row_without_the_column_of_another_has_none(group):
    groups = [group("a"), group("b", level=1)]
    assert scores_of(lambda completions, level=None: [float(x is None) for x in level], groups) == [[1.0], [0.0]]


def test_configured_arguments_reach_every_call_and_win_over_columns(group):
    groups = [group("a", "b", level=1)]
    assert scores_of(lambda completion, level: level, groups, arguments={"level": 4}) == [[4.0, 4.0]]
    assert scores_of(lambda completion, **rest: rest["level"], groups, arguments={"level": 4}) == [[4.0, 4.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levle": 1}, r"has no parameter 'levle' \(did you mean 'level'\?\)"),
        ({"completion": "x"}, r"'completion' is filled in by flatpeak"),
    ],
)
def test_arguments_that_cannot_be_passed_are_refused(arguments, message):
    def reward(completion, level):
        return 0.0

    with pytest.raises(UserError, match=message):
        FunctionReward(reward, arguments=arguments)


def test_a_missing_column_names_the_row_and_the_nearest_column(group):
    def reward(completion, levle):
        return 0.0

    with pytest.raises(
        UserError, match=r"parameter 'levle', but row '2' has no such column \(did you mean 'level'\?\)"
    ):
        FunctionReward(reward).score([group("a", id="1", levle=1), group("b", id="2", level=1)])


@pytest.mark.parametrize(
    "function",
    [
        lambda text: 0.0,
        lambda: 0.0,
        lambda **kwargs: 0.0,
        lambda completion, group: 0.0,
        lambda completion, /: 0.0,
        lambda first, /, completion: 0.0,
        max,
    ],
)
def test_any_other_signature_is_told_the_three_there_are(function):
    with pytest.raises(UserError) as caught:
        FunctionReward(function, name="mine")
    message = str(caught.value)
    assert message.startswith("reward function 'mine'") and "\n" not in message
    assert all(signature in message for signature in ("f(completions, ...)", "f(group, ...)", "f(completion, ...)"))


def test_partials_methods_and_callable_objects_are_functions(group):
    class Grader:
        def __call__(self, completion):
            return 0.5

        def method(self, completions):
            return [0.25] * len(completions)

    def scaled(scale, completion):
        return scale

    groups = [group("a")]
    assert scores_of(Grader(), groups) == [[0.5]]
    assert scores_of(Grader().method, groups) == [[0.25]]
    assert scores_of(functools.partial(scaled, scale=0.75), groups) == [[0.75]]
    names = [FunctionReward(f).name for f in (Grader(), Grader().method, functools.partial(scaled, scale=1))]
    assert names == ["Grader", "method", "scaled"]


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
    ],
)
def test_anything_that_is_no_finite_number_names_function_and_index(group, value):
    def mine(completions):
        return [0.0, 0.0, value]

    with pytest.raises(UserError, match=r"reward function 'mine' returned .* for completion 2: return a finite number"):
        FunctionReward(mine).score([group("a", "b"), group("c")])


@pytest.mark.parametrize(
    "function",
    [
        lambda group: [float(completion.text) for completion in group.completions],
        lambda completion: float(completion),
        lambda completions: [float(text) for text in completions],
    ],
)
def test_the_index_counts_completions_across_groups(group, function):
    with pytest.raises(UserError, match="returned float nan for completion 3:"):
        FunctionReward(function).score([group("1", "2"), group("3", "nan")])


@pytest.mark.parametrize("container", [list, tuple, np.array, torch.tensor, iter, lambda values: np.array([values]).T])
def test_scores_may_come_as_any_sequence(group, container):
    assert scores_of(lambda group: container([0.5, 1.0]), [group("a", "b")]) == [[0.5, 1.0]]


@pytest.mark.parametrize(("returned", "expected"), [([1.0], 3), ([1.0] * 4, 3), ([], 3)])
def test_a_wrong_number_of_scores_names_the_function_and_both_numbers(group, returned, expected):
    def mine(completions):
        return returned

    with pytest.raises(UserError, match=rf"'mine' returned {len(returned)} scores for {expected} completions"):
        FunctionReward(mine).score([group("a", "b"), group("c")])


@pytest.mark.parametrize("returned", [None, 1.0, "01", {0: 1.0, 1: 1.0}, np.float64(1), torch.tensor(1.0)])
def test_a_result_that_is_no_list_is_described(group, returned):
    def mine(group):
        return returned

    with pytest.raises(UserError, match=r"'mine' returned .*: return a list of 2 scores"):
        FunctionReward(mine).score([group("a", "b")])


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


def test_a_function_does_not_say_what_is_answered(completion, prompt):
    assert FunctionReward(lambda completion: 1.0).answer(completion(" 18\n"), prompt()) == "18"
