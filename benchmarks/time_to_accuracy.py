"""Time until a policy is right: the demo's task, from one SFT start, with flatpeak and with TRL.

    python -m benchmarks.time_to_accuracy --json FILE [--row "seed 0"] [--quick]

Both train the same model on the same problems with the same batch, updates per rollout, optimizer, schedule and reward,
one thread each, and take turns of ten steps. After each ten the clock stands still while one evaluator, the same for
both, answers the 500 held-out problems greedily. A contender is done at an accuracy of 0.9, or gives up after 200
steps.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import flatpeak
from benchmarks.part import Row, Run, main, say
from benchmarks.rounds import Round, Worker
from flatpeak.recipe import load_recipe

GOAL = 0.9
LIMIT = 200
"""Steps after which a contender gives up; the schedule is that of the recipe's 260."""
CONTENDERS = ("flatpeak", "TRL generate")
ROWS = {f"seed {seed}": seed for seed in range(3)}


def measure(run: Run, name: str) -> Row:
    """One seed of reinforcement learning; the start is the same for all."""
    start = make_start(run)
    figures: dict[str, list[Round]] = {contender: [] for contender in CONTENDERS}
    with ExitStack() as stack:
        workers = {}
        for contender in CONTENDERS:
            scratch = run.scratch / f"{contender} {name}"
            scratch.mkdir()
            arguments = {"contender": contender, "seed": ROWS[name], "start": str(start), "scratch": str(scratch)}
            worker = Worker("benchmarks.accuracy_worker", arguments, log=run.log(contender, name))
            workers[contender] = stack.enter_context(worker).ready()
        while workers:
            for contender, worker in list(workers.items()):
                told = worker.turn({})
                figures[contender].append(told)
                say(f"  {contender}: " + ", ".join(f"{key} {value:.4g}" for key, value in told.items()))
                if told["accuracy"] >= GOAL or told["step"] >= LIMIT:
                    del workers[contender]
    return {"goal": GOAL, "limit": LIMIT, "contenders": figures}


def make_start(run: Run) -> Path:
    """The model that the demo's SFT makes; made once."""
    kept = run.scratch / "start"
    if not kept.exists():
        overrides = [f"run.directory={run.scratch}", "run.name=sft", "run.threads=1"]
        saved = flatpeak.sft(load_recipe("flatpeak:demo", overrides)).best
        kept.symlink_to(saved.resolve())
    return kept


if __name__ == "__main__":
    main("time_to_accuracy", __doc__, rows=list(ROWS), quick=list(ROWS)[:1], rounds=1, measure=measure)
