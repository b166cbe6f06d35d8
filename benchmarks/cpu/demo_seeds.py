"""The demo on ten seeds, with and without gradient regularization, each by its own command.

    python -m benchmarks.cpu.demo_seeds --json FILE [--row "plain, seed 0"] [--quick]

Run and task have the same seed. Time and CPU-seconds are of the whole command, including imports. At the end, the
benchmark prints the table of docs/results/demo.md; `python -m benchmarks.cpu.demo_seeds --table FILE...` prints it from
existing files.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.runner import Row, Run, main, say
from benchmarks.harness.workers import ROOT

KINDS = {"plain": (), "regularized": ("gradient_regularization.strength=ratio:0.3",)}
ROWS = {f"{kind}, seed {seed}": (kind, seed) for kind in KINDS for seed in range(10)}
QUICK = ("training.steps=4", "evaluation.every=2", "evaluation.size=50", "sft.steps=20", "sft.stop_at=null")
COMMAND = "from flatpeak.cli.main import main; main()"
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


def measure(run: Run, name: str) -> Row:
    """Run the demo once, as a user would."""
    kind, seed = ROWS[name]
    settings = [f"run.seed={seed}", f"task.seed={seed}", *KINDS[kind], *(QUICK if run.quick else ())]
    directory = run.scratch / name.replace(", ", "-").replace(" ", "-")
    busy, cpu, started = os.getloadavg()[0], children_cpu(), time.perf_counter()
    path = os.pathsep.join(one for one in (os.environ.get("PYTHONPATH"), str(ROOT / "src")) if one)
    with run.log(name).open("wb") as log:
        subprocess.run(
            [sys.executable, "-c", COMMAND, "demo", *settings, f"run.directory={directory}"],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        )
    spent = {"wall": time.perf_counter() - started, "cpu": children_cpu() - cpu, "load_before": busy}
    measured = read_summary(directory / "demo" / "summary.json") | spent
    say("  " + ", ".join(f"{key} {value:.4g}" for key, value in measured.items()))
    return {"kind": kind, "seed": seed, **measured}


def children_cpu() -> float:
    """CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_summary(summary: Path) -> dict[str, float]:
    """Held-out accuracy after SFT and at the end, the last step, and the total time of SFT and GRPO."""
    content = json.loads(summary.read_text(encoding="utf-8"))
    last = {evaluation["stage"]: evaluation for evaluation in content["evaluations"]}
    return {
        "after_sft": last["sft"]["metrics"]["accuracy"],
        "after_grpo": last["train"]["metrics"]["accuracy"],
        "step": last["train"]["step"],
        "training_wall": content["wall_seconds"],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each seed, plain and regularized; the last line has the worst of each column."""
    head = ["Seed"]
    for kind in KINDS:
        head += [f"{kind}: after SFT", "after GRPO", "step", "s", "CPU-s"]
    lines = [head, ["---"] * len(head)]
    by_seed = {(row["kind"], row["seed"]): row for row in rows}
    for seed in sorted({row["seed"] for row in rows}):
        lines.append([str(seed), *(cell for kind in KINDS for cell in _cells(by_seed.get((kind, seed))))])
    lines.append(["worst", *(cell for kind in KINDS for cell in _worst([r for r in rows if r["kind"] == kind]))])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return [""] * 5
    accuracies = [f"{row[name]:.3f}" for name in ("after_sft", "after_grpo")]
    return [*accuracies, f"{row['step']:.0f}", f"{row['wall']:.0f}", f"{row['cpu']:.0f}"]


def _worst(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return [""] * 5
    most = {name: max(row[name] for row in rows) for name in ("step", "wall", "cpu")}
    sft = f"{min(row['after_sft'] for row in rows):.3f} to {max(row['after_sft'] for row in rows):.3f}"
    right = f"{min(row['after_grpo'] for row in rows):.3f}"
    return [sft, right, *(f"{value:.0f}" for value in most.values())]


def print_tables(files: Sequence[str]) -> None:
    """Print one table of all rows of these files; rows of later files replace those of earlier files."""
    rows = [row for file in files for row in json.loads(Path(file).read_text(encoding="utf-8"))["rows"]]
    print(table(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--table"]:
        print_tables(sys.argv[2:])
    else:
        quick = ["plain, seed 0", "regularized, seed 0"]
        print(table(main("demo_seeds", __doc__, rows=list(ROWS), quick=quick, repeats=1, measure=measure)))
