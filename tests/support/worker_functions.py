"""Functions for workers, in an importable module that loads in a moment."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flatpeak.errors import UserError

if TYPE_CHECKING:
    from flatpeak.types import Group


def modules() -> set[str]:
    """The top-level modules that this process has loaded."""
    return {name.partition(".")[0] for name in sys.modules}


def huge_power() -> int:
    """Hours in one instruction: Python code in this process, signal handlers too, runs again only after it."""
    return 9**9**9


def fail(text: str) -> None:
    raise ValueError(text)


def refuse(text: str) -> None:
    raise UserError(text)


def digits(completion: str) -> float | None:
    """Raises where there is none, and has no score for zeros only."""
    digit_texts = [int(character) for character in completion if character.isdigit()]
    if not digit_texts:
        raise ValueError(f"no digit in {completion!r}")
    return float(sum(digit_texts)) or None


def distinct(completions: list[str]) -> list[float]:
    """The number of different texts in the call, which needs all completions of a group."""
    return [float(len(set(completions)))] * len(completions)


def treacherous(completion: str, group_id: str, calls: str) -> float:
    """Says who grades what, and on an 18 ends its process or hangs where the row says so."""
    with Path(calls).open("a") as file:
        file.write(f"{os.getpid()} {group_id} {completion}\n")
    if completion != "18":
        return 1.0
    match group_id:
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            os._exit(7)
        case "hangs":
            huge_power()
    return 1.0


def step_by_step(completion: str, mine: str, before: str) -> float:
    """Waits until the group before has its score, and then says that this one has."""
    deadline = time.monotonic() + 20
    while before and not Path(before).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{before} never came")
        time.sleep(0.01)
    Path(mine).touch()
    return float(completion)


def note(completion: str, directory: str) -> float:
    """Leaves the number of the grading process behind."""
    Path(directory, str(os.getpid())).touch()
    return float(len(completion))


def dies_once(completion: str, mark: str) -> float:
    """The first call of all ends its process."""
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return float(len(completion))
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


for _function in (digits, distinct, treacherous, step_by_step, note, dies_once):
    _function.by_group = True  # type: ignore[attr-defined]


class _Unpicklable:
    def __reduce__(self) -> tuple[object, ...]:
        raise ValueError("not me")


def _hold_memory() -> None:
    kept = []
    while True:
        kept.append(bytearray(2**20))


def _recurse(depth: int = 0) -> int:
    return 1 + _recurse(depth + 1)


def _endless_words() -> float:
    for _ in range(40):
        sys.stdout.write("x" * 99_999 + "\n")
    return 0.5


def _close_input() -> float:
    sys.stdin.close()
    return 0.5


def _leave_thread() -> float:
    threading.Thread(target=time.sleep, args=(100,)).start()
    return 0.5


def _leave_children(directory: str) -> float:
    """A program, and a fork of this process that comes back from the call as well, a moment later."""
    program = subprocess.Popen(["sleep", "100"])
    Path(directory, str(program.pid)).touch()
    child = os.fork()
    if not child:
        time.sleep(0.1)
        return 0.25
    Path(directory, str(child)).touch()
    fork = os.fork()
    if not fork:
        time.sleep(100)
    Path(directory, str(fork)).touch()
    return 0.5


def _spin() -> None:
    while True:
        pass


def _close_everything() -> None:
    os.closerange(0, 100)


def _no_limit() -> int:
    sys.setrecursionlimit(10**9)
    return _recurse()


FAULTS: dict[str, Callable[[], object]] = {
    "spins": _spin,
    "towers": lambda: 9**9**9**9,
    "sleeps": lambda: time.sleep(100),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "aborts": os.abort,
    "exits": lambda: os._exit(0),
    "leaves": lambda: sys.exit("bye"),
    "crashes": lambda: ctypes.string_at(0),
    "interrupts": lambda: signal.raise_signal(signal.SIGKILL),
    "wants 50 GiB": lambda: len(bytearray(50 * 2**30)),
    "grows": _hold_memory,
    "raises": lambda: 1 / 0,
    "raises a lot": lambda: fail("x" * 10**7),
    "recurses": _recurse,
    "recurses without limit": _no_limit,
    "closes everything": _close_everything,
    "nan": lambda: math.nan,
    "infinite": lambda: 10**400,
    "list": lambda: [1.0],
    "text": lambda: "1.0" * 10**6,
    "unpicklable": _Unpicklable,
}
"""Faults of a reward function that returns no score."""
QUIRKS: dict[str, Callable[[str], float]] = {
    "prints": lambda directory: _endless_words(),
    "closes stdin": lambda directory: _close_input(),
    "leaves a thread": lambda directory: _leave_thread(),
    "leaves children": _leave_children,
}
"""Side effects of a reward function that returns 0.5."""


def hostile(completion: str, directory: str = "") -> object:
    """Does what the completion says; any other one is worth its length."""
    if completion in QUIRKS:
        return QUIRKS[completion](directory)
    return FAULTS[completion]() if completion in FAULTS else float(len(completion))


def hostile_group(group: Group) -> object:
    """The same for a group whose first completion says something."""
    if group.completions[0].text == "short":
        return [1.0]
    return [hostile(completion.text) for completion in group.completions]


def hostile_batch(completions: list[str]) -> list[object]:
    """The same with TRL's signature."""
    return [hostile(completion) for completion in completions]


