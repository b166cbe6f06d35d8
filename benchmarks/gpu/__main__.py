"""flatpeak on one GPU: decoding, training, whole steps, gradient regularization, and the same step with TRL.

    python -m benchmarks.gpu --json FILE [--part decode ...] [--minutes 8] [--device cuda] [--tiny]

Models have Qwen2.5's shapes and random weights in bfloat16. Each part writes each row at once and stops before its time
limit; rows without enough time or memory are listed with the reason. `roofline` measures the reference of the other
parts' percentages, so it always runs first. `--device cpu --tiny` runs every part in seconds, only to show that the
script works.

    roofline  read and copy bandwidth, matrix products
    decode    tokens per second and milliseconds per token of the rollout engine, against the ceiling
    train     an update on 16k and 32k packed tokens: plain, compiled, recomputed, prompts not shared
    step      whole GRPO steps: rollout, update, and the difference between the sampler's and the trainer's log-probs
    gr        an update with gradient regularization and one without
    trl       the same step with TRL, if it is installed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decode import measure_decode
from benchmarks.gpu.models import Peaks
from benchmarks.gpu.training import measure_gr, measure_step, measure_train
from benchmarks.gpu.trl import measure_trl
from benchmarks.harness.runner import Row, say, write_json
from flatpeak.runs.manifest import describe_start


def roofline(bench: Bench) -> None:
    """Measure bandwidth over arrays far larger than any cache, and a large square product."""
    numbers = 2**22 if bench.tiny else 2**31
    side = 256 if bench.tiny else 8192

    def bandwidth() -> Row:
        source = torch.ones(numbers, dtype=bench.dtype, device=bench.device)
        target = torch.empty_like(source)
        size = source.numel() * source.element_size()
        read = bench.typical(lambda: torch.amax(source), times=10)
        copy = bench.typical(lambda: target.copy_(source), times=10)
        return {"read_gb_per_second": size / read / 1e9, "copy_gb_per_second": 2 * size / copy / 1e9}

    def product() -> Row:
        left = torch.randn(side, side, device=bench.device).to(bench.dtype)
        taken = bench.typical(lambda: left @ left, times=20, warm_ups=3)
        return {"side": side, "tflops": 2 * side**3 / taken / 1e12}

    bench.row("bandwidth", bandwidth)
    bench.row("matrix product", product)
    memory, matmul = bench.rows
    best = max(memory["read_gb_per_second"], memory["copy_gb_per_second"]) * 1e9
    bench.peaks = Peaks(bytes_per_second=best, flops_per_second=matmul["tflops"] * 1e12, dtype=bench.dtype)


MEASURE: dict[str, Callable[[Bench], None]] = {
    "roofline": roofline,
    "decode": measure_decode,
    "train": measure_train,
    "step": measure_step,
    "gr": measure_gr,
    "trl": measure_trl,
}


def part(text: str) -> tuple[str, float | None]:
    """A part and its time limit in minutes, if it has one of its own."""
    name, _, minutes = text.partition("=")
    if name not in MEASURE:
        raise argparse.ArgumentTypeError(f"{name}: one of {', '.join(MEASURE)}")
    return name, float(minutes) if minutes else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, and write the file after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--part", action="append", type=part, help="only this part, or NAME=MINUTES; may be repeated")
    parser.add_argument("--minutes", type=float, default=8.0, help="minutes per part (%(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to check that everything works")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU: use --device cpu --tiny to check the script")
    content: dict[str, Any] = {
        "facts": describe_start([Path(sys.executable).name, "-m", "benchmarks.gpu", *(arguments or sys.argv[1:])]),
        "dtype": given.dtype,
        "tiny": given.tiny,
        "parts": {},
    }
    bench = Bench(
        device=given.device,
        dtype=getattr(torch, given.dtype),
        tiny=given.tiny,
        seconds=60 * given.minutes,
        save=lambda: write_json(given.json, content),
    )
    minutes = dict(given.part or dict.fromkeys(MEASURE))
    for name, measure in MEASURE.items():
        if name == "roofline" or name in minutes:
            say(name)
            bench.begin()
            bench.seconds = 60 * (minutes.get(name) or given.minutes)
            content["parts"][name] = bench.rows
            measure(bench)


if __name__ == "__main__":
    main()
