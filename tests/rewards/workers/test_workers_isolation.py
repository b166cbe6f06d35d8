"""Nothing that a reward function does costs more than the score of what it was asked about."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flatpeak.apps.compare import compare_checkpoints
from flatpeak.errors import RunError, UserError
from flatpeak.rewards.base import Component, ComponentScores, Scorer
from flatpeak.rewards.checked_calls import PATIENCE
from flatpeak.rewards.config import FunctionConfig, NumberConfig
from flatpeak.rewards.reward_set import RewardSet, as_reward, build_reward
from flatpeak.rewards.workers import grading
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.rewards.workers.worker import OUTPUT_PREFIX
from flatpeak.types import Completion, Group, Score
from support import worker_functions
from support.worker_functions import FAULTS, QUIRKS
from support.workers import all_end

LIMIT = 1.0
BUSY = 5.0
"""Seconds that a busy machine may add to a limit; without one the faults take 100 s and more."""
MEMORY = 2**27
MAKE = Callable[..., Group]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, timeout=LIMIT, memory_bytes=MEMORY) as pool:
        yield pool


def reward_of(functions: Any, pool: WorkerPool | None, **settings: Any) -> RewardSet:
    made = as_reward(functions, workers=pool, **settings)
    assert isinstance(made, RewardSet)
    return made


def pids(pool: WorkerPool) -> list[int]:
    return [worker.pid for worker in pool._workers if worker.pid is not None]


REASONS = {
    **dict.fromkeys(("spins", "towers", "sleeps", "stops"), "no answer from a worker process within 1 s"),
    "aborts": "a worker process died: killed by SIGABRT",
    "exits": "a worker process died: exit code 0",
    "leaves": "a worker process died: exit code 1",
    "crashes": "a worker process died: killed by SIGSEGV",
    "interrupts": "a worker process died: killed by SIGKILL",
    **dict.fromkeys(("wants 50 GiB", "grows"), "a worker process ran out of the memory it may use"),
    "raises": r"ZeroDivisionError: division by zero \(.*worker_functions.py:\d+\)",
    "raises a lot": r"ValueError: x{300} \(.*\)",
    "recurses": r"RecursionError: maximum recursion depth exceeded \(.*\)",
    "recurses without limit": r".+",
    "closes everything": "a worker process died: .*",
    "nan": "reward function 'hostile' returned float nan for completion 1: return a finite number, or None .*",
    "infinite": "reward function 'hostile' returned int 10{59} for completion 1: .*",
    "list": r"reward function 'hostile' returned list \[1.0\] for completion 1: .*",
    "text": "reward function 'hostile' returned str '1.01.0.{53} for completion 1: .*",
    "unpicklable": "reward function 'hostile' returned _Unpicklable <.* for completion 1: .*",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_completion_that_makes_a_function_fail_costs_its_own_score_and_a_moment(
    pool: WorkerPool, group: MAKE, fault: str
) -> None:
    reward = reward_of(worker_functions.hostile, pool)
    groups = [group("a", "bb"), group("c", fault, "ddd"), group("ee")]
    started = time.monotonic()
    assert reward(groups).total == [[1.0, 2.0], [1.0, None, 3.0], [2.0]]
    assert time.monotonic() - started < LIMIT + BUSY
    failures = reward.failures["hostile"]
    assert failures.count == 1
    assert re.fullmatch(REASONS[fault], failures.first_error), failures.first_error


@pytest.mark.slow
def test_all_of_them_at_once_change_no_other_score_and_nothing_here(pool: WorkerPool, group: MAKE) -> None:
    reward = reward_of(worker_functions.hostile, pool)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    halves = [[*FAULTS][::2], [*FAULTS][1::2]]
    scores = reward([group("a", *half, "bb") for half in halves])
    assert scores.total == [[1.0, *[None] * len(half), 2.0] for half in halves]
    assert reward.failures["hostile"].count == len(FAULTS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB


@pytest.mark.parametrize("quirk", QUIRKS)
def test_what_a_function_does_beside_returning_a_score_changes_none(
    group: MAKE, quirk: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = threading.enumerate()  # those of the other tests' pool go on
    with WorkerPool(1, timeout=20, memory_bytes=MEMORY) as pool:
        reward = reward_of(worker_functions.hostile, pool)
        groups = [group("a", quirk, "ddd", quirk, directory=str(tmp_path)), group("bb")]
        assert reward(groups).total == [[1.0, 0.5, 3.0, 0.5], [2.0]]
        time.sleep(0.2 if quirk == "leaves children" else 0)  # until one of them comes back
        assert reward(groups[1:]).total == [[2.0]]
        assert reward.failures == {}
        children = [int(path.name) for path in tmp_path.iterdir()]
        processes = pids(pool)
    assert len(children) == (6 if quirk == "leaves children" else 0)
    assert all_end([*processes, *children], within=5)
    for thread in threading.enumerate():
        if thread.name == "flatpeak-reward-output" and thread not in before:  # the last lines may still be on their way
            thread.join(5)
    captured = capfd.readouterr()
    assert captured.out == ""  # which may be a result that a program reads
    assert len(captured.err) == (2 * 40 * (len(OUTPUT_PREFIX) + 100_000) if quirk == "prints" else 0)


def test_no_process_is_left_by_workers_that_were_lost(group: MAKE, tmp_path: Path) -> None:
    with WorkerPool(2, timeout=20) as pool:
        reward = reward_of(worker_functions.hostile, pool)
        row = group("leaves children", "interrupts", "a", directory=str(tmp_path))
        assert reward([row]).total == [[0.5, None, 1.0]]
        children = [int(path.name) for path in tmp_path.iterdir()]
        assert len(children) == 3
        assert all_end(children, within=5)  # with the worker, before the pool ends


def test_a_pool_that_nobody_closed_ends_with_its_reward(group: MAKE) -> None:
    pool = WorkerPool(1, timeout=20)
    reward = reward_of(worker_functions.where, pool)
    process = int(reward([group("a")]).total[0][0] or 0)
    assert not all_end([process], within=0)
    del reward, pool
    assert all_end([process], within=5)


def test_functions_of_a_group_lose_one_group_and_one_completion_where_that_is_no_number(
    pool: WorkerPool, group: MAKE
) -> None:
    reward = reward_of(worker_functions.hostile_group, pool)
    groups = [group("a", "bb"), group("exits", "c"), group("nan", "c"), group("short", "c"), group("d", "e")]
    assert reward(groups).total == [[1.0, 2.0], [None, None], [None, 1.0], [None, None], [1.0, 1.0]]
    assert reward.failures["hostile_group"].count == 5


def test_a_batch_function_is_one_call_in_this_process_or_with_a_timeout_in_a_worker(
    pool: WorkerPool, group: MAKE
) -> None:
    here = reward_of(worker_functions.where_batch, pool)
    assert here.grading() is None
    assert here([group("a"), group("b", "c")]).total == [[float(os.getpid())], [float(os.getpid())] * 2]
    config = FunctionConfig(function="support.worker_functions:where_batch", timeout=5)
    there = build_reward({"mine": config}, workers=pool)
    (first,), (second, third) = there([group("a"), group("b", "c")]).total
    assert first == second == third != os.getpid()
    hostile = FunctionConfig(function="support.worker_functions:hostile_batch", timeout=5)
    reward = build_reward({"mine": hostile}, workers=pool)
    assert reward([group("a"), group("b", "nan")]).total == [[1.0], [1.0, None]]
    assert reward([group("a"), group("b", "exits")]).total == [[None], [None, None]]
    assert reward.failures["mine"].count == 4


def test_where_a_function_is_graded_follows_from_what_it_is(pool: WorkerPool, group: MAKE) -> None:
    notices: list[str] = []

    def closure(completion: str) -> float:
        return float(os.getpid())

    functions = {
        "where": worker_functions.where,
        "where_group": worker_functions.where_group,
        "where_batch": worker_functions.where_batch,
        "patient": worker_functions.patient,
        "stays": worker_functions.stays,
        "nameless": worker_functions.nameless,
        "closure": closure,
    }
    reward = reward_of(functions, pool, notice=notices.append)
    parts = reward([group("a")]).parts
    assert [name for name, component in parts.items() if component != [[float(os.getpid())]]] == [
        "where",
        "where_group",
    ]
    assert reward_of(functions, None, notice=notices.append).grading() is None
    assert notices == []


@pytest.mark.parametrize(
    ("settings", "elsewhere"),
    [
        ({"function": "support.worker_functions:where"}, True),
        ({"function": "support.worker_functions:where", "timeout": 3}, True),
        ({"function": "support.worker_functions:where", "timeout": None}, False),
        ({"function": "support.worker_functions:patient"}, False),
        ({"function": "support.worker_functions:patient", "timeout": 3}, True),
        ({"function": "support.worker_functions:stays"}, False),
        ({"function": "support.worker_functions:stays", "timeout": 3}, True),
        ({"function": "support.worker_functions:nameless"}, False),
        ({"function": f"{worker_functions.__file__}:where"}, True),
    ],
)
def test_a_recipe_says_where_a_function_is_graded(
    pool: WorkerPool, group: MAKE, settings: dict[str, Any], elsewhere: bool
) -> None:
    reward = build_reward({"mine": FunctionConfig(**settings)}, workers=pool)
    assert (reward([group("a")]).total != [[float(os.getpid())]]) == elsewhere


def test_a_limit_that_cannot_be_kept_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(UserError, match=r"rewards\.mine: timeout=3 needs a worker process, but it is a lambda.*null"):
        build_reward({"mine": FunctionConfig(function="support.worker_functions:nameless", timeout=3)}, workers=pool)


def test_the_limit_of_a_function_is_its_own(group: MAKE) -> None:
    slow = {"mine": FunctionConfig(function="support.worker_functions:hostile", timeout=0.3)}
    with WorkerPool(1, timeout=60) as pool:
        reward = build_reward(slow, workers=pool)
        reward([group("a")])
        started = time.monotonic()
        assert reward([group("spins", "a")]).total == [[None, 1.0]]
        assert time.monotonic() - started < 0.3 + BUSY


def test_built_in_rewards_stay_here_unless_workers_are_asked_for(pool: WorkerPool) -> None:
    configs = {"correctness": NumberConfig(), "mine": FunctionConfig(function="support.worker_functions:where")}
    names = [build_reward(configs, workers=pool, rules=rules).grading().names for rules in (False, True)]
    assert names == [{"mine"}, {"correctness", "mine"}]


@pytest.mark.slow
def test_a_function_that_loads_slowly_has_its_whole_limit_for_each_call(
    group: MAKE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import time\ntime.sleep(1.2)\n\ndef slow_to_load(completion):\n    time.sleep(0.2)\n    return 1.0\n"
    (tmp_path / "slow_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_module

    with WorkerPool(1, timeout=LIMIT) as pool:
        assert reward_of(slow_module.slow_to_load, pool)([group(*"abcdef")]).total == [[1.0] * 6]
    del sys.modules["slow_module"]


def test_what_only_this_process_can_load_is_graded_here_with_a_notice(
    group: MAKE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "passing_module.py").write_text("def passing(completion):\n    return float(len(completion))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import passing_module

    (tmp_path / "passing_module.py").unlink()
    notices: list[str] = []
    with WorkerPool(1, timeout=20) as pool:
        reward = reward_of(passing_module.passing, pool, notice=notices.append)
        assert [reward([group("a", "bb")]).total for _ in range(2)] == [[[1.0, 2.0]]] * 2
    assert len(notices) == 1
    assert re.fullmatch(r"reward 'passing' is graded in the trainer's own process.*No module.*", notices[0])
    del sys.modules["passing_module"]


def test_a_function_keeps_what_it_keeps_in_the_process_that_calls_it(group: MAKE) -> None:
    with WorkerPool(1, timeout=20) as pool:
        reward = reward_of(worker_functions.first_calls, pool)
        assert reward([group("a", "b"), group("c")]).total == [[1.0, 2.0], [3.0]]
        assert reward([group("d")]).total == [[4.0]]
    assert worker_functions._calls == []


def test_a_part_ends_the_run_after_so_many_failures_in_a_row_and_says_what_to_do(pool: WorkerPool, group: MAKE) -> None:
    reward = reward_of(worker_functions.hostile, pool)
    assert reward([group("raises"), group("a")]).total == [[None], [1.0]]
    for _ in range(3):  # fewer than PATIENCE in a row each time
        for _ in range(3):
            assert reward([group(*["raises"] * 5)]).total == [[None] * 5]
        assert reward([group("a")]).total == [[1.0]]
    for _ in range(3):
        reward([group(*["raises"] * 5)])
    over = r"^reward 'hostile' failed on all of the last 20 completions: ZeroDivisionError: .*; correct it, or give it"
    with pytest.raises(UserError, match=over):
        reward([group(*["raises"] * 5)])
    assert PATIENCE == 16


@pytest.mark.slow
def test_a_function_that_always_hangs_is_given_up_before_all_completions_had_their_time(
    group: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "PATIENCE", 4)
    with WorkerPool(2, timeout=20) as pool:
        hangs = {"mine": FunctionConfig(function="support.worker_functions:hostile", timeout=0.1)}
        started = time.monotonic()
        with pytest.raises(
            UserError, match=r"^reward 'mine' failed on all 400 completions: no answer .*; make it faster"
        ):
            build_reward(hangs, workers=pool)([group(*["spins"] * 20) for _ in range(20)])
        assert time.monotonic() - started < 400 * 0.1 / 2
        reward = build_reward(hangs, workers=pool)
        assert reward([group("a")]).total == [[1.0]]
        # Once it has worked, each completion has its time.
        assert reward([group(*["spins"] * 5, "a")]).total == [[None] * 5 + [1.0]]


def test_one_question_never_ends_a_run_that_has_just_begun(pool: WorkerPool, group: MAKE) -> None:
    assert reward_of(worker_functions.hostile, pool)([group(*["raises"] * 15)]).total == [[None] * 15]
    assert reward_of(worker_functions.hostile, pool)([group("exits"), group("exits")]).total == [[None], [None]]
    with pytest.raises(UserError, match="failed on all 2 completions: ZeroDivisionError"):
        reward_of(worker_functions.hostile, pool)([group("raises"), group("raises")])


class Strict(Scorer):
    """A grader that could not tell, which is no fault of its own."""

    closed = 0

    def score(self, groups: list[Group]) -> ComponentScores:
        scores: list[list[Score]] = [[None] * len(group.completions) for group in groups]
        error = TimeoutError("too hard to compare")
        return ComponentScores(scores=scores, failed=sum(map(len, scores)), first_error=error, tolerated=True)

    def answer(self, completion: Completion, prompt: Any) -> None:
        return None

    def close(self) -> None:
        self.closed += 1


def test_failures_that_a_grader_tolerates_are_counted_and_never_end_a_run(group: MAKE) -> None:
    scorer, notices = Strict(), list[str]()
    reward = RewardSet([Component(name="math", weight=1.0, scorer=scorer)], notice=notices.append)
    for _ in range(5):
        assert reward([group(*["x"] * 50)]).total == [[None] * 50]
    assert reward.failures["math"].count == 250
    messages = (
        "reward 'math': {} completions have had no score so far because of an error; now TimeoutError: too hard to"
    )
    assert notices == [f"{messages.format(count)} compare" for count in (50, 100)]
    reward.close()
    assert scorer.closed == 1


@pytest.mark.usefixtures("one_thread")
def test_a_run_whose_reward_hangs_once_goes_on_without_that_score(
    recipe: Callable[..., Any], train: Callable[..., Any], watch: Any, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    mine = {
        "type": "function",
        "function": "support.worker_functions:hangs_on",
        "arguments": {"mark": str(mark)},
        "timeout": 0.5,
    }
    progress = watch({("eval", 0): mark.unlink})
    result = train(recipe(rewards={"correctness": {"type": "number"}, "mine": mine}), progress=progress)
    assert result.exit_code == 0
    assert progress.steps("train") == [1, 2]
    assert progress.values("reward/missing_fraction") == [1 / 16, 0.0]
    assert [row.get("reward/mine/failed") for stage, _, row in progress.rows if stage == "train"] == [1.0, None]
    messages = (
        "reward 'mine': 1 completion has had no score so far because of an error; now no answer from a worker process"
    )
    assert [notice for notice in progress.notices if "mine" in notice] == [f"{messages} within 0.5 s"]
    rows = [json.loads(line) for line in (result.path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert [row["rewards"]["mine"] is None for row in rows].count(True) == 1
    assert all(row["rewards"]["mine"] == len(row["text"]) for row in rows if row["rewards"]["mine"] is not None)


@pytest.mark.usefixtures("one_thread")
def test_training_and_evaluating_both_call_functions_elsewhere(
    recipe: Callable[..., Any], train: Callable[..., Any]
) -> None:
    where = {"type": "function", "function": "support.worker_functions:where"}
    result = train(recipe(training={"steps": 1}, rewards={"correctness": {"type": "number"}, "where": where}))
    rows = [json.loads(line) for line in (result.path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    trained = {int(row["rewards"]["where"]) for row in rows}
    assert 1 <= len(trained) <= 2 and os.getpid() not in trained
    evaluation = compare_checkpoints([str(result.path)]).evaluations[0]
    evaluated = {int(value or 0) for value in evaluation.values["where"]}
    assert 1 <= len(evaluated) <= 2 and not evaluated & {0, os.getpid(), *trained}
    assert all_end([*trained, *evaluated], within=5)


@pytest.mark.usefixtures("one_thread")
def test_python_functions_of_a_run_are_called_elsewhere_unless_it_says_otherwise(
    recipe: Callable[..., Any], train: Callable[..., Any], watch: Any
) -> None:
    result = []
    for run in ({"name": "chosen"}, {"name": "none", "grading_workers": 0}):
        progress = watch()
        settings = recipe(run=run, training={"steps": 1}, evaluation={"accuracy": "where"})
        assert train(settings, reward={"where": worker_functions.where}, progress=progress).exit_code == 0
        result.append(progress.values("reward/where") == [float(os.getpid())])
    assert result == [False, True]


@pytest.mark.usefixtures("one_thread")
def test_a_run_without_any_reward_says_so_and_fails(
    recipe: Callable[..., Any], train: Callable[..., Any], watch: Any
) -> None:
    def unsure(completion: str) -> None:
        return None

    progress = watch()
    with pytest.raises(RunError, match="return a number"):
        train(recipe(), reward=unsure, progress=progress)
    assert progress.values("reward/missing_fraction") == [1.0, 1.0]
    messages = [notice for notice in progress.notices if "without a reward" in notice]
    assert messages == [
        "1 step so far without a reward for any completion, and so no update (correctness gave none: return a number)"
    ]


def test_what_a_function_logs_in_a_worker_reaches_the_step(pool: WorkerPool, group: MAKE) -> None:
    groups = [group("a", "bb"), group("c", "xxx", "ddd"), group("ee")]
    logged = reward_of(worker_functions.logs_length, pool)(groups).logged
    assert logged["logs_length/length"] == [1.0, 2.0, 1.0, 3.0, 3.0, 2.0]
    [pid] = logged["logs_length/pid"]
    assert pid in pids(pool)
    alone = reward_of(worker_functions.logs_length, None)(groups).logged
    assert alone == {"logs_length/length": logged["logs_length/length"], "logs_length/pid": [float(os.getpid())]}
