"""The training pass alone: forward and backward of one batch, padded, packed, and packed with shared prompts.

    python -m benchmarks.cpu.training_pass --json FILE [--row "1M, prompt 256 and short answers"] [--rounds 5] [--quick]

All three compute the log-probability of every response token and the same gradient, which is asserted before timing.
Padded is transformers' forward pass with its own attention, over rows of prompt and answer padded to the longest,
keeping all logits. Packed is flatpeak's pass with a copy of the prompt for each completion. Shared is flatpeak's
training pass, with each prompt once, by native kernels if they support the model; "shared, torch" does not use them.
Each contender has a process with one thread, or with the named number, and they take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.cpu.training_pass_worker import PROMPTS, SHAPES
from benchmarks.harness.models import save_model
from benchmarks.harness.runner import Row, Run, main, model_directory, say
from benchmarks.harness.workers import Worker, measure_in_turn
from benchmarks.harness.workloads import workload

ROWS = {f"{size}, {shape}": (size, shape) for size in ("1M", "7M") for shape in SHAPES}
CONTENDERS: dict[str, tuple[str, str, int]] = {
    "shared": ("shared", "auto", 1),
    "shared, torch": ("shared", "torch", 1),
    "shared, 2 threads": ("shared", "auto", 2),
    "shared, torch, 2 threads": ("shared", "torch", 2),
    "packed": ("packed", "auto", 1),
    "padded": ("padded", "auto", 1),
}
"""Contender: its kind, FLATPEAK_KERNELS and the number of threads."""
TOLERANCE = 1e-6
"""Tolerance relative to the largest entry of a gradient. One library computes all products for this check, because it
tests packing, and two libraries round differently."""
UNCOUNTED = 1


def measure(run: Run, name: str) -> Row:
    """Measure one size and shape with all contenders."""
    size, shape = ROWS[name]
    work = workload(size, "uniform, long prompts", prompts=PROMPTS)
    with model_directory(run, name) as model:
        save_model(work, model)
        gradients = {contender: model / f"{contender}.safetensors" for contender in CONTENDERS}
        arguments = {"workload": asdict(work), "model": str(model), "shape": shape}
        starts = {
            contender: partial(
                Worker,
                "benchmarks.cpu.training_pass_worker",
                {**arguments, "contender": way, "threads": threads, "gradient": str(gradients[contender])},
                log=run.log(contender, name),
                environment={"FLATPEAK_KERNELS": kernels},
            )
            for contender, (way, kernels, threads) in CONTENDERS.items()
        }
        measurements, failures, facts = measure_in_turn(starts, uncounted=UNCOUNTED, repeats=run.repeats, say=say)
        differences = gradient_differences(gradients)
    say("  gradients differ by: " + ", ".join(f"{key} {value:.1e}" for key, value in differences.items()))
    assert max(differences.values()) <= TOLERANCE, differences
    return {
        "contenders": measurements,
        "failures": failures,
        "gradient_differences": differences,
        "reported": facts["shared"],
    }


def gradient_differences(files: Mapping[str, Path]) -> dict[str, float]:
    """Each contender's largest difference from the padded gradient, relative to the latter's largest entry."""
    gradients = {contender: load_file(file) for contender, file in files.items()}
    padded = gradients.pop("padded")
    largest = max(float(entry.abs().max()) for entry in padded.values())
    return {
        contender: max(float((own[name] - entry).abs().max()) for name, entry in padded.items()) / largest
        for contender, own in gradients.items()
    }


if __name__ == "__main__":
    main("training_pass", __doc__, rows=list(ROWS), quick=list(ROWS)[:2], repeats=5, measure=measure)
