"""Several processes: whole GRPO steps of two processes with one thread each, of one with two, and the communication.

    python -m benchmarks.cpu.distributed --json FILE [--row "1M, ddp"] [--rounds 7] [--quick]

Each step has 128 completions of up to 32 tokens and one update, at learning rate 0, so that all contenders sample the
same completions. They take turns step by step; the ratio is of tokens per second of wall time. CPU-seconds are of all
processes, and peak memory is of the first. Payloads are per step: the whole tensors that collectives reduce, gather or
scatter, as torch's dispatcher sees them (gloo sends (n - 1) / n of a payload per process, and twice that for a
reduction), and as computed from the weights and the passes; and pickled values such as tokens and scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness.runner import Row, Run, main, say
from benchmarks.harness.workers import Worker, measure_in_turn

TOKENS = 32
ROWS: dict[str, dict[str, Any]] = {
    f"{size}, {strategy}{', regularized' if strength else ''}": {
        "size": size,
        "strategy": strategy,
        "strength": strength,
    }
    for size in ("1M", "7M")
    for strategy in ("ddp", "fsdp2")
    for strength in (0.0, 0.1)
}
CONTENDERS = {
    "2 processes": {"processes": 2, "threads": 1},
    "1 process, 2 threads": {"processes": 1, "threads": 2},
    "1 process, 1 thread": {"processes": 1, "threads": 1},
}
UNCOUNTED = 2
"""A warm-up step, and the step whose collectives are counted."""


def measure(run: Run, name: str) -> Row:
    """Run the contenders' steps in turns."""
    starts = {contender: start(run, name, contender) for contender in CONTENDERS}
    measurements, failures, _ = measure_in_turn(starts, uncounted=UNCOUNTED, repeats=run.repeats, say=say)
    return {"contenders": measurements, "failures": failures}


def start(run: Run, name: str, contender: str) -> Callable[[], Worker]:
    """Make a function that starts one contender."""
    processes, threads = CONTENDERS[contender]["processes"], CONTENDERS[contender]["threads"]
    arguments = {**ROWS[name], "tokens": TOKENS, "processes": processes, "threads": threads}
    environment = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return partial(
        Worker, "benchmarks.cpu.distributed_worker", arguments, log=run.log(name, contender), environment=environment
    )


if __name__ == "__main__":
    main("distributed", __doc__, rows=list(ROWS), quick=["1M, ddp", "1M, fsdp2"], repeats=7, measure=measure)
