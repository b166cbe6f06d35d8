"""Time to an accuracy: the demo's task, from the same SFT start, with flatpeak and with TRL.

    python -m benchmarks.cpu.time_to_accuracy --json FILE [--row "seed 0"] [--quick]

Both train the same model on the same problems with the same batch, updates per rollout, optimizer, schedule and reward,
with one thread each, in turns of ten steps. After each turn the clock stops while the same evaluator answers the 500
held-out problems greedily. A contender finishes at an accuracy of 0.9, or gives up after 200 steps. Rows like "seed 0,
100 steps" compare accuracy by steps instead of by time: each contender takes 100 steps, with minibatches of groups, of
completions, and of completions with three times the warm-up. `python -m benchmarks.cpu.steps_to_accuracy FILE...`
prints their table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import flatpeak
from benchmarks.harness.runner import Row, Run, main, say
from benchmarks.harness.workers import Measurement, Worker
from flatpeak.config.load import load_recipe

GOAL = 0.9
LIMIT = 200
"""Steps after which a contender gives up; the schedule is for the recipe's 260 steps."""
STEPS = 100
"""Steps of the rows that compare accuracy by steps."""
SEEDS = 10


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A trainer, and its changes to the recipe."""

    trainer: str
    settings: tuple[str, ...] = ()


TIMED = {"flatpeak": Contender(trainer="flatpeak"), "TRL generate": Contender(trainer="TRL")}
STEPPED = {
    "groups": Contender(trainer="flatpeak", settings=("training.minibatch_of=groups",)),
    "completions": Contender(trainer="flatpeak", settings=("training.minibatch_of=completions",)),
    "completions, longer warm-up": Contender(
        trainer="flatpeak", settings=("training.minibatch_of=completions", "optimizer.warmup_steps=15")
    ),
    "TRL": Contender(trainer="TRL"),
}
ROWS = {f"seed {seed}": seed for seed in range(SEEDS)}
BY_STEPS = {f"seed {seed}, {STEPS} steps": seed for seed in range(SEEDS)}
DEFAULT = list(ROWS)[:3]


def measure(run: Run, name: str) -> Row:
    """Measure one seed of reinforcement learning; all seeds have the same start."""
    if name in BY_STEPS:
        steps = 10 if run.quick else STEPS
        return {"steps": steps, "contenders": race(run, name, STEPPED, seed=BY_STEPS[name], goal=None, limit=steps)}
    timed = race(run, name, TIMED, seed=ROWS[name], goal=GOAL, limit=LIMIT)
    return {"goal": GOAL, "limit": LIMIT, "contenders": timed}


def race(
    run: Run, name: str, contenders: Mapping[str, Contender], *, seed: int, goal: float | None, limit: int
) -> dict[str, list[Measurement]]:
    """Measurements of each contender after every ten steps, until the goal, if there is one, or the limit."""
    start = make_start(run)
    measurements: dict[str, list[Measurement]] = {contender: [] for contender in contenders}
    with ExitStack() as stack:
        workers = {}
        for contender, how in contenders.items():
            scratch = run.scratch / f"{contender} {name}"
            scratch.mkdir()
            arguments = {
                "trainer": how.trainer,
                "settings": how.settings,
                "seed": seed,
                "start": str(start),
                "scratch": str(scratch),
            }
            worker = Worker("benchmarks.cpu.accuracy_worker", arguments, log=run.log(contender, name))
            workers[contender] = stack.enter_context(worker).ready()
        while workers:
            for contender, worker in list(workers.items()):
                reported = worker.turn({})
                measurements[contender].append(reported)
                say(f"  {contender}: " + ", ".join(f"{key} {value:.4g}" for key, value in reported.items()))
                if reported["step"] >= limit or (goal is not None and reported["accuracy"] >= goal):
                    del workers[contender]
    return measurements


def make_start(run: Run) -> Path:
    """Train the demo's SFT model once, and return its checkpoint."""
    start = run.scratch / "start"
    if not start.exists():
        overrides = [f"run.directory={run.scratch}", "run.name=sft", "run.threads=1"]
        saved = flatpeak.sft(load_recipe("flatpeak:demo", overrides)).best
        start.symlink_to(saved.resolve())
    return start


def left_out() -> Sequence[str]:
    """The rows that are measured only on request."""
    return [row for row in (*ROWS, *BY_STEPS) if row not in DEFAULT]


if __name__ == "__main__":
    main(
        "time_to_accuracy",
        __doc__,
        rows=[*ROWS, *BY_STEPS],
        quick=DEFAULT[:1],
        repeats=1,
        measure=measure,
        left_out=left_out(),
    )
