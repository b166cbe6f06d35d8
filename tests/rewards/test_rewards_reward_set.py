from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from flatpeak.errors import UserError
from flatpeak.rewards import checked_calls
from flatpeak.rewards.base import Component
from flatpeak.rewards.functions import FunctionReward
from flatpeak.rewards.numeric_answer import NumberReward
from flatpeak.rewards.reward_set import RewardSet, as_reward


def component(name, function, weight=1.0):
    return Component(name=name, weight=weight, scorer=FunctionReward(function, name=name))


def fail(completion):
    raise RuntimeError("no\n  luck")


def test_the_total_is_the_weighted_sum_of_unweighted_parts(group):
    reward = RewardSet(
        [
            component("length", lambda completion: len(completion), 0.5),
            component("a", lambda completion: float("a" in completion), -2.0),
        ]
    )
    scores = reward([group("a", "bbb"), group("aa")])
    assert scores.parts == {"length": [[1.0, 3.0], [2.0]], "a": [[1.0, 0.0], [1.0]]}
    assert scores.total == [[-1.5, 1.5], [-1.0]]
    assert reward.weights == {"length": 0.5, "a": -2.0}


def test_the_total_is_missing_where_a_weighted_part_is(group):
    reward = RewardSet(
        [
            component("one", lambda completion: 1.0),
            component("some", lambda completion: None if completion == "a" else 0.0, 0.1),
        ]
    )
    scores = reward([group("a", "b")])
    assert scores.total == [[None, 1.0]]
    assert scores.parts["one"] == [[1.0, 1.0]]


def test_a_total_that_overflows_is_an_error_wherever_it_is_graded(group):
    reward = RewardSet([component("huge", lambda completion: 1e300 if completion == "a" else 0.0, 1e10)])
    with pytest.raises(
        UserError, match=r"the weighted rewards of prompt .* not add up to a finite number: bound .* lower their weigh"
    ):
        reward([group("b"), group("b", "a")])
    assert reward([group("b")]).total == [[0.0]]


def test_a_part_without_weight_is_logged_only_whatever_happens_to_it(group):
    reward = RewardSet([component("one", lambda completion: 1.0), component("watch", fail, 0.0)])
    scores = reward([group("a", "b")])
    assert scores.total == [[1.0, 1.0]]
    assert scores.parts["watch"] == [[None, None]]
    assert reward.failures["watch"].count == 2


def test_failures_are_counted_over_calls_and_keep_the_first_error(group):
    def picky(completion):
        if completion.startswith("x"):
            raise ValueError(f"bad {completion}")
        return 1.0

    reward = RewardSet([component("picky", picky), component("fine", lambda completion: 1.0)])
    assert reward.failures == {}
    reward([group("x1", "b"), group("x2", "d")])
    reward([group("x3", "b")])
    assert reward.failures.keys() == {"picky"}
    assert reward.failures["picky"].count == 3
    assert reward.failures["picky"].first_error.startswith("ValueError: bad x1 (")


def test_a_weighted_part_that_fails_everywhere_stops_with_its_error(group):
    reward = RewardSet([component("one", lambda completion: 1.0), component("judge", fail)])
    with pytest.raises(
        UserError,
        match=r"^reward 'judge' failed on all 3 completions: RuntimeError: no luck \(.*:\d+\); correct it, or give it",
    ):
        reward([group("a", "b"), group("c")])


def test_a_part_that_is_missing_everywhere_without_failing_does_not_stop(group):
    assert RewardSet([component("none", lambda completion: None)])([group("a")]).total == [[None]]


def test_groups_with_the_same_prompt_text_stay_separate(group):
    reward = RewardSet([Component(name="correctness", weight=1.0, scorer=NumberReward())])
    twins = [group("1", "2", id="a", gold="1"), group("1", "2", id="b", gold="2")]
    assert twins[0].prompt.text == twins[1].prompt.text
    assert reward(twins).total == [[1.0, 0.0], [0.0, 1.0]]


def test_no_groups_have_no_scores():
    scores = RewardSet([component("one", lambda completion: 1.0)])([])
    assert (scores.total, scores.parts) == ([], {"one": []})


