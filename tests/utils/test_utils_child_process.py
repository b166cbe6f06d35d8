"""Child processes: what they are given, and what is left of them after either side ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from flatpeak.utils.child_process import ChildProcess, Parent, ending
from support.workers import all_end, start_script


def describe(parent: Parent, *arguments: object) -> None:
    parent.send([*arguments, os.environ.get("FLATPEAK_TEST"), os.getsid(0) == os.getpid(), parent.receive()])


def leave(parent: Parent, code: int) -> None:
    """Print, start a process that holds on, and end."""
    print("last words", flush=True)  # noqa: T201
    parent.send(subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
    os._exit(code)


def hang(parent: Parent, path: str) -> None:
    """Sleep beside a process of its own, and delete the file when the parent is gone."""
    parent.end_with(Path(path).unlink)
    parent.send([os.getpid(), subprocess.Popen(["sleep", "300"]).pid])
    time.sleep(300)


def hold(parent: Parent) -> None:
    """Leave the pipe to a fork that goes on."""
    if os.fork():
        os._exit(3)
    time.sleep(20)


def test_a_child_calls_the_function_and_answers() -> None:
    child = ChildProcess(describe, "a\udc80", {"b": 1}, stdout=subprocess.DEVNULL, environment={"FLATPEAK_TEST": "x"})
    child.send(None)
    assert child.receive() == ["a\udc80", {"b": 1}, "x", True, None]
    assert child.end(60) == 0
    child.close()


def test_what_a_child_started_ends_with_it_and_its_output_is_kept(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as output:
        child = ChildProcess(leave, 7, stdout=output)
    started = child.receive()
    with pytest.raises(EOFError):
        child.receive()
    assert child.end(60) == 7
    assert all_end([started], within=5)
    assert (tmp_path / "output").read_text() == "last words\n"
    child.close()


def test_an_end_is_seen_although_a_fork_holds_the_pipe() -> None:
    child = ChildProcess(hold, stdout=subprocess.DEVNULL)
    with pytest.raises(EOFError):
        child.receive()
    assert child.end(60) == 3
    child.close()


def test_a_child_that_does_not_end_is_killed(tmp_path: Path) -> None:
    child = ChildProcess(hang, str(tmp_path / "file"), stdout=subprocess.DEVNULL)
    pids = child.receive()
    assert child.end(0.1) == -signal.SIGKILL
    assert all_end(pids, within=5)
    child.close()


SCRIPT = """
import subprocess, time
from flatpeak.utils.child_process import ChildProcess
from test_utils_child_process import hang

child = ChildProcess(hang, {path!r}, stdout=subprocess.DEVNULL)
print(*child.receive(), flush=True)
time.sleep(300)
"""


def test_a_child_clears_up_and_ends_with_what_it_started_where_its_parent_was_killed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process, pids = start_script(SCRIPT.format(path=str(tmp_path / "file")), workers=2)
    process.kill()
    process.communicate(timeout=60)
    assert all_end(pids, within=30)
    assert not (tmp_path / "file").exists()


def test_ends_in_words() -> None:
    assert [ending(code) for code in (0, 3, -signal.SIGABRT, -40)] == [
        "exit code 0",
        "exit code 3",
        "killed by SIGABRT",
        "killed by signal 40",
    ]
