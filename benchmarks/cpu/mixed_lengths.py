"""One prompt of 1,500 tokens with 80 of 20 tokens: the cost together, compared with the costs of each kind alone.

    python -m benchmarks.cpu.mixed_lengths --json FILE [--row "1M, rollout"] [--rounds 5] [--quick]

Padding all prompts to the longest would multiply the work. A rollout reads all prompts and samples 32 tokens for each;
a training pass is the forward and backward pass over answers of 10 tokens. Both contenders process the same tokens.
Each has a process with one thread; they take turns.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from benchmarks.cpu.mixed_lengths_worker import CONTEXT, PROMPT_SETS
from benchmarks.harness.models import save_model
from benchmarks.harness.runner import Row, Run, main, model_directory, say
from benchmarks.harness.workers import Worker, measure_in_turn
from benchmarks.harness.workloads import workload

ROWS = {f"1M, {work}": work for work in ("training pass", "rollout")}


def measure(run: Run, name: str) -> Row:
    """Measure training or rollouts, together and separately."""
    work = workload("1M", "uniform, short prompts")
    with model_directory(run, name) as model:
        save_model(work, model, context=CONTEXT)
        arguments = {"workload": asdict(work), "model": str(model), "work": ROWS[name]}
        starts = {
            contender: partial(
                Worker,
                "benchmarks.cpu.mixed_lengths_worker",
                {**arguments, "contender": contender},
                log=run.log(contender, name),
            )
            for contender in PROMPT_SETS
        }
        measurements, failures, facts = measure_in_turn(starts, uncounted=1, repeats=run.repeats, say=say)
    return {"contenders": measurements, "failures": failures, "reported": facts["together"]}


if __name__ == "__main__":
    main("mixed_lengths", __doc__, rows=list(ROWS), quick=list(ROWS), repeats=5, measure=measure)
