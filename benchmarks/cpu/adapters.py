"""Whole GRPO steps with adapters and with what saves memory, beside full training and beside TRL with peft.

    python -m benchmarks.cpu.adapters --json FILE [--row "7M, uniform, long prompts"] [--rounds 5] [--quick]

As in `step`: from the same weights, on the same prompts, in turn, by the public entry points. Adapters have rank 16
on all linear layers but the output, in float32 over a base in float32, in both libraries. The ratio is that of LoRA to
the contender in response tokens per CPU-second; the peak of resident memory is above what is resident right before the
first step, with peft imported in both libraries. 8-bit moments and activation checkpointing are those of full training.
"""

from __future__ import annotations

from typing import Any

from benchmarks.cpu.step import compare
from benchmarks.harness.runner import Row, Run, main
from benchmarks.harness.workloads import workload

LORA: dict[str, Any] = {"rank": 16, "alpha": 32}
CONTENDERS: dict[str, dict[str, object]] = {
    "flatpeak LoRA": {"contender": "flatpeak", "settings": {"model": {"lora": LORA}}},
    "flatpeak QLoRA": {"contender": "flatpeak", "settings": {"model": {"lora": LORA, "quantization": "nf4"}}},
    "flatpeak, all weights": {"contender": "flatpeak", "settings": {"model": {}}},
    "flatpeak, all weights, 8-bit moments": {
        "contender": "flatpeak",
        "settings": {"model": {}, "optimizer": {"name": "adamw_8bit"}},
    },
    "flatpeak, all weights, checkpointing": {
        "contender": "flatpeak",
        "settings": {"model": {}, "training": {"activation_checkpointing": True}},
    },
    "TRL LoRA": {"contender": "TRL generate", "lora": LORA},
    "TRL, all weights": {"contender": "TRL generate"},
}
ROWS = {
    f"{size}, {lengths}": (size, lengths)
    for size in ("7M", "45M")
    for lengths in ("uniform, long prompts", "uniform, short prompts")
}


def measure(run: Run, name: str) -> Row:
    """Measure all contenders on one workload."""
    size, lengths = ROWS[name]
    return compare(run, workload(size, lengths), CONTENDERS)


if __name__ == "__main__":
    main(
        "adapters",
        __doc__,
        rows=list(ROWS),
        quick=list(ROWS)[:1],
        repeats=5,
        measure=measure,
        left_out=[name for name in ROWS if name.startswith("45M")],
    )
