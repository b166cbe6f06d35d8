"""A real model on one and two threads: decoding, prompts, training pass and rollout beside a large product.

    python -m benchmarks.cpu.real_model MODEL --json FILE [--rounds 5] [--quick]

MODEL is a directory of transformers, or a GGUF file of a Llama-like model (needs the packages gguf and accelerate).
Each number of threads has a process of its own, and they work in turn. "product" multiplies two float32 matrices of
1024 x 1024 by torch: what the machine gives at that moment. "decode" feeds one token to 32 rows of four prompts,
output layer included; "prompts" reads four prompts of 64 tokens; "training" is a forward and backward pass over 8
prompts of 70 tokens with 8 responses of 16 each, logits that are made again not counted. "rollout" is four chat
prompts with 8 completions of at most 48 tokens, weights packed anew as after an update, and "generate" the same by
transformers' `generate`.

Figures are GFLOP, or tokens, per second: of CPU time, and by the clock, which counts only while no other process wants
the cores.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cpu.real_model_worker import PARTS
from benchmarks.harness.runner import facts, say, write_json
from benchmarks.harness.workers import Measurement, Worker, measure_in_turn

THREADS = (1, 2)
UNCOUNTED = 1


def main() -> None:
    """Measure both numbers of threads in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model's directory, or a GGUF file")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round, few tokens: shows that everything works")
    given = parser.parse_args()
    content: dict[str, Any] = {"part": "real_model", "quick": given.quick, "facts": facts("real_model")}
    with TemporaryDirectory(prefix="flatpeak-bench-") as scratch:
        starts = {
            f"{threads} threads": partial(
                Worker,
                "benchmarks.cpu.real_model_worker",
                {"model": str(given.model.absolute()), "threads": threads, "quick": given.quick},
                log=Path(scratch) / f"{threads}.log",
                environment={"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            )
            for threads in THREADS
        }
        measured, failures, reported = measure_in_turn(
            starts, uncounted=UNCOUNTED, repeats=1 if given.quick else given.rounds, say=say
        )
    write_json(given.json, content | {"contenders": measured, "failures": failures, "reported": reported})
    print(table(measured))


def table(measured: dict[str, list[Measurement]]) -> str:
    """Rates by part: of CPU time on one thread, by the clock on both numbers of threads, and their ratios."""
    one, two = (measured[f"{threads} threads"] for threads in THREADS)
    lines = [
        "| Part | One thread, per CPU-second | Of the product | Two threads, by the clock | Of the product "
        "| Times one thread |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for part, unit in PARTS.items():
        cells = [f"{part}, {unit}", spread([turn[f"{part} cpu"] for turn in one])]
        cells.append(_share(one, part, "cpu") if unit == "GFLOP" else "")
        cells.append(spread([turn[f"{part} wall"] for turn in two]))
        cells.append(_share(two, part, "wall") if unit == "GFLOP" else "")
        ratios = [b[f"{part} wall"] / a[f"{part} wall"] for a, b in zip(one, two, strict=True)]
        lines.append("| " + " | ".join([*cells, f"{median(ratios):.2f}"]) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """The median with the smallest and the largest value."""
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _share(turns: list[Measurement], part: str, clock: str) -> str:
    return f"{median(turn[f'{part} {clock}'] / turn[f'product {clock}'] for turn in turns):.2f}"


if __name__ == "__main__":
    main()
