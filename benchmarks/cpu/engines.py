"""Rollouts by each of flatpeak's engines on the same work, with separate times of weight updates.

    python -m benchmarks.cpu.engines --json FILE [--row "1M, skewed"] [--rounds 5] [--quick]

Every round changes the weights, as a training step does, gives them to the engine, and samples a step's completions
with log-probabilities and text. The native engine and `generate` compute with the trainer's weights: only the native
engine has copies to update, which it packs while sampling. vLLM is a server on this machine, used over HTTP; its CPU
time is that of the trainer's process and all of the server's processes. The server does not compile the model (the
benchmark `engine` compares this with a compiled one), and loads its weights from a file. vLLM runs in the Python of
FLATPEAK_VLLM_PYTHON or .venv-vllm; without either, there is no vLLM row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.cpu.engine import vllm_python
from benchmarks.harness.models import save_model
from benchmarks.harness.runner import Row, Run, main, model_directory, say
from benchmarks.harness.workers import Worker, measure_in_turn
from benchmarks.harness.workloads import workload

ROWS = {
    f"{size}, {lengths}": (size, lengths) for size in ("1M", "7M") for lengths in ("skewed", "uniform, long prompts")
}
ENGINES = ("native", "generate", "vLLM over HTTP")
UNCOUNTED = 2


def measure(run: Run, name: str) -> Row:
    """Measure all engines on one workload."""
    size, lengths = ROWS[name]
    work = workload(size, lengths)
    python = vllm_python()
    if python is None:
        say("  no vLLM: set FLATPEAK_VLLM_PYTHON, or `make .venv-vllm/installed`")
    with model_directory(run, name) as model:
        save_model(work, model)
        starts: dict[str, Callable[[], Worker]] = {
            engine: partial(start, run, engine, str(model), str(python), asdict(work))
            for engine in ENGINES
            if python is not None or not engine.startswith("vLLM")
        }
        measurements, failures, reported = measure_in_turn(starts, uncounted=UNCOUNTED, repeats=run.repeats, say=say)
    versions = {key: value for facts in reported.values() for key, value in facts.items() if key == "vllm"}
    return {"workload": asdict(work), "contenders": measurements, "failures": failures, "reported": versions}


def start(run: Run, engine: str, model: str, python: str, work: dict[str, object]) -> Worker:
    """A worker of one engine."""
    arguments = {"engine": engine, "model": model, "python": python, "workload": work}
    return Worker("benchmarks.cpu.engines_worker", arguments, log=run.log(engine, Path(model).name))


if __name__ == "__main__":
    main("engines", __doc__, rows=list(ROWS), quick=["1M, skewed"], repeats=5, measure=measure)
