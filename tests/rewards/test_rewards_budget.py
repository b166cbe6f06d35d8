"""What a step may lose to answers that cannot be graded, and what becomes of those that are left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import TypeAdapter

from flatpeak.errors import UserError
from flatpeak.rewards.base import GradingBudget
from flatpeak.rewards.config import FunctionConfig, RewardConfig
from flatpeak.rewards.math.grader import Outcome, Pair, grade_within
from flatpeak.rewards.reward_set import RewardSet, build_reward
from flatpeak.rewards.workers import grading
from flatpeak.rewards.workers.pool import WorkerError, WorkerPool
from flatpeak.types import Group
from support import worker_functions

MAKE = Callable[..., Group]
BUSY = 5.0
"""Seconds that a busy machine may add to a budget."""


def sums(count: int, *, upto: str) -> list[str]:
    """Different texts that only math-verify can read; those up to 10^9 do not come to an end."""
    return [rf"\boxed{{\sum_{{n=1}}^{{{upto}}} \frac{{{k + 1}}}{{n^2}}}}" for k in range(count)]


def math(**settings: Any) -> Any:
    return TypeAdapter(RewardConfig).validate_python({"type": "math", **settings})


@pytest.fixture
def clockwork() -> Iterator[Callable[[Pair, float], Future[Outcome]]]:
    """Two workers, to whom an answer says how many seconds it takes."""
    with ThreadPoolExecutor(2) as threads:

        def grade(pair: Pair, limit: float) -> Outcome:
            seconds = float(pair[0])
            time.sleep(min(seconds, limit))
            return True if seconds <= limit else WorkerError("timeout", "late")

        yield lambda pair, limit: threads.submit(grade, pair, limit)


def test_calls_with_a_verdict_cost_nothing_and_those_without_the_time_they_took(clockwork: Any) -> None:
    budget = GradingBudget(5.0)
    result = grade_within(budget, [("0.2", str(n)) for n in range(8)], clockwork, limit=0.4, workers=2)
    assert ([*result.values()], budget.left) == ([True] * 8, 5.0)
    result = grade_within(budget, [("9", "a"), ("9", "b")], clockwork, limit=0.4, workers=2)
    assert [isinstance(outcome, WorkerError) for outcome in result.values()] == [True, True]
    assert 4.0 < budget.left <= 4.6


@pytest.mark.slow
def test_a_budget_too_small_for_all_limits_gives_the_quick_ones_their_verdicts_and_the_first_ones_their_limit(
    clockwork: Any,
) -> None:
    slow = [("9", str(n)) for n in range(4)]
    late = [("0.35", "first"), *slow, ("0.01", "last")]
    budget = GradingBudget(2.0)
    started = time.monotonic()
    result = grade_within(budget, late, clockwork, limit=1.0, workers=2)
    assert time.monotonic() - started < 2.0 + BUSY
    assert result[("0.35", "first")] is True  # not in its share of 0.33 s, but in its whole limit after it
    assert result[("0.01", "last")] is True
    assert True not in [result.get(pair) for pair in slow]
    assert budget.spent


@pytest.mark.slow
def test_unscorable_answers_cost_a_step_its_budget_and_change_no_other_verdict(group: MAKE) -> None:
    notices: list[str] = []
    hostile = group(*sums(40, upto="10^9"), gold="1")
    others = [group(r"\boxed{\sum_{k=1}^{4} k}", r"\boxed{\sum_{k=1}^{5} k}", gold="10"), group("#", r"\boxed{18}")]
    reward = build_reward({"math": math(timeout=2.0)}, budget=3.0, notice=notices.append)
    expected = reward(others).total  # and the workers are there
    assert expected == [[1.0, 0.0], [0.0, 1.0]]
    for _ in range(2):
        started, budget = time.monotonic(), reward.step_budget()
        scores = reward([hostile, *others], budget=budget)
        assert time.monotonic() - started < 3.0 + BUSY
        assert budget is not None and budget.spent
        assert scores.total == [[0.0] * 40, *expected]
        assert scores.timed_out == {"math": [[True] * 40, [False] * 2, [False] * 2]}
    assert reward.failures == {}
    reward.close()
    assert notices[0] == "reward 'math': 40 answers so far ran out of time or memory; the score stands for wrong"
    assert notices[1].endswith(
        "completions of this step were not graded and count as timed out: answers that ran out of time had used up "
        "run.grading_budget"
    )
    assert len(notices) == 2


@pytest.mark.slow
def test_rewards_share_the_budget_of_a_step_and_a_new_step_has_its_own(group: MAKE) -> None:
    reward = build_reward({"one": math(timeout=0.5), "two": math(timeout=0.5)}, budget=1.0)
    budget = reward.step_budget()
    assert budget is not None
    reward([group(*sums(20, upto="10^9"), gold="1")], budget=budget)
    assert budget.spent
    assert reward([group(r"\boxed{\sum_{k=1}^{4} k}", gold="10")], budget=budget).total == [[0.0]]
    assert reward([group(r"\boxed{\sum_{k=1}^{4} k}", gold="10")], budget=reward.step_budget()).total == [[2.0]]
    reward.close()


def test_an_evaluation_has_no_budget(group: MAKE) -> None:
    reward = build_reward({"math": math(timeout=0.2)}, budget=0.3)
    texts = sums(6, upto="10^9")
    scores = reward([group(*texts, r"\boxed{\sum_{k=1}^{4} k}", gold="10")])
    assert scores.total == [[0.0] * 6 + [1.0]]
    assert scores.timed_out == {"math": [[True] * 6 + [False]]}
    reward.close()


def functions(pool: WorkerPool, *, budget: float | None = None, **settings: Any) -> RewardSet:
    config = FunctionConfig(**{"function": "support.worker_functions:hostile", "timeout": 0.5, **settings})
    return build_reward({"mine": config}, workers=pool, budget=budget)


def test_a_function_that_runs_out_of_time_or_memory_is_missing_unless_it_has_a_score_for_it(group: MAKE) -> None:
    texts = ("a", "spins", "grows", "raises", "exits", "bb")
    with WorkerPool(2, timeout=60, memory_bytes=2**27) as pool:
        reward = functions(pool)
        scores = reward([group(*texts)])
        assert (scores.total, scores.timed_out) == ([[1.0, None, None, None, None, 2.0]], {})
        assert reward.failures["mine"].count == 4
        reward = functions(pool, on_timeout=0)
        scores = reward([group(*texts)])
        assert scores.total == [[1.0, 0.0, 0.0, None, None, 2.0]]
        assert scores.timed_out == {"mine": [[False, True, True, False, False, False]]}
        assert reward.failures["mine"].count == 2


@pytest.mark.slow
@pytest.mark.parametrize(("on_timeout", "score"), [(None, None), (-1.0, -1.0)])
def test_a_function_is_given_up_for_the_step_once_its_hanging_calls_have_spent_the_budget(
    group: MAKE, on_timeout: float | None, score: float | None
) -> None:
    with WorkerPool(1, timeout=60) as pool:
        reward = functions(pool, budget=1.5, on_timeout=on_timeout)
        assert reward([group("a")]).total == [[1.0]]
        started, budget = time.monotonic(), reward.step_budget()
        scores = reward([group("a", "bb"), group(*["spins"] * 40), group("ccc")], budget=budget)
        assert time.monotonic() - started < 40 * 0.5  # without a budget
        assert scores.total == [[1.0, 2.0], [score] * 40, [score]]
        again = reward([group("ccc")], budget=reward.step_budget())
    assert again.total == [[3.0]]


@pytest.mark.slow
def test_a_question_that_spends_the_budget_before_another_is_graded_does_not_end_the_run(group: MAKE) -> None:
    with WorkerPool(1, timeout=60) as pool:
        reward = functions(pool, budget=0.8, on_timeout=0)
        step = [group(*["spins"] * 8), *[group("ccc")] * 40]
        assert reward(step, budget=reward.step_budget()).total == [[0.0] * 8, *[[0.0]] * 40]
        assert reward([group("ccc")], budget=reward.step_budget()).total == [[3.0]]


def test_calls_that_succeed_however_slowly_are_never_given_up(group: MAKE) -> None:
    with WorkerPool(1, timeout=60) as pool:
        reward = build_reward(
            {"mine": FunctionConfig(function="support.worker_functions:takes_its_time")}, workers=pool, budget=0.2
        )
        assert reward([group(*"abcdef")], budget=reward.step_budget()).total == [[1.0] * 6]


@pytest.mark.slow
def test_a_function_of_all_completions_has_its_own_limit_and_leaves_the_budget_to_others(group: MAKE) -> None:
    with WorkerPool(1, timeout=60) as pool:
        config = FunctionConfig(function="support.worker_functions:takes_its_time_for_all", timeout=20)
        reward = build_reward({"mine": config, "math": math(timeout=0.2)}, workers=pool, budget=0.5)
        budget = reward.step_budget()
        groups = [group(*sums(10, upto="10^9"), gold="1"), group(r"\boxed{18}")]
        scores = reward(groups, budget=budget)
        assert budget is not None and budget.spent
    assert scores.parts["mine"] == [[1.0] * 10, [1.0]]
    assert scores.parts["math"] == [[0.0] * 10, [1.0]]
    reward.close()


def test_a_function_of_all_completions_that_hangs_leaves_the_budget_to_others(group: MAKE) -> None:
    with WorkerPool(1, timeout=60) as pool:
        whole = FunctionConfig(function="support.worker_functions:hostile_batch", timeout=1)
        reward = build_reward({"whole": whole}, workers=pool, budget=0.5)
        assert reward([group("a")], budget=reward.step_budget()).total == [[1.0]]
        budget = reward.step_budget()
        assert reward([group("spins")], budget=budget).total == [[None]]
        assert budget is not None and budget.left == 0.5


def test_what_is_said_of_failures_is_not_what_befell_another_answer(group: MAKE) -> None:
    with WorkerPool(1, timeout=60) as pool:
        reward = functions(pool, on_timeout=0)
        assert reward([group("a", "spins", "exits")]).total == [[1.0, 0.0, None]]
        assert reward.failures["mine"].first_error == "a worker process died: exit code 0"


def test_a_score_for_running_out_of_time_needs_a_call_that_can() -> None:
    with WorkerPool(1, timeout=60) as pool:
        for name in ("where_batch", "patient", "stays", "nameless"):
            with pytest.raises(UserError, match=r"^rewards\.mine: on_timeout=0 has no effect in the trainer's own"):
                build_reward(
                    {"mine": FunctionConfig(function=f"support.worker_functions:{name}", on_timeout=0)}, workers=pool
                )


@pytest.mark.slow
def test_a_function_that_only_ever_hangs_still_ends_the_run(group: MAKE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "PATIENCE", 4)
    with WorkerPool(2, timeout=20) as pool:
        reward = functions(pool, timeout=0.1, on_timeout=0)
        with pytest.raises(
            UserError, match=r"^reward 'mine' failed on all 40 completions: no answer .*; make it faster"
        ):
            reward([group(*["spins"] * 40)])


@pytest.mark.usefixtures("one_thread")
def test_a_run_counts_answers_that_run_out_of_time_as_wrong_and_says_how_many(
    recipe: Callable[..., Any], train: Callable[..., Any], watch: Any
) -> None:
    mine = {"type": "function", "function": "support.worker_functions:hostile", "timeout": 0.3, "on_timeout": 0}
    progress = watch()
    rewards = {
        "correctness": {"type": "number"},
        "mine": mine | {"function": "support.worker_functions:hangs_where_short"},
    }
    result = train(recipe(training={"steps": 1}, evaluation={"size": 4}, rewards=rewards), progress=progress)
    assert result.exit_code == 0
    (row,) = [row for stage, _, row in progress.rows if stage == "train"]
    assert row["reward/missing_fraction"] == 0.0
    assert row["reward/mine/timeouts"] > 0
    assert "reward/mine/failed" not in row
    evaluations = [row for stage, _, row in progress.rows if stage == "eval"]
    (name,) = [name for name in evaluations[0] if name.endswith("/timeouts")]
    assert evaluations[0][name] == 1 - evaluations[0][name.replace("timeouts", "mine")]
    assert worker_functions.hangs_where_short("xx") == 1.0
