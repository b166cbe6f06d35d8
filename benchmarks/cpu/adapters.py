"""Whole GRPO steps with adapters and with memory savers, compared with full training and with TRL and peft.

    python -m benchmarks.cpu.adapters --json FILE [--row "7M, uniform, long prompts"] [--rounds 5] [--quick]

As in `step`, contenders start from the same weights, use the same prompts, and take turns through their public entry
points. In both libraries, adapters have rank 16 on all linear layers except the output, in float32 over a float32 base.
The ratio is LoRA's response tokens per CPU-second divided by the contender's. Peak memory is relative to the resident
memory right before the first step, with peft imported in both libraries. 8-bit moments and activation checkpointing
apply to full training.
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
