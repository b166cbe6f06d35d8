"""Several processes: whole GRPO steps of two with one thread each beside one with two threads, and what they send.

    python -m benchmarks.cpu.distributed --json FILE [--row "1M, ddp"] [--rounds 7] [--quick]

128 completions of up to 32 tokens and one update a step, at learning rate 0, so that all draw the same; contenders take
turns step by step, and the ratio is that of tokens per second of wall time. CPU-seconds are those of all processes, the
peak of memory is the first one's. Payloads are those of one step: the tensors that collectives reduce, gather or
scatter, whole, as torch's dispatcher sees them (gloo, which sends (n - 1) / n of a payload per process, and twice that
for a reduction); computed from the weights and the passes; and values such as tokens and scores, pickled.
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
"""A step to warm up, and the one whose collectives are counted."""


def measure(run: Run, name: str) -> Row:
    """Let the contenders step in turn."""
    starts = {contender: start(run, name, contender) for contender in CONTENDERS}
    measurements, failures, _ = measure_in_turn(starts, uncounted=UNCOUNTED, repeats=run.repeats, say=say)
    return {"contenders": measurements, "failures": failures}


def start(run: Run, name: str, contender: str) -> Callable[[], Worker]:
    """Make a starter of one contender."""
    processes, threads = CONTENDERS[contender]["processes"], CONTENDERS[contender]["threads"]
    arguments = {**ROWS[name], "tokens": TOKENS, "processes": processes, "threads": threads}
    environment = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return partial(
        Worker, "benchmarks.cpu.distributed_worker", arguments, log=run.log(name, contender), environment=environment
    )


if __name__ == "__main__":
    main("distributed", __doc__, rows=list(ROWS), quick=["1M, ddp", "1M, fsdp2"], repeats=7, measure=measure)
