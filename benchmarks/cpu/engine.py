"""Rollouts alone: flatpeak's engine, vLLM, and two ways of transformers, sampling equal amounts in turns.

    python -m benchmarks.cpu.engine --json FILE [--row "1M, skewed"] [--rounds 5] [--quick]

flatpeak decodes by native kernels if they support the model (the table names the decoder); "flatpeak, torch" does not.
Each contender is a process with one thread, or with the row's number, and samples a step's completions in its turn. All
use the same weights, prompts, limits and plain sampling at temperature 1. flatpeak and vLLM return the log-probability
of every token, as training needs; transformers does not, and saves that time. flatpeak also returns text, and packs its
weights in every round, as after an update; the others keep theirs. vLLM compiles the model, except in "eager"; its peak
excludes what it reserves at loading (1 GiB of cache). It runs in the Python of FLATPEAK_VLLM_PYTHON or .venv-vllm;
without either, there is no vLLM row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.models import save_model
from benchmarks.harness.runner import Row, Run, main, model_directory, say
from benchmarks.harness.workers import ROOT, Worker, measure_in_turn
from benchmarks.harness.workloads import Workload, workload
from flatpeak.policy.native_decoding import TORCH

ROWS = {
    f"{size}, {lengths}": (size, lengths, 1)
    for size in ("1M", "7M", "45M")
    for lengths in ("skewed", "uniform, long prompts", "uniform, short prompts")
    if size != "45M" or lengths == "skewed"
} | {f"{size}, skewed, 2 threads": (size, "skewed", 2) for size in ("1M", "7M")}
"""Name: size, lengths and the number of threads of each contender."""
KERNELS = {"flatpeak": "auto", "flatpeak, torch": "torch"}
"""Contender: FLATPEAK_KERNELS."""
TRANSFORMERS = ("transformers generate", "transformers generate_batch")
VLLM = {
    "vLLM": {"eager": False, "dtype": "float32"},
    "vLLM eager": {"eager": True, "dtype": "float32"},
    "vLLM, bfloat16": {"eager": False, "dtype": "bfloat16"},
}
"""Contender: whether vLLM must not compile the model, and the type of its weights."""
CONTENDERS = (*KERNELS, *TRANSFORMERS, "vLLM", "vLLM eager")
"""Contenders with a random model. Continuous batching, always the slowest, appears only at the smallest size."""
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""No row fills 1 GiB of cache; a single process, so that its CPU time is complete."""
REPORTED = ("vllm", "parameters", "decoder")
"""Reported properties of contenders that the result names; of decoders, only the native one."""
UNCOUNTED = 2
"""Warm-up rounds of vLLM: the first compiles kernels, and the second is still slower than later rounds."""


def vllm_python() -> Path | None:
    """Find the Python with vLLM."""
    named = os.environ.get("FLATPEAK_VLLM_PYTHON")
    python = Path(named).absolute() if named else ROOT / ".venv-vllm" / "bin" / "python"
    if named and not python.exists():
        raise SystemExit(f"FLATPEAK_VLLM_PYTHON={named}: no such file")
    return python if python.exists() else None


def measure(run: Run, name: str) -> Row:
    """Measure all contenders on one workload."""
    size, lengths, threads = ROWS[name]
    work = workload(size, lengths)
    names = [each for each in CONTENDERS if each != "transformers generate_batch" or size == "1M"]
    with model_directory(run, name) as model:
        save_model(work, model)
        measurements, failures, reported = measure_in_turn(
            contenders(run, work, model, threads, names), uncounted=UNCOUNTED, repeats=run.repeats, say=say
        )
    return {
        "workload": asdict(work),
        "contenders": measurements,
        "failures": failures,
        "reported": versions(reported),
    }


def versions(reported: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The properties in the contenders' reports that the result names."""
    return {
        key: value for facts in reported.values() for key, value in facts.items() if key in REPORTED and value != TORCH
    }


def contenders(
    run: Run, work: Workload, model: Path, threads: int, names: Collection[str]
) -> dict[str, Callable[[], Worker]]:
    """Functions that start workers, by contender."""
    arguments = {"workload": asdict(work), "model": str(model), "threads": threads}
    starts: dict[str, Callable[[], Worker]] = {}
    for contender in [each for each in (*KERNELS, *TRANSFORMERS) if each in names]:
        starts[contender] = partial(
            Worker,
            "benchmarks.cpu.engine_worker",
            {**arguments, "contender": contender.partition(",")[0]},
            log=run.log(contender, work.size, work.lengths, str(threads)),
            environment={"FLATPEAK_KERNELS": KERNELS[contender]} if contender in KERNELS else None,
        )
    python = vllm_python()
    if python is None:
        say("  no vLLM: set FLATPEAK_VLLM_PYTHON, or `make .venv-vllm/installed`")
        return starts
    for contender in [each for each in VLLM if each in names]:
        starts[contender] = partial(
            Worker,
            "benchmarks.cpu.vllm_worker",
            {**arguments, **VLLM[contender]},
            log=run.log(contender, work.size, work.lengths, str(threads)),
            python=str(python),
            environment={**VLLM_ENVIRONMENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)},
        )
    return starts


if __name__ == "__main__":
    main("engine", __doc__, rows=list(ROWS), quick=["1M, skewed"], repeats=5, measure=measure, left_out=["45M, skewed"])
