"""Whole GRPO steps of flatpeak and TRL, from the same weights, on the same prompts, with one update per rollout.

    python -m benchmarks.cpu.step --json FILE [--row "1M, skewed"] [--rounds 5] [--quick]

All contenders run in their own processes with one thread, or with the named number, through their public entry points
with logging on, and take turns step by step. flatpeak decodes and trains by native kernels if they support the model;
"flatpeak, torch" does not. TRL runs without gradient checkpointing, in float32, with transformers' generate; at 1M also
with transformers' continuous batching. The result is response tokens per CPU-second, because flatpeak and TRL sample
different answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.harness.models import save_model
from benchmarks.harness.runner import Row, Run, main, model_directory, say
from benchmarks.harness.workers import Worker, measure_in_turn
from benchmarks.harness.workloads import LENGTHS, Workload, continuous_batching, workload

ROWS = {
    f"{size}, {lengths}": (size, lengths)
    for size in ("1M", "7M", "45M")
    for lengths in LENGTHS
    if lengths != "vocabulary 32k"
}
FLATPEAK: dict[str, dict[str, object]] = {
    "flatpeak": {"contender": "flatpeak"},
    "flatpeak, torch": {"contender": "flatpeak", "settings": {"rollout": {"kernels": "torch"}}},
}
THREADED = {f"{name}, 2 threads": {**arguments, "threads": 2} for name, arguments in FLATPEAK.items()}
UNCOUNTED = 2
"""Warm-up turns: the set-up with the first rollout, which is not a step, then one step."""


def measure(run: Run, name: str) -> Row:
    """Measure all contenders on one workload."""
    size, lengths = ROWS[name]
    work = workload(size, lengths)
    trl = ["TRL generate"] + ["TRL generate_batch"] * (name == "1M, skewed")
    threaded = THREADED if name in ("1M, skewed", "7M, skewed") else {}
    return compare(run, work, FLATPEAK | threaded | {contender: {"contender": contender} for contender in trl})


def compare(run: Run, work: Workload, contenders: dict[str, dict[str, object]]) -> Row:
    """Train the contenders in turns on one workload."""
    with model_directory(run, "model") as model:
        save_model(work, model)
        starts = {
            name: start(run, work, model, name, {"continuous_batching": continuous_batching(work), **arguments})
            for name, arguments in contenders.items()
        }
        measurements, failures, _ = measure_in_turn(starts, uncounted=UNCOUNTED, repeats=run.repeats, say=say)
    return {"workload": asdict(work), "contenders": measurements, "failures": failures}


def start(run: Run, work: Workload, model: Path, name: str, arguments: dict[str, object]) -> Callable[[], Worker]:
    """Make a function that starts one contender, with more steps than turns, so that no measured step is the last."""
    scratch = run.scratch / f"{name} {work.size} {work.lengths}"
    scratch.mkdir()
    shared = {"workload": asdict(work), "model": str(model), "scratch": str(scratch), **arguments}
    steps = {"steps": UNCOUNTED + run.repeats + 2}
    return partial(Worker, "benchmarks.cpu.step_worker", shared | steps, log=run.log(name, work.size, work.lengths))


if __name__ == "__main__":
    main("step", __doc__, rows=list(ROWS), quick=["1M, skewed"], repeats=5, measure=measure)
