"""The cost of a tracker per step of the demo: CPU time of its thread and of its library's processes.

    python -m benchmarks.cpu.trackers --json FILE [--rounds 7] [--quick]

A round takes 20 steps of the demo's recipe, then gives their metrics and two tables of completions to each tracker in
turns, as a run does: through its queue, to stores on this disk, waiting until everything is recorded. A tracker's share
is from the medians, its range from the rounds. The costs of a tracker that a run has once (imports, opening, closing)
are in a separate column.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.gradreg import build_trainer, imitate
from benchmarks.harness.runner import Row, Run, main, say
from flatpeak.config.load import load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.pipeline.build import build_components
from flatpeak.pipeline.progress import SilentProgress
from flatpeak.pipeline.request import CallerObjects
from flatpeak.runs.manifest import describe_start
from flatpeak.runs.rollout_log import rollout_rows
from flatpeak.tracking.backend import RunFacts
from flatpeak.tracking.config import TrackingConfig
from flatpeak.tracking.trackers import Trackers, open_trackers

STEPS = 20
"""Steps of a round: fewer than the demo takes in the ten seconds for which batches are collected."""
TABLE_EVERY = 10
"""The default of `tracking.completions_every`."""
SFT_STEPS = 100
"""Supervised steps before, so that the completions of a group differ."""
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio", "mlflow": "mlflow-skinny"}


class RowKeeper:
    """A recorder that keeps the rows of the last step's completions, created only on request."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def rollouts(self, step: int, rollouts: Any, advantages_PG: torch.Tensor) -> None:
        """Keep the completions of one step in TABLE_EVERY."""
        if step % TABLE_EVERY == 0:
            self.rows = list(rollout_rows(rollouts.groups, rollouts.scores, advantages_PG.tolist()))


def measure(run: Run, name: str) -> Row:
    """Time the steps and every tracker, round by round."""
    config = parse_config(load_recipe("flatpeak:demo", ["optimizer.learning_rate=0"]))
    torch.set_num_threads(1)
    components = build_components(config, CallerObjects(), checkpoint=None, progress=SilentProgress())
    imitate(components, config, steps=10 if run.quick else SFT_STEPS)
    keeper = RowKeeper()
    trainer = build_trainer(components, config, keeper)
    contenders: dict[str, list[dict[str, float]]] = {"step": [], **{tracker: [] for tracker in PACKAGES}}
    once: dict[str, float] = {}
    with local_stores(run.scratch), opened(config, run.scratch, once) as trackers:
        for round_ in range(run.repeats + 1):  # the first is not counted
            say(f"round {round_}")
            started, steps = cpu_seconds(), []
            for step in range(1, STEPS + 1):
                steps.append(trainer.train_step(round_ * STEPS + step))
            measured = {"step": {"cpu": (cpu_seconds() - started) / STEPS}}
            for tracker, destination in trackers.items():
                started = cpu_seconds()
                give(destination, steps, keeper.rows, first=round_ * STEPS + 1)
                measured[tracker] = {"cpu": (cpu_seconds() - started) / STEPS}
            for contender, figures in measured.items():
                if round_:
                    contenders[contender].append(figures)
    versions = {tracker: version(package) for tracker, package in PACKAGES.items()}
    return {"contenders": contenders, "once": once, "versions": versions, "metrics": len(steps[0])}


@contextmanager
def opened(config: RunConfig, scratch: Path, once: dict[str, float]) -> Iterator[dict[str, Trackers]]:
    """Each tracker separately; `once` gets the CPU seconds of opening and closing it."""
    sections: dict[str, dict[str, Any]] = {
        "wandb": {"mode": "offline"},
        "tensorboard": {},
        "trackio": {},
        "mlflow": {"uri": f"sqlite:///{scratch}/mlflow.db"},
    }
    trackers = {}
    for name, section in sections.items():
        started = cpu_seconds()
        facts = RunFacts(
            name=f"demo-{name}",
            directory=scratch / name,
            recipe=config.model_dump(mode="json"),
            start=describe_start(None),
            group=None,
            tags={},
        )
        trackers[name] = open_trackers(
            TrackingConfig.model_validate({name: section}), facts, earlier=lambda: [], notice=say
        )
        wait(trackers[name])
        once[name] = cpu_seconds() - started
    yield trackers
    for name, tracker in trackers.items():
        started = cpu_seconds()
        tracker.close("done")
        once[name] += cpu_seconds() - started


def give(tracker: Trackers, steps: list[dict[str, float]], rows: list[dict[str, Any]], *, first: int) -> None:
    """Give steps to a tracker as the recorder does, and wait until they are recorded."""
    for step, metrics in enumerate(steps, start=first):
        if tracker.wants_completions(step):
            tracker.log_completions(rows, step=step)
        tracker.log(metrics, step=step, stage="train")
    wait(tracker)


def wait(tracker: Trackers) -> None:
    """Wait, without computing, until everything is recorded and the library's processes have caught up."""
    while tracker.pending:
        time.sleep(0.1)
    time.sleep(0.5)


def cpu_seconds() -> float:
    """CPU seconds of this process, all its threads and its living descendants."""
    ticks = os.sysconf("SC_CLK_TCK")
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # has ended
            continue
        stats[int(path.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks)
    return time.process_time() + sum(
        seconds for pid, (_, seconds) in stats.items() if pid != os.getpid() and descends(pid, stats)
    )


def descends(pid: int, stats: Mapping[int, tuple[int, float]]) -> bool:
    """Whether a process is a descendant of this one."""
    while pid in stats:
        pid = stats[pid][0]
        if pid == os.getpid():
            return True
    return False


@contextmanager
def local_stores(scratch: Path) -> Iterator[None]:
    """Stores in a scratch directory, set by the libraries' variables."""
    names = ("TRACKIO_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR")
    before, directory = {name: os.environ.get(name) for name in names}, Path.cwd()
    os.environ.update({name: str(scratch / name.lower()) for name in names})
    os.chdir(scratch)
    try:
        yield
    finally:
        os.chdir(directory)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


if __name__ == "__main__":
    main("trackers", __doc__ or "", rows=["demo"], quick=["demo"], repeats=7, measure=measure)
