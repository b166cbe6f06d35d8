from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flatpeak.errors import UserError
from flatpeak.rewards.config import CountdownConfig, FormatConfig, FunctionConfig, LengthConfig, NumberConfig
from flatpeak.rewards.numeric_answer import NumberReward
from flatpeak.rewards.reward_set import Failures, RewardSet, as_reward, build_reward
from flatpeak.rewards.workers.pool import WorkerError, WorkerPool
from flatpeak.types import Completion, Example, Group, Prompt, Score
from support import worker_functions
from support.worker_functions import digits, distinct, huge_power, treacherous
from support.workers import alive, all_end, start_script

EXTRACTIONS = ("whole", "answer_tag", "gsm8k_strict", "gsm8k_flexible", "last_number", "boxed")
TEXTS = (
    "18",
    "<think>6 * 3</think> <answer>6 * 3</answer>",
    "<think>so</think> <answer>18</answer>",
    "The answer is 17, no, 18.",
    "#### 18",
    r"\boxed{18}",
    r"\boxed{18} or \boxed{3}",
    "<answer>1/0</answer>",
    "",
    "−18 €",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """For calls that end, however busy the machine is."""
    with WorkerPool(2, timeout=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def strict() -> Iterator[WorkerPool]:
    """For calls that do not end, and others of a moment."""
    with WorkerPool(2, timeout=1) as pool:
        yield pool


def make_group(*texts: str, name: str = "row", gold: str = "18", text: str = "How many?", **columns: Any) -> Group:
    example = Example(id=name, question="How many?", gold=gold, columns={"nums": [3, 6], "target": 18, **columns})
    completions = tuple(
        Completion(token_ids=tuple(range(len(said))), logprobs=(-0.5,) * len(said), finish_reason="stop", text=said)
        for said in texts
    )
    return Group(prompt=Prompt(id=name, token_ids=(0,), text=text, example=example), completions=completions)


def outcome(pool: WorkerPool, function: Callable[..., Any], *arguments: Any) -> tuple[str, str]:
    """Why a call has no result, and what is said of it."""
    with pytest.raises(WorkerError) as caught:
        pool.submit(function, *arguments).result(timeout=90)
    return caught.value.reason, str(caught.value)


def test_a_worker_is_a_process_of_its_own_without_the_heavy_libraries(pool: WorkerPool) -> None:
    assert pool.submit(os.getpid).result() not in (os.getpid(), os.getppid())
    loaded = pool.submit(worker_functions.modules).result()
    assert {"flatpeak", "support"} <= loaded
    assert not loaded & {"torch", "numpy", "pydantic", "transformers", "pytest"}


def test_calls_return_what_they_would_return_here(pool: WorkerPool) -> None:
    calls = [pool.submit(divmod, number, 7) for number in range(50)]
    assert [call.result() for call in calls] == [divmod(number, 7) for number in range(50)]


def test_a_pool_with_little_to_do_starts_one_process(pool: WorkerPool) -> None:
    assert len({pool.submit(os.getpid).result() for _ in range(10)}) == 1


@pytest.mark.parametrize(
    ("function", "arguments", "reason", "text"),
    [
        (os._exit, (7,), "died", "a worker process died: exit code 7"),
        (sys.exit, (4,), "died", "a worker process died: exit code 4"),
        (signal.raise_signal, (signal.SIGKILL,), "died", "a worker process died: killed by SIGKILL"),
        (signal.raise_signal, (signal.SIGSEGV,), "died", "a worker process died: killed by SIGSEGV"),
        (time.sleep, (100,), "timeout", "no answer from a worker process within 1 s"),
        (signal.raise_signal, (signal.SIGSTOP,), "timeout", "no answer from a worker process within 1 s"),
        (huge_power, (), "timeout", "no answer from a worker process within 1 s"),
        (signal.raise_signal, (signal.SIGALRM,), "timeout", "no answer from a worker process within 1 s"),
    ],
)
def test_a_lost_worker_is_replaced(
    request: pytest.FixtureRequest, function: Callable[..., Any], arguments: tuple[Any, ...], reason: str, text: str
) -> None:
    pool = request.getfixturevalue("strict" if reason == "timeout" else "pool")
    before = pool.submit(os.getpid).result()
    assert outcome(pool, function, *arguments) == (reason, text)
    assert not alive(before)
    assert pool.submit(divmod, 9, 7).result() == (1, 2)


def test_a_worker_that_stops_reading_is_replaced(strict: WorkerPool) -> None:
    before = strict.submit(os.getpid).result()
    assert strict.submit(len, b"").result() == 0  # it has all the time there is for loading a function
    os.kill(before, signal.SIGSTOP)
    assert outcome(strict, len, b"0" * 1_000_000)[0] == "timeout"
    assert strict.submit(len, b"0" * 1_000_000).result() == 1_000_000


def test_what_a_function_raises_is_said_with_its_place_and_costs_no_worker(pool: WorkerPool) -> None:
    before = pool.submit(os.getpid).result()
    line = worker_functions.fail.__code__.co_firstlineno + 1
    assert outcome(pool, worker_functions.fail, "bad\nluck") == (
        "raised",
        f"ValueError: bad luck ({worker_functions.__file__}:{line})",
    )
    assert outcome(pool, threading.Lock)[0] == "raised"  # a result that does not pickle
    with pytest.raises(UserError, match=r"^the row is empty$"):
        pool.submit(worker_functions.refuse, "the row is empty").result()
    assert pool.submit(os.getpid).result() == before


def test_what_cannot_travel_is_told_from_what_fails(pool: WorkerPool) -> None:
    assert outcome(pool, lambda: 1)[0] == "unloadable"
    assert outcome(pool, len, threading.Lock()) == ("unloadable", "TypeError: cannot pickle '_thread.lock' object")


def test_a_worker_killed_between_two_calls_costs_nothing(pool: WorkerPool) -> None:
    before = pool.submit(os.getpid).result()
    os.kill(before, signal.SIGKILL)
    assert all_end([before], within=30)
    assert pool.submit(os.getpid).result() != before


def test_a_worker_that_hangs_holds_nobody_up(strict: WorkerPool) -> None:
    hanging = strict.submit(huge_power)
    assert [strict.submit(divmod, 9, 7).result() for _ in range(5)] == [(1, 2)] * 5
    assert not hanging.done()
    assert isinstance(hanging.exception(), WorkerError)


def test_a_worker_may_idle_for_longer_than_a_call_may_take() -> None:
    with WorkerPool(1, timeout=0.5) as pool:
        before = pool.submit(os.getpid).result()
        time.sleep(1.7)
        assert pool.submit(os.getpid).result() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_stop_a_run_leave_workers_alone(pool: WorkerPool, number: signal.Signals) -> None:
    before = pool.submit(os.getpid).result()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM} == set()
    os.kill(before, number)
    assert pool.submit(os.getpid).result() == before


def test_closing_a_pool_ends_workers_that_hang() -> None:
    pool = WorkerPool(2, timeout=100)
    pids = [pool.submit(os.getpid).result()]
    hanging, waiting = pool.submit(huge_power), [pool.submit(time.sleep, 100) for _ in range(3)]
    time.sleep(0.2)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 50
    assert isinstance(hanging.exception(), WorkerError)
    assert [call.cancelled() for call in waiting] == [False, True, True]
    assert all_end(pids, within=0)
    with pytest.raises(RuntimeError):
        pool.submit(os.getpid)


SCRIPT = """
import os, signal, sys, time
from flatpeak.rewards.workers import WorkerPool
from support.worker_functions import huge_power

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born ignoring it
pool = WorkerPool(3, timeout=20)
calls = [pool.submit(time.sleep, 0.3) for _ in range(3)]
[call.result() for call in calls]
calls = [pool.submit(os.getpid), pool.submit(huge_power, timeout=1), pool.submit(time.sleep, 1)]
calls[0].result()
time.sleep(0.2)
try:
    print(*(worker.pid for worker in pool._workers), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def test_workers_end_with_a_process_that_could_not_close_them() -> None:
    process, pids = start_script(SCRIPT, workers=3)
    process.kill()
    process.communicate(timeout=60)
    # The one that hangs has nobody left to kill it: its own timer does, a second after the deadline.
    assert all_end(pids, within=30)


def test_ctrl_c_prints_nothing_of_workers() -> None:
    process, pids = start_script(SCRIPT, workers=3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("stopped\n", "", 0)
    assert all_end(pids, within=30)


FORKED = """
import os
from flatpeak.rewards.workers import WorkerPool

with WorkerPool(1, timeout=20) as pool:
    before = pool.submit(os.getpid).result()
    child = os.fork()
    if child == 0:
        pool.__del__()
        os._exit(0)
    os.waitpid(child, 0)
    print(pool.submit(os.getpid).result() == before)
"""


def test_a_forked_copy_of_the_process_leaves_workers_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_workers_find_the_scores_of_every_built_in_reward(pool: WorkerPool) -> None:
    configs = {
        **{extraction: NumberConfig(extraction=extraction, weight=0.5) for extraction in EXTRACTIONS},
        "format": FormatConfig(weight=0.3),
        "length": LengthConfig(target=5, limit=40, weight=0.1),
        "countdown": CountdownConfig(weight=0.0),
    }
    groups = [make_group(*TEXTS, name=f"row-{gold}", gold=gold) for gold in ("18", "-18", "3", "1/2")]
    groups.append(make_group("18</think> <answer>6*3</answer>", "18</think>", text="Think. <think>"))
    here, there = build_reward(configs), build_reward(configs, workers=pool)
    assert there.grading() is not None and there.grading().names == configs.keys()
    scores = here(groups)
    assert there(groups) == scores
    result = {name: {score for row in component for score in row} for name, component in scores.parts.items()}
    assert [name for name in configs if not {0.0, 1.0} <= result[name]] == []
    assert result["format"] == {0.0, 1 / 3, 1.0}
    assert scores.parts["length"][-1] == [9 / 35, 30 / 35]


def test_functions_that_say_so_give_the_same_scores_and_failures(pool: WorkerPool) -> None:
    parts = {"digits": digits, "distinct": (distinct, 0.5)}
    groups = [make_group("12", "none", "12"), make_group("0", "7", "x")]
    here, there = as_reward(parts), as_reward(parts, workers=pool)
    assert isinstance(here, RewardSet) and isinstance(there, RewardSet)
    scores = there(groups)
    assert scores.parts["digits"] == [[3.0, None, 3.0], [None, 7.0, None]]
    assert scores.parts["distinct"] == [[2.0, 2.0, 2.0], [3.0, 3.0, 3.0]]
    assert scores.total == [[4.0, None, 4.0], [None, 8.5, None]]
    line = digits.__code__.co_firstlineno + 4
    error = f"ValueError: no digit in 'none' ({worker_functions.__file__}:{line})"
    assert there.failures == {"digits": Failures(count=2, first_error=error)}
    # `distinct` has TRL's signature, which here sees all completions of the call: it may differ, and nothing else.
    assert here(groups).parts["digits"] == scores.parts["digits"]
    assert here.failures == there.failures


def test_a_function_of_a_recipe_may_say_so_too(pool: WorkerPool) -> None:
    reward = build_reward({"digits": FunctionConfig(function="support.worker_functions:digits")}, workers=pool)
    assert reward.grading() is not None
    assert reward([make_group("12", "5")]).total == [[3.0, 5.0]]


def test_other_functions_are_called_once_in_this_process_with_everything(pool: WorkerPool) -> None:
    calls: list[tuple[int, list[str]]] = []

    def batch(completions: list[str]) -> list[float]:
        calls.append((os.getpid(), completions))
        return [float(len(calls))] * len(completions)

    reward = as_reward({"correctness": NumberReward(), "mine": batch}, workers=pool)
    assert isinstance(reward, RewardSet)
    assert reward.grading() is not None and reward.grading().names == {"correctness"}
    assert reward([make_group("18", "17"), make_group("18")]).parts == {
        "correctness": [[1.0, 0.0], [1.0]],
        "mine": [[1.0, 1.0], [1.0]],
    }
    assert calls == [(os.getpid(), ["18", "17", "18"])]
    assert list(reward([make_group("1")]).parts) == ["correctness", "mine"]


def test_a_set_without_workers_or_eligible_parts_hands_nothing_over(pool: WorkerPool) -> None:
    assert build_reward({"correctness": NumberConfig()}).grading() is None
    only_local = as_reward({"mine": lambda completion: 1.0}, workers=pool)
    assert isinstance(only_local, RewardSet)
    assert only_local.grading() is None
    assert only_local([make_group("1")]).total == [[1.0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text", "timeout"),
    [
        ("dies", "a worker process died: killed by SIGKILL", 60),
        ("exits", "a worker process died: exit code 7", 60),
        ("hangs", "no answer from a worker process within 3 s", 3),
    ],
)
def test_what_a_lost_worker_was_grading_is_missing_and_counted(
    tmp_path: Path, fault: str, text: str, timeout: float
) -> None:
    calls = tmp_path / "calls"
    names = ["fine", fault, "good"]
    groups = [make_group("18", "17", name=name, group_id=name, calls=str(calls)) for name in names]
    with WorkerPool(2, timeout=timeout) as pool:
        reward = as_reward({"correctness": NumberReward(), "mine": treacherous}, workers=pool)
        assert isinstance(reward, RewardSet)
        scores = reward(groups)
        assert reward(groups[:1]).total == [[2.0, 1.0]]
    assert scores.parts["correctness"] == [[1.0, 0.0]] * 3
    assert scores.parts["mine"] == [[1.0, 1.0], [None, 1.0], [1.0, 1.0]]
    assert scores.total == [[2.0, 1.0], [None, 1.0], [2.0, 1.0]]
    assert reward.failures == {"mine": Failures(count=1, first_error=text)}
    graded = [line.split()[1:] for line in calls.read_text().splitlines()]
    # Nothing is tried again.
    assert sorted(graded) == sorted(
        2 * [["fine", "18"], ["fine", "17"]] + [[n, t] for n in (fault, "good") for t in ("18", "17")]
    )


def test_a_lost_worker_of_a_part_that_is_only_logged_leaves_the_total(pool: WorkerPool, tmp_path: Path) -> None:
    reward = as_reward({"correctness": NumberReward(), "mine": (treacherous, 0.0)}, workers=pool)
    assert reward([make_group("18", group_id="dies", calls=str(tmp_path / "calls"))]).total == [[1.0]]


def test_a_part_that_fails_on_everything_ends_the_run_as_without_workers(pool: WorkerPool, tmp_path: Path) -> None:
    fails = as_reward({"mine": digits}, workers=pool)
    with pytest.raises(UserError, match=r"^reward 'mine' failed on all 2 completions: ValueError: no digit in 'x' \("):
        fails([make_group("x"), make_group("y")])
    dies = as_reward({"mine": treacherous}, workers=pool)
    group = make_group(*["18"] * 5, group_id="exits", calls=str(tmp_path / "calls"))
    assert [dies([group]).total for _ in range(3)] == [[[None] * 5]] * 3
    over = "^reward 'mine' failed on all of the last 20 completions: a worker process died: exit code 7; find out what"
    with pytest.raises(UserError, match=over):
        dies([group])


def test_errors_of_the_rows_are_those_of_this_process(pool: WorkerPool) -> None:
    group = make_group("18", name="odd", gold="many")
    messages: list[str] = []
    for workers in (None, pool):
        with pytest.raises(UserError) as caught:
            build_reward({"correctness": NumberConfig()}, workers=workers)([make_group("18"), group])
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert messages[1].startswith("the gold answer 'many' of row 'odd' is not a number")


def test_a_function_that_no_worker_can_load_is_refused() -> None:
    def local(completion: str) -> Score:
        return 1.0

    local.by_group = True  # type: ignore[attr-defined]
    with WorkerPool(1, timeout=60) as pool, pytest.raises(UserError, match=r"^reward 'mine' or a row cannot be sent"):
        as_reward({"mine": local}, workers=pool)([make_group("1")])
