"""Runs of many kinds that signals interrupt at random points of their progress: what they leave after a resume.

By hand: `PYTHONPATH=tests python -m support.interruptions --signal KILL --count 60 --seed 1`, and the same with TERM.

Each kind is trained once as a whole. Each interrupted run is resumed to its end and compared with it, file by file.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from flatpeak.config.load import merge
from support.distributed_runs import recipe as base_recipe
from support.judge_server import JudgeServer, honest
from support.models import RUN_SIZES, save_run_model
from support.resumes import differences, left_by, newest_is_the_last_step
from support.vllm_server import VLLMServer, size_of_weights
from support.workers import alive, children, started_with, variable

SHARED = Path("/dev/shm")
LONGEST = 240.0
"""Seconds after which a job is taken for one that does not end."""
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
MARK = "FLATPEAK_TEST_JOB"
"""The variable that tells the processes of a job, orphans too."""
SLOW = "import time\n\ndef slow(completion):\n    time.sleep(0.1)\n    return float(len(completion) % 3)\n"
"""A reward of one completion, which workers compute."""
Sections = dict[str, Any]
BASE: Sections = {
    "run": {"checkpoint_every": 2, "keep_checkpoints": 20},
    "model": {"new": {"config": {**RUN_SIZES, "hidden_size": 64, "intermediate_size": 128}}},
    "rollout": {"group_size": 4, "max_new_tokens": 12},
    "training": {"steps": 5},
}
"""Of every kind: three steps of SFT, five of RL, evaluations and saves every two."""
RESETS: Sections = {"kl": {"coefficient": 0.05}, "reference": {"reset_every": 3, "reset_optimizer": True}}


@contextmanager
def kinds_of_runs(directory: Path) -> Iterator[dict[str, Sections]]:
    """The sections of each kind's recipe, while the files and servers that they name are there."""
    save_run_model(directory / "base")
    (directory / "slow.py").write_text(SLOW)
    slow_judge = JudgeServer(lambda earlier, body: replace(honest(body), wait=0.1))
    with patch("support.vllm_server.read_weights", size_of_weights), slow_judge as judge, VLLMServer() as vllm:
        yield sections_of(directory, judge=judge.url, vllm=vllm.url)