def test_answers_come_from_the_part_that_extracts_them(completion, prompt):
    reward = RewardSet(
        [
            Component(name="correctness", weight=1.0, scorer=NumberReward(extraction="last_number")),
            component("style", lambda completion: 1.0),
        ]
    )
    assert reward.answer("correctness", completion(" so 0.75 "), prompt()) == "3/4"
    assert reward.answer("correctness", completion("dunno"), prompt()) is None
    assert reward.answer("style", completion(" so 0.75 "), prompt()) == "so 0.75"
    with pytest.raises(UserError, match="there is no reward 'accuracy': choose one of correctness, style"):
        reward.answer("accuracy", completion("x"), prompt())


@pytest.mark.parametrize(
    ("weights", "message"),
    [([], "give at least one"), ([0.0, 0.0], "every reward has weight 0"), ([1.0, float("nan")], "weight nan")],
)
def test_a_set_that_cannot_teach_is_refused(weights, message):
    with pytest.raises(UserError, match=message):
        RewardSet([component(f"reward{i}", lambda completion: 1.0, weight) for i, weight in enumerate(weights)])


class Holds(FunctionReward):
    """Holds something, and may not let go of it in silence."""

    closed = False

    def close(self):
        self.closed = True
        if self.name == "loud":
            raise RuntimeError("stuck")


def test_all_parts_are_closed_whatever_one_raises():
    scorers = [Holds(lambda completion: 1.0, name=name) for name in ("quiet", "loud", "other")]
    reward = RewardSet([Component(name=scorer.name, weight=1.0, scorer=scorer) for scorer in scorers])
    with pytest.raises(RuntimeError, match="stuck"):
        reward.close()
    assert [scorer.closed for scorer in scorers] == [True, True, True]


TOLD = threading.Event()


def slow_judgement(completions):
    TOLD.wait(30)
    return [1.0 for _ in completions]


@pytest.mark.parametrize("timeout", [None, "auto"])
@pytest.mark.parametrize(
    ("function", "way_out"),
    [
        (slow_judgement, "`timeout: SECONDS` in a recipe calls it in a process that can be killed"),
        (
            partial(slow_judgement),
            "no process that can be killed calls it, since it is a lambda, a closure or an object: define a function "
            "in a module",
        ),
    ],
    ids=["a function of a module", "an object"],
)
def test_a_function_that_does_not_come_back_is_told_of(group, monkeypatch, timeout, function, way_out):
    monkeypatch.setattr(checked_calls, "SLOW_SECONDS", 0.05)
    TOLD.clear()
    notices = []

    def notice(text):
        notices.append(text)
        TOLD.set()

    scorer = FunctionReward(function, timeout=timeout)
    reward = RewardSet([Component(name="mine", weight=1.0, scorer=scorer)], notice=notice)
    assert notices == []  # a function that is fast enough is told of nowhere
    assert reward([group("a", "b")]).total == [[1.0, 1.0]]
    assert notices == [f"reward 'mine' has been at work for 0.05 s, and the run waits for it; {way_out}"]


def test_an_error_that_ends_the_run_is_told_once(group):
    notices = []

    def broken(completion):
        raise KeyError("gold")

    reward = RewardSet([Component(name="mine", weight=1.0, scorer=FunctionReward(broken))], notice=notices.append)
    with pytest.raises(UserError, match="reward 'mine' failed on all 2 completions: KeyError"):
        reward([group("a"), group("b")])
    assert notices == []


def test_a_function_that_comes_back_is_not(group, monkeypatch):
    monkeypatch.setattr(checked_calls, "SLOW_SECONDS", 0.05)
    notices = []
    reward = RewardSet(
        [Component(name="mine", weight=1.0, scorer=FunctionReward(lambda completions: [1.0]))], notice=notices.append
    )
    reward([group("a")])
    time.sleep(0.1)
    assert notices == []


def test_a_reward_whose_name_is_that_of_another_metric_is_refused():
    with pytest.raises(UserError, match="reward 'length': metrics of that name exist already; call it something else"):
        as_reward({"right": lambda completion: 1.0, "length": (lambda completion: 0.0, 0.1)})


@pytest.mark.parametrize(("name", "part"), [("length", "length_reward"), ("reward", "reward"), ("close", "close")])
def test_a_function_of_the_name_of_another_metric_becomes_a_part_that_can_be_told_from_it(name, part):
    def function(completion):
        return 1.0

    function.__name__ = name
    assert list(as_reward(function).weights) == [part]
