"""Peak memory of a whole GRPO step with a vocabulary of 32,000: flatpeak against TRL.

    python -m benchmarks.cpu.memory --json FILE [--rounds 2] [--quick]

16 prompts of about 64 tokens with 8 completions each, all capped at 128 tokens: with so large a vocabulary the end of a
sequence is hardly ever sampled, so both libraries have the same lengths. The result is the peak of resident memory in a
step, relative to the memory right before the first step, with everything imported and loaded. TRL runs in two ways: the
batch in one piece, and 8 completions at a time with accumulated gradients, as users do who run out of memory. flatpeak
splits the batch automatically.
"""

from __future__ import annotations

from benchmarks.cpu.step import compare
from benchmarks.harness.runner import Row, Run, main
from benchmarks.harness.workloads import workload

CONTENDERS: dict[str, dict[str, object]] = {
    "flatpeak": {"contender": "flatpeak"},
    "TRL, one piece": {"contender": "TRL generate"},
    "TRL, 8 at a time": {"contender": "TRL generate", "micro_batch": 8},
}
ROWS = {"7M, vocabulary 32k": ("7M", 16), "1M, vocabulary 32k": ("1M", 16)}


def measure(run: Run, name: str) -> Row:
    """Measure one size of model."""
    size, prompts = ROWS[name]
    return compare(run, workload(size, "vocabulary 32k", prompts=prompts), CONTENDERS)


if __name__ == "__main__":
    main("memory", __doc__, rows=list(ROWS), quick=list(ROWS)[1:], repeats=2, measure=measure, left_out=list(ROWS)[1:])
