"""What workers are given in tests: functions of an importable module, which loads in a moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from flatpeak.errors import UserError


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


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state != "" and not state.startswith("Z")


def all_end(pids: list[int], *, within: float) -> bool:
    deadline = time.monotonic() + within
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def digits(completion: str) -> float | None:
    """Raises where there is none, and has no score for zeros only."""
    found = [int(character) for character in completion if character.isdigit()]
    if not found:
        raise ValueError(f"no digit in {completion!r}")
    return float(sum(found)) or None


def distinct(completions: list[str]) -> list[float]:
    """How many texts of the call differ: needs all completions of a group, and tells calls apart."""
    return [float(len(set(completions)))] * len(completions)


def treacherous(completion: str, group_id: str, calls: str) -> float:
    """Says who grades, and ends its process or hangs where the row says so."""
    with Path(calls).open("a") as file:
        file.write(f"{os.getpid()} {group_id}\n")
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