def sections_of(directory: Path, *, judge: str, vllm: str) -> dict[str, Sections]:
    """The sections by kind."""
    backend = {"type": "endpoint", "base_url": judge, "model": "judge-1"}
    slow = {"type": "function", "function": f"{directory / 'slow.py'}:slow"}
    base = {"new": None, "path": str(directory / "base"), "lora": {"rank": 4, "alpha": 8}}
    real = {"new": None, "path": os.environ.get("FLATPEAK_REAL_MODEL")}
    return {
        "native kernels, KL and resets": {"rollout": {"kernels": "native"}, "training": {"minibatches": 2}, **RESETS},
        "LoRA": {"model": base},
        "8-bit Adam, bfloat16": {"model": {"dtype": "bfloat16"}, "optimizer": {"name": "adamw_8bit"}},
        "states in host memory": {"optimizer": {"offload": True}},
        "drawn ahead": {"rollout": {"staleness": 1}},
        "two processes, ddp": {"distributed": {"processes": 2, "strategy": "ddp"}},
        "two processes, fsdp2": {"distributed": {"processes": 2, "strategy": "fsdp2"}},
        "vLLM server": {"rollout": {"engine": {"type": "vllm", "urls": [vllm], "timeout": 10.0}}},
        "judge": {"rewards": {"judge": {"type": "judge", "backend": backend, "canaries": {"enabled": False}}}},
        "slow rewards": {"rewards": {"slow": slow}, "run": {"grading_workers": 2}},
        "saves at every step": {"run": {"checkpoint_every": 1}, "evaluation": {"every": 1}},
        "real model": {
            "model": real,
            "rollout": {"prompts_per_step": 2},
            "training": {"steps": 3},
            "sft": {"steps": 1},
        },
    }


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a signal comes, and to whom."""

    number: int
    row: int
    """Rows of metrics.jsonl that the run has by then."""
    share: float
    """The wait after that row, as a share of the time to the next one in the whole run."""
    save: bool
    """Whether to wait for the next save instead."""
    target: str
    """launcher (the only process of most runs), rank 0, rank 1, or all."""

    def __str__(self) -> str:
        when = "in a save after" if self.save else f"{self.share:.2f} after"
        return f"{signal.Signals(self.number).name} to {self.target}, {when} row {self.row}"


class Job:
    """`flatpeak train` in a process of its own, and what is seen of it from outside."""

    def __init__(self, recipe: Path, run: Path, *options: str) -> None:
        self.run = run
        self.mark = str(time.monotonic_ns())
        self.rows = list[float]()
        """The times at which rows of metrics.jsonl were first seen."""
        self.saves = list[float]()
        """The seconds that saves took."""
        self.saving: float | None = None
        """The time at which the present save began."""
        self.temporary, self.log = run.parent / "tmp", recipe.with_suffix(".log")
        self.temporary.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "flatpeak", "train", str(recipe), *options]
        with self.log.open("a") as output:
            self.started = time.monotonic()
            environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary)}
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def look(self) -> bool:
        """Note rows and saves; whether the job runs."""
        now, count = time.monotonic(), rows_of(self.run)
        self.rows = self.rows[:count] + [now] * (count - len(self.rows))
        checkpoints = self.run / "checkpoints"
        writing = [*checkpoints.glob(".tmp-step_*"), *checkpoints.glob("sft/.tmp-step_*")]
        if self.saving is not None and not writing:
            self.saves.append(now - self.saving)
        self.saving = (self.saving or now) if writing else None
        time.sleep(0.002)
        return self.process.poll() is None

    def interrupt(self, moment: Moment, *, gap: float) -> bool:
        """Send the signal when the moment comes; False if the job has ended before."""
        due = None
        while due is None or (self.saving is None if moment.save else time.monotonic() < due):
            if not self.look():
                return False
            if due is None and len(self.rows) >= moment.row:
                due = time.monotonic() + moment.share * gap
        for pid in self.targets(moment.target):
            if alive(pid):
                os.kill(pid, moment.number)
        return True

    def targets(self, target: str) -> list[int]:
        """The processes that get a signal; the launcher alone until both ranks are there."""
        launcher = self.process.pid
        ranks = {f"rank {variable(pid, 'RANK')}": pid for pid in children(launcher)}
        return [launcher, *ranks.values()] if target == "all" else [ranks.get(target, launcher)]

    def end(self) -> int:
        """Wait for the end of every process of the job; the exit code."""
        deadline = time.monotonic() + LONGEST
        while self.look() or started_with(MARK, self.mark):
            if time.monotonic() > deadline:
                for pid in started_with(MARK, self.mark):
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"it does not end: {self.log.read_text()[-2000:]}")
        return self.process.returncode


def rows_of(run: Path) -> int:
    """The rows of a run's metrics so far."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@dataclass
