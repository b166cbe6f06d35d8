"""What reward functions print reaches the terminal in whole lines, and no result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatpeak.rewards.workers.pool import WorkerError, WorkerPool
from flatpeak.rewards.workers.worker import OUTPUT_PREFIX
from support.runs import tiny_recipe

pytestmark = pytest.mark.slow


def chatter(name: str, lines: int) -> int:
    """In pieces, as print writes them to an unbuffered stream, and from outside Python."""
    for number in range(lines):
        print(name * 20, number, flush=True)  # noqa: T201
    os.write(2, f"{name} ends".encode())
    return lines


def until(capfd: pytest.CaptureFixture[str], done: Callable[[str], bool]) -> str:
    text, deadline = "", time.monotonic() + 20
    while not done(text) and time.monotonic() < deadline:
        time.sleep(0.01)
        text += capfd.readouterr().err
    return text


def test_lines_that_workers_print_are_whole_and_marked(capfd: pytest.CaptureFixture[str]) -> None:
    with WorkerPool(2, timeout=20.0) as pool:
        futures = [pool.submit(chatter, name, 200) for name in "ab"]
        assert [future.result() for future in futures] == [200, 200]
    text = until(capfd, lambda text: text.count("ends") == 2)
    expected = [f"{OUTPUT_PREFIX}{name * 20} {number}" for name in "ab" for number in range(200)]
    assert sorted(text.splitlines()) == sorted([*expected, f"{OUTPUT_PREFIX}a ends", f"{OUTPUT_PREFIX}b ends"])


def endless(name: str) -> None:
    print(name, end="")  # noqa: T201
    time.sleep(60)


def test_what_a_function_printed_before_it_hung_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with WorkerPool(1, timeout=0.5) as pool, pytest.raises(Exception, match="no answer"):
        pool.submit(endless, "before").result()
    assert until(capfd, bool) == f"{OUTPUT_PREFIX}before\n"


def leak() -> None:
    print("printing", "sk-proj-abcdefghijkl")  # noqa: T201
    print("X-Api-Key: tok-987-abc", file=sys.stderr)  # noqa: T201


def test_the_secrets_that_a_function_prints_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with WorkerPool(1, timeout=20.0) as pool:
        pool.submit(leak).result()
    text = until(capfd, lambda text: text.count("\n") == 2)
    assert sorted(text.splitlines()) == [
        f"{OUTPUT_PREFIX}X-Api-Key: [redacted]",
        f"{OUTPUT_PREFIX}printing [redacted]",
    ]


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_function_that_raises_an_interrupt_costs_its_answer_and_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with WorkerPool(1, timeout=20.0) as pool:
        with pytest.raises(WorkerError, match=r"^KeyboardInterrupt") as caught:
            pool.submit(interrupt).result()
        assert caught.value.reason == "raised"
        pool.submit(chatter, "a", 1).result()
    assert until(capfd, lambda text: "ends" in text) == f"{OUTPUT_PREFIX}{'a' * 20} 0\n{OUTPUT_PREFIX}a ends\n"


def test_processes_that_print_leave_no_descriptor_behind() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with WorkerPool(1, timeout=20.0) as pool:
        pool.submit(chatter, "a", 1).result()
    deadline = time.monotonic() + 20
    before = open_files()
    for _ in range(3):
        with WorkerPool(1, timeout=20.0) as pool:
            pool.submit(chatter, "a", 1).result()
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_files() <= before


PRINTS = """
def in_a_worker(completion):
    print("from a worker")
    return 0.0

def here(completions, **columns):
    print("from this process")
    return [float(len(one)) for one in completions]
"""


def test_json_stays_json_whatever_reward_functions_print(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PRINTS)
    rewards = {
        "correctness": {"type": "function", "function": f"{tmp_path}/mine.py:here"},
        "other": {"type": "function", "function": f"{tmp_path}/mine.py:in_a_worker"},
    }
    recipe: dict[str, Any] = tiny_recipe(tmp_path / "runs", rewards=rewards, training={"steps": 1})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    code = "from flatpeak.cli.main import main; main()"
    command = [sys.executable, "-c", code, "train", str(tmp_path / "r.yaml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert json.loads(done.stdout)["status"] == "done", done.stderr
    lines = done.stderr.splitlines()
    assert "from this process" in lines
    assert f"{OUTPUT_PREFIX}from a worker" in lines
