"""Runs of episodes that are killed: what tools and environments have answered is kept, also if it was drawn at random.

Each call draws the next number of a sequence that belongs to its history, so that a call that is made twice shows, and
an uninterrupted run has the same answers as one that makes each call once, in whatever order.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from flatpeak.episodes.environments import EnvironmentHost, Session, make_environment
from flatpeak.episodes.tools import ParsedCall
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.runs.call_log import CallLog
from support.episodes import Scripted, asked, draw, sampler_of
from support.resumes import differences, left_by
from support.runs import tiny_recipe
from support.workers import started_with, wait_for

DRAWS = r'''
import os
from pathlib import Path
from zlib import crc32

DRAWN = Path(__file__).with_name("drawn")
"""A line for each number that was drawn, with the name of its sequence."""


def number(name, index):
    """The numbers of a sequence, all of six digits, and none twice."""
    return 100_000 + (crc32(name.encode()) + index * 7919) % 900_000


def fail() -> None:
    """Fail with the next number."""
    raise ValueError(draw())


def leave() -> None:
    """End the process, once a number is drawn."""
    draw()
    os._exit(1)


def draw() -> int:
    """Draw the next number, whatever the input."""
    return draw_from("")


def draw_from(name):
    """Draw the next number of a sequence."""
    with DRAWN.open("a+") as file:
        file.write(f"{name}\n")
        file.seek(0)
        return number(name, file.read().split("\n").count(name) - (2 if name == "" else 1))


class Draws:
    """Shows a number in every turn, and the last digit of a sum that its state keeps."""

    def reset(self, seed):
        self.left, self.sum, self.history = 3, draw_from(str(seed)), str(seed)
        return str(self.sum)

    def step(self, action):
        self.history += ascii(action)
        drawn = draw_from(self.history)
        self.left -= 1
        self.sum += drawn
        return f"{drawn} {self.sum % 10}", None, self.left == 0

    def reward(self):
        return float(draw_from(self.history + " reward"))
'''
MARK = "FLATPEAK_TEST_KILLS"
"""The variable that tells the processes of the runs."""
TRAINER = """
import json, os, sys, traceback
import pytest, torch
torch.set_num_threads(1)
import transformers.models.qwen2.modeling_qwen2  # loaded once, and there in every run
from support.runs import quick_train
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        code = 1
        try:
            quick_train(json.loads(line), resume=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Trainer:
    """A process that has loaded everything, and trains each recipe in a copy of itself."""

    def __init__(self, directory: Path) -> None:
        self.mark, self.errors = str(directory), directory / "errors.txt"
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", TRAINER],
                env=os.environ | {MARK: self.mark, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def train(self, config: dict[str, Any], *, kill: Callable[[], None] | None = None) -> None:
        """Start a run, or go on with it, to its end; or until `kill` returns, when it is killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(config), file=self.process.stdin, flush=True)
        pid = int(self.process.stdout.readline())
        if kill is not None:
            kill()
            os.kill(pid, signal.SIGKILL)
        code = int(self.process.stdout.readline())
        assert code == (0 if kill is None else -signal.SIGKILL), self.errors.read_text()
        # A worker may still be in a call.
        wait_for(lambda: started_with(MARK, self.mark) == [self.process.pid])


class Run:
    """Four steps of episodes of three turns, saved every two, with evaluations between."""

    def __init__(self, directory: Path) -> None:
        self.drawn, self.path = directory / "drawn", directory / "tiny"
        (directory / "draws.py").write_text(DRAWS)
        self.config = tiny_recipe(
            directory,
            run={"checkpoint_every": 2, "grading_workers": 1},
            model={"new": {"tokenizer": {"type": "characters"}, "config": {"max_position_embeddings": 128}}},
            environment=f"{directory / 'draws.py'}:Draws",
            rollout={"max_new_tokens": 80, "prompts_per_step": 2, "group_size": 3},
            episodes={"max_tokens": 4},
            rewards={"drawn": {"type": "environment"}},
            training={"steps": 4},
            evaluation={"accuracy": None, "metric": "reward", "every": 1, "size": 2},
        )

    def count(self) -> int:
        """The numbers that were drawn."""
        return self.drawn.read_text().count("\n") if self.drawn.exists() else 0

    def kept(self) -> int:
        """The results in the log."""
        return sum(path.read_text().count("\n") for path in self.path.glob("calls/*"))

    def put_back(self) -> None:
        """Put back the last number if the run was killed before it had it: nothing has read it.

        There is one worker, so that only one number can be in this state.
        """
        *before, name = self.drawn.read_text().splitlines()
        drawn = 100_000 + (crc32(name.encode()) + before.count(name) * 7919) % 900_000
        files = [path for name in ("calls", "rollouts", "evaluations") for path in self.path.glob(f"{name}/*")]
        if not any(re.search(rf"(?<![\d.]){drawn}(?!\d)", path.read_text()) for path in files):
            self.drawn.write_text("".join(f"{line}\n" for line in before))

    def left(self) -> dict[str, Any]:
        """All that it leaves, but for times and where it is."""
        named = ("config.yaml", "flatpeak.json", "manifest.json")
        return {name: content for name, content in left_by(self.path).items() if not name.endswith(named)}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """The process that trains."""
    one = Trainer(tmp_path_factory.mktemp("trainer"))
    yield one
    one.process.kill()
    one.process.communicate()


@pytest.fixture(scope="module")
def whole(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was not killed."""
    run = Run(tmp_path_factory.mktemp("whole"))
    trainer.train(run.config)
    return run


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_a_run_that_is_killed_three_times_calls_nothing_twice_and_ends_as_if_it_had_not_been_killed(
    trainer: Trainer, tmp_path: Path, whole: Run, seed: int
) -> None:
    chance, run, kept = random.Random(seed), Run(tmp_path), 0
    for count in sorted(chance.sample(range(1, whole.count() - 20), 3)):

        def moment(count: int = count) -> None:
            wait_for(lambda: run.count() >= count, within=60.0)
            time.sleep(chance.random() * 0.02)

        trainer.train(run.config, kill=moment)
        kept += run.kept()
        run.put_back()
    trainer.train(run.config)
    assert kept > 0
    assert sorted(run.drawn.read_text().splitlines()) == sorted(whole.drawn.read_text().splitlines())
    assert differences(run.left(), whole.left(), stopped=False) == []
    assert run.kept() == 0


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    """One worker."""
    with WorkerPool(1, timeout=30.0) as one:
        yield one


def test_each_answer_of_a_turn_is_kept_by_itself_unless_it_cost_a_process(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    tools = make_environment([f"{tmp_path / 'draws.py'}:{name}" for name in ("draw", "fail", "leave")])

    def answers(*names: str) -> list[str | None]:
        """The answers of a turn in a start of the run."""
        host = EnvironmentHost(tools, pool, call_timeout=30.0)
        host.call_log = CallLog(tmp_path / "calls", rank=0, notice=pytest.fail)
        _, answered = host.answer(Session(key=7), [ParsedCall(name=name) for name in names]).result()
        return [call.answer for call in answered]

    first, second, _, fourth = (str(100_000 + 7919 * index) for index in range(4))
    crashed = "error: the call crashed"
    turn = ("draw", "fail", "unknown", "leave", "draw")
    kept = [
        first,
        f"error: ValueError: {second}",
        "error: there is no tool 'unknown'; the tools are: draw, fail, leave",
    ]
    for _ in range(3):
        assert answers(*turn) == [*kept, crashed, fourth]
    # `leave` has drawn in each start, the other tools once.
    assert (tmp_path / "drawn").stat().st_size == 6


def test_a_kept_answer_is_that_of_one_history_alone(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    host = EnvironmentHost(make_environment([f"{tmp_path / 'draws.py'}:draw"]), pool, call_timeout=30.0)

    def answers(second: str) -> list[list[str]]:
        """The answers of the episodes of a group, whose second turn begins so, in a start of the run."""

        def write(name: str, index: int) -> str:
            turn = name.partition(".")[2]
            return "7" if turn == "2" else f"{second if turn == '1' else ''}<call>draw()</call>"

        sampler = sampler_of(Scripted(write), host)
        sampler.keep_calls(CallLog(tmp_path / "calls", rank=0, notice=pytest.fail))
        (group,) = draw(sampler, [asked("a")], group_size=2)
        return [[turn.answer for turn in episode.turns if turn.answer] for episode in group.completions]

    numbers = [str(100_000 + 7919 * index) for index in range(6)]
    of_first = [[numbers[0], numbers[2]], [numbers[1], numbers[3]]]
    of_other = [[numbers[0], numbers[4]], [numbers[1], numbers[5]]]
    assert [answers(text) for text in ("", "x", "", "x")] == [of_first, of_other, of_first, of_other]