class Verdict:
    """What became of an interrupted run."""

    moments: list[Moment] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """The seconds from each signal to the end of the last process."""
    saves: list[float] = field(default_factory=list)
    """The seconds that each save took, in runs that were stopped."""
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        ends = [f"{moment} ended in {end:.2f} s" for moment, end in zip(self.moments, self.ends, strict=True)]
        return f"{', then '.join(ends) or 'ended before'}: {self.wrong or 'equal'}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of run: its recipe, and what the whole run leaves."""

    recipe: Path
    run: Path
    shared: bool
    """Whether several processes share the run."""
    expected: dict[str, Any]
    gaps: list[float]
    """The seconds before each row of metrics.jsonl."""

    @classmethod
    def train(cls, sections: Sections, directory: Path) -> Case:
        """Train the whole run."""
        directory.mkdir()
        path = directory / "recipe.yaml"
        path.write_text(yaml.safe_dump(base_recipe(directory, "run", **merge(BASE, sections)), sort_keys=False))
        job = Job(path, directory / "run")
        assert job.end() == 0, job.log.read_text()
        gaps = [later - earlier for earlier, later in pairwise([job.started, *job.rows])]
        expected = left_by(job.run.rename(directory / "whole"))
        return cls(recipe=path, run=job.run, shared="distributed" in sections, expected=expected, gaps=gaps)

    def moment(self, chance: random.Random, *, kill: bool, first: int) -> Moment:
        """A random moment after this row of metrics or a later one."""
        return Moment(
            number=signal.SIGKILL if kill else chance.choice(STOPS),
            row=chance.randrange(first, len(self.gaps)),
            share=chance.random(),
            save=chance.random() < 0.3,
            target=chance.choice(("launcher", "rank 0", "rank 1", "all")) if self.shared else "launcher",
        )

    def interrupt(self, chance: random.Random, *, kill: bool) -> Verdict:
        """Interrupt a run once or twice, resume it to its end, and compare."""
        shared, verdict, first = set(SHARED.iterdir()), Verdict(), 0 if kill else 1
        for index in range(1 + (chance.random() < 0.5)):
            moment = self.moment(chance, kill=kill, first=first)
            job = Job(self.recipe, self.run, *([] if index == 0 else ["--resume"]))
            if not job.interrupt(moment, gap=self.gaps[moment.row]):
                verdict.wrong += [] if job.end() == 0 else [f"ended with {job.process.returncode}"]
                break
            since = time.monotonic()
            verdict.wrong += self.wrong_end(job.end(), moment, job.log.read_text())
            verdict.moments.append(moment)
            verdict.ends.append(time.monotonic() - since)
            verdict.saves += [] if kill else job.saves  # a killed run leaves what looks like a save
            first = len(job.rows) + 1
            if first >= len(self.gaps):
                break
        job = Job(self.recipe, self.run, "--resume")
        if job.end() == 0:
            verdict.wrong += differences(left_by(self.run), self.expected, stopped=not kill or self.shared)
        else:
            verdict.wrong.append(job.log.read_text()[-3000:])
        if set(SHARED.iterdir()) - shared:
            time.sleep(10)  # until other runs of this machine have removed theirs
        verdict.wrong += [str(path) for path in (*(set(SHARED.iterdir()) - shared), *job.temporary.iterdir())]
        return verdict

    def wrong_end(self, code: int, moment: Moment, output: str) -> list[str]:
        """What the end of a job lacks: the rank that was killed by name, or what a stop signal promises."""
        if moment.number == signal.SIGKILL:
            named = moment.target in output or not moment.target.startswith("rank")
            return [] if code == -signal.SIGKILL or (code == 1 and named) else [f"exit code {code}: {output[-500:]}"]
        done = code == 0 and rows_of(self.run) == len(self.gaps)  # the signal came after the last step
        wrong = [] if done or code == 128 + moment.number else [f"exit code {code} after signal {moment.number}"]
        return wrong if newest_is_the_last_step(self.run) else [*wrong, "the newest checkpoint is not the last step"]


def interrupt_runs(names: Sequence[str], *, count: int, seed: int, kill: bool) -> dict[str, list[Verdict]]:
    """Send so many signals to runs of these kinds in turn (all but the real model without any), and print each run."""
    chance, directory = random.Random(seed), Path(tempfile.mkdtemp(prefix="interruptions-"))
    cases, verdicts = dict[str, Case](), defaultdict[str, list[Verdict]](list)
    with kinds_of_runs(directory) as kinds:
        names = names or [name for name in kinds if name != "real model"]
        for kind in cycle(names):
            if sum(len(verdict.moments) for of_kind in verdicts.values() for verdict in of_kind) >= count:
                break
            if kind not in cases:
                cases[kind] = Case.train(kinds[kind], directory / str(len(cases)))
            verdict = cases[kind].interrupt(chance, kill=kill)
            verdicts[kind].append(verdict)
            print(f"{kind}: {verdict}", flush=True)
            if verdict.wrong:
                cases[kind].run.rename(cases[kind].run.with_name(f"failed_{len(verdicts[kind])}"))
            else:
                shutil.rmtree(cases[kind].run)
    if any(verdict.wrong for of_kind in verdicts.values() for verdict in of_kind):
        print(f"what went wrong is in {directory}")
    else:
        shutil.rmtree(directory)
    return verdicts


def main() -> None:
    """Interrupt runs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL", help="TERM: INT, HUP and USR1 too")
    parser.add_argument("--count", type=int, default=60, help="how many signals are sent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", action="append", default=[], help="only this kind; may be repeated")
    given = parser.parse_args()
    for number in STOPS:  # what nohup or a script's background ignores, children would ignore too
        signal.signal(number, signal.SIG_DFL)
    verdicts = interrupt_runs(given.kind, count=given.count, seed=given.seed, kill=given.signal == "KILL")
    print("| Kind | Runs | Signals | Equal | Slowest end (s) | Slowest save (s) |\n|---|---|---|---|---|---|")
    for kind, runs in verdicts.items():
        ends, saves = ([s for run in runs for s in seconds(run)] for seconds in (lambda v: v.ends, lambda v: v.saves))
        slowest = f"{max(ends, default=0):.2f} | {max(saves, default=0):.2f}"
        print(f"| {kind} | {len(runs)} | {len(ends)} | {sum(not run.wrong for run in runs)} | {slowest} |")
    sys.exit(any(run.wrong for runs in verdicts.values() for run in runs))


if __name__ == "__main__":
    main()
