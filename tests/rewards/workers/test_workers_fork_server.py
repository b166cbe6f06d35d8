"""Workers that are forked from a process which has loaded a slow function once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatpeak.rewards.workers.pool import WorkerError, WorkerPool
from support import worker_functions
from support.worker_functions import Slow, huge_power
from support.workers import alive, all_end, start_script


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """For calls that end; its workers have `Slow` loaded."""
    with WorkerPool(2, timeout=60, forked=Slow()) as pool:
        yield pool


def server_pid(pool: WorkerPool) -> int:
    assert pool._server._child is not None
    return pool._server._child.pid


def reason(pool: WorkerPool, *call: object, timeout: float | None = None) -> tuple[str, str]:
    with pytest.raises(WorkerError) as caught:
        pool.submit(*call, timeout=timeout).result(timeout=90)  # type: ignore[arg-type]
    return caught.value.reason, str(caught.value)


def test_a_lost_worker_is_replaced_without_loading_its_function_again(pool: WorkerPool) -> None:
    pool.submit(Slow(), "0", "0").result()
    started, loads = time.monotonic(), 8
    for _ in range(loads):
        assert reason(pool, os._exit, 7) == ("died", "a worker process died: exit code 7")
        assert pool.submit(Slow(), "0", "0").result()
    assert time.monotonic() - started < 0.9 * loads  # each load of it takes a second


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ((os._exit, 7), ("died", "a worker process died: exit code 7")),
        ((signal.raise_signal, signal.SIGSEGV), ("died", "a worker process died: killed by SIGSEGV")),
        ((signal.raise_signal, signal.SIGSTOP), ("timeout", "no answer from a worker process within 1 s")),
        ((huge_power,), ("timeout", "no answer from a worker process within 1 s")),
        ((Slow(deaf=True), "100", "0"), ("timeout", "no answer from a worker process within 1 s")),
        ((worker_functions._close_everything,), ("died", "a worker process died: killed by SIGKILL")),
    ],
)
def test_what_is_said_of_a_forked_worker_is_what_is_said_of_any(
    pool: WorkerPool, call: tuple[object, ...], found: tuple[str, str]
) -> None:
    assert pool.submit(len, "abc").result() == 3
    before = pool.submit(os.getpid).result()
    assert reason(pool, *call, timeout=1 if found[0] == "timeout" else None) == found
    assert not alive(before)
    assert pool.submit(divmod, 9, 7).result() == (1, 2)


def test_a_forked_worker_has_the_limits_of_any_other() -> None:
    with WorkerPool(1, timeout=30, memory_bytes=2**28, forked=Slow()) as pool:
        assert reason(pool, worker_functions._hold_memory)[0] == "memory"
        assert pool.submit(os.getpgrp).result() == pool.submit(os.getpid).result()


def test_what_a_forked_worker_started_ends_with_it(tmp_path: Path) -> None:
    with WorkerPool(1, timeout=20, forked=Slow()) as pool:
        assert pool.submit(worker_functions._leave_children, str(tmp_path)).result() == 0.5
        children = [int(path.name) for path in tmp_path.iterdir()]
        reason(pool, signal.raise_signal, signal.SIGKILL)
        assert len(children) == 3
        assert all_end(children, within=5)


def test_a_lost_server_is_started_anew() -> None:
    with WorkerPool(1, timeout=20, forked=Slow()) as pool:
        assert pool.submit(Slow(), "0", "0").result()
        before = server_pid(pool)
        os.kill(before, signal.SIGKILL)
        reason(pool, os._exit, 7)
        assert pool.submit(Slow(), "0", "0").result()
        assert server_pid(pool) != before


def test_a_function_that_does_not_load_is_said_so() -> None:
    with WorkerPool(1, timeout=20, forked=worker_functions.Unloadable()) as pool:
        assert reason(pool, len, "abc") == ("unloadable", "ImportError: no such library")


def test_nothing_is_left_of_a_pool_that_is_closed_while_it_loads_or_hangs() -> None:
    pool = WorkerPool(1, timeout=60, forked=Slow())
    loading = pool.submit(Slow(), "0", "0")
    time.sleep(0.5)
    started = time.monotonic()
    pool.close()
    assert isinstance(loading.exception(), WorkerError)
    pool = WorkerPool(2, timeout=60, forked=Slow())
    pids = [pool.submit(os.getpid).result(), server_pid(pool)]
    hanging = [pool.submit(huge_power) for _ in range(2)]
    time.sleep(0.2)
    pool.close()
    assert [isinstance(call.exception(), WorkerError) for call in hanging] == [True, True]
    assert all_end(pids, within=5)
    assert time.monotonic() - started < 30


SCRIPT = """
import os, signal, time
from flatpeak.rewards.workers import WorkerPool
from support.worker_functions import Slow, huge_power

signal.signal(signal.SIGINT, signal.default_int_handler)
pool = WorkerPool(2, timeout=4, forked=Slow())
calls = [pool.submit(time.sleep, 0.3) for _ in range(2)]
[call.result() for call in calls]
calls = [pool.submit(huge_power)]
time.sleep(0.3)
try:
    print(pool._server._child.pid, *(worker.pid for worker in pool._workers), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_server_and_its_workers_end_with_the_process_that_has_them(how: str) -> None:
    process, pids = start_script(SCRIPT, workers=3)
    if how == "killed":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("stopped\n" if how == "interrupted" else "", "")
    assert all_end(pids, within=30)