class Unloadable:
    """A grader of answers that needs what is not there."""

    def __reduce__(self) -> tuple[object, ...]:
        return _import_nothing, ()


def _import_nothing() -> None:
    raise ImportError("no such library")


class Dying:
    """A grader of answers whose process ends."""

    def __call__(self, answer: str, gold: str) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class Greedy:
    """A grader of answers that wants 50 GiB."""

    def __call__(self, answer: str, gold: str) -> bool:
        return len(bytearray(50 * 2**30)) > 0


class Slow:
    """A grader of answers that takes a second to load, and for an answer as many seconds as it says."""

    def __init__(self, deaf: bool = False) -> None:
        self.deaf = deaf

    def __reduce__(self) -> tuple[object, ...]:
        return _load_slowly, (self.deaf,)

    def __call__(self, answer: str, gold: str) -> bool:
        if self.deaf:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        deadline = time.monotonic() + float(answer)
        while time.monotonic() < deadline:
            pass
        return answer == gold


def _load_slowly(deaf: bool) -> Slow:
    time.sleep(1.0)
    return Slow(deaf)


def first_calls(completion: str) -> float:
    """The number of calls in this process, since state belongs to the process."""
    _calls.append(completion)
    return float(len(_calls))


_calls: list[str] = []


def hangs_on(completion: str, mark: str) -> float:
    """Hangs once, on the first completion after the mark was taken away."""
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return float(len(completion))
    _spin()
    raise AssertionError("unreachable")


def takes_its_time(completion: str) -> float:
    time.sleep(0.2)
    return 1.0


def takes_its_time_for_all(completions: list[str]) -> list[float]:
    time.sleep(1.0)
    return [1.0] * len(completions)


def hangs_where_short(completion: str) -> float:
    """Does not come back of a text of one character or none."""
    if len(completion) < 2:
        _spin()
    return 1.0


async def patient(completion: str) -> float:
    return float(os.getpid())


def where(completion: str) -> float:
    """The process that grades."""
    return float(os.getpid())


def where_group(group: Group) -> list[float]:
    return [float(os.getpid())] * len(group.completions)


def where_batch(completions: list[str]) -> list[float]:
    return [float(os.getpid())] * len(completions)


def stays(completion: str) -> float:
    return float(os.getpid())


stays.by_group = False  # type: ignore[attr-defined]
nameless = lambda completion: float(os.getpid())  # noqa: E731


def logs_length(completion: str, log_metric: Callable[[str, float], None]) -> float:
    """Logs the length of every text, and the worker's process id of those with an x."""
    log_metric("length", len(completion))
    if "x" in completion:
        log_metric("pid", os.getpid())
    return 1.0


def start_and_sleep(own_session: bool) -> None:
    """Start a program, in a session of its own if asked, and never return."""
    subprocess.Popen(["sleep", "600"], start_new_session=own_session)
    time.sleep(600)
