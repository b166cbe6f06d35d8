"""Runs in two processes that are killed at a random moment: what is done to whom, and how the job ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from support.workers import alive, all_end, children

Way = Literal["rank killed", "rank raises", "rank terminated", "all terminated", "launcher killed"]
WAYS: tuple[Way, ...] = ("rank killed", "rank raises", "rank terminated", "all terminated", "launcher killed")
ROWS = 12
"""Rows of metrics.jsonl of the whole run: three steps of SFT, four of RL, five evaluations."""
CALLS = {"sample": 10, "update": 6, "complete": 7}
"""Where a rank may raise, and how often it comes there."""
FAULT = "FLATPEAK_TEST_FAULT"
REWARD = """
import os
if os.environ.get({variable!r}):
    from support.kills import arm
    arm(os.environ[{variable!r}])

def odd(completion_ids):
    return [float(sum(ids) % 2) for ids in completion_ids]
"""
"""A reward that differs within most groups; every rank loads it, and the fault that one of them is to have."""
START_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What happens to whom, and when."""

    way: Way
    rank: int
    row: int
    """Rows of metrics.jsonl that the run has by then; 0: its processes have just been started."""
    delay: float
    """Seconds after that row."""
    fault: tuple[str, int] = ("", 0)
    """For a rank that raises: the call that does, and the how manieth."""


def kills(count: int, *, seed: int) -> list[Kill]:
    """Random moments, every way equally often."""
    chance = random.Random(seed)
    drawn = []
    for index in range(count):
        call = chance.choice(sorted(CALLS))
        drawn.append(
            Kill(
                way=WAYS[index % len(WAYS)],
                rank=chance.randrange(2),
                row=chance.randrange(ROWS - 1),
                delay=chance.uniform(0, 0.4),
                fault=(call, chance.randint(1, CALLS[call])),
            )
        )
    return drawn


@dataclass(frozen=True, kw_only=True)
class End:
    """How a job ended."""

    code: int
    errors: list[str]
    """The lines of stderr that tell an error."""
    output: str
    seconds: float
    """From the kill to the end of the last process."""
    pids: Mapping[int, int]
    """The process of each rank."""


def run_and_kill(recipe: Mapping[str, Any], kill: Kill) -> End:
    """Start `flatpeak train` with a recipe of two processes, and kill."""
    run = Path(recipe["run"]["directory"]) / recipe["run"]["name"]
    path = run.parent / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(dict(recipe), sort_keys=False))
    source = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    if kill.way == "rank raises":
        environment[FAULT] = f"{kill.rank} {kill.fault[0]} {kill.fault[1]}"
    log = path.with_suffix(".log")
    with log.open("w") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "flatpeak", "train", str(path)],
            env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        pids = _wait(job, lambda: ranks_of(job.pid))
        if kill.way != "rank raises":
            _wait(job, lambda: kill.row == 0 or rows_of(run) >= kill.row)
            time.sleep(kill.delay)
        else:
            _wait(job, lambda: any(not alive(pid) for pid in pids.values()))
        began = time.monotonic()
        _kill(job.pid, pids, kill)
        code = job.wait(timeout=60)
        assert all_end(list(pids.values()), within=60), f"{kill}: ranks outlive the job"
    finally:
        for pid in [job.pid, *ranks_of(job.pid).values()]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        job.wait()
    text = log.read_text()
    errors = [line for line in text.splitlines() if "error: " in line or "Traceback" in line]
    return End(code=code, errors=errors, output=text, seconds=time.monotonic() - began, pids=pids)


def _wait(job: subprocess.Popen[bytes], ready: Callable[[], Any]) -> Any:
    """The first answer that is true; what it is when the job has ended before."""
    deadline = time.monotonic() + START_SECONDS
    while not (answer := ready()) and job.poll() is None:
        if time.monotonic() > deadline:
            raise AssertionError("the job did not come so far")
        time.sleep(0.005)
    return answer


def _kill(launcher: int, pids: Mapping[int, int], kill: Kill) -> None:
    targets = {
        "rank killed": [(pids[kill.rank], signal.SIGKILL)],
        "rank raises": [],
        "rank terminated": [(pids[kill.rank], signal.SIGTERM)],
        "all terminated": [(pid, signal.SIGTERM) for pid in (launcher, *pids.values())],
        "launcher killed": [(launcher, signal.SIGKILL)],
    }
    for pid, number in targets[kill.way]:
        if alive(pid):
            os.kill(pid, number)


def ranks_of(launcher: int) -> dict[int, int]:
    """The process of each rank, once both have been started."""
    found = {}
    for child in children(launcher):
        try:
            names = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [int(name[5:]) for name in names if name.startswith(b"RANK=")]
        if ranks:
            found[ranks[0]] = child
    return found if len(found) == 2 else {}


def rows_of(run: Path) -> int:
    """The rows of a run's metrics so far."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def arm(fault: str) -> None:
    """Let this process raise at the call that is named, if it is the rank that is."""
    from flatpeak.policy.model import Policy
    from flatpeak.rollout.engine import NativeEngine
    from flatpeak.training.recorder import Recorder

    rank, call, count = fault.split()
    if os.environ.get("RANK") != rank:
        return
    owner, name = {
        "sample": (NativeEngine, "stream"),
        "update": (Policy, "token_logprobs"),
        "complete": (Recorder, "complete"),
    }[call]
    plain, calls = getattr(owner, name), list[None]()

    def counted(*args: Any, **settings: Any) -> Any:
        calls.append(None)
        if len(calls) == int(count):
            raise ZeroDivisionError("a fault of this rank")
        return plain(*args, **settings)

    setattr(owner, name, counted)
