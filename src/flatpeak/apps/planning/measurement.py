"""Two real steps of a planned run, in a separate process and directory that leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from flatpeak.config.load import apply_settings, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import RunError, UserError
from flatpeak.runs.metrics import read_metrics

STEPS: Final = 2
"""The first step compiles kernels and fills caches; the second is like those that follow."""
NAME: Final = "measured"
HOUR: Final = 3600.0
_KILLED: Final = -9


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Time and memory of two steps, and the resulting estimate for a whole run."""

    first_step_seconds: float
    step_seconds: float
    """Time of the last step."""
    rollout_seconds: float | None
    """Its part for rollouts; None in SFT, which samples nothing."""
    informative_fraction: float | None
    """The share of that step's groups that had a gradient; passes over the others are skipped. None in SFT."""
    run_seconds: float
    """All steps of the stage, without evaluations and checkpoints."""
    peak_gib: float | None
    """Memory of the process with libraries; on a GPU, what torch has allocated. None in SFT, which reports none."""
    cost: float | None


def measure_run(config: RunConfig, *, price: float | None) -> Measurement:
    """Run two steps of a recipe's RL, or of its SFT if it has no RL; `price` is per hour.

    UserError for a recipe that cannot run, RunError for steps that fail.
    """
    steps = config.training.steps or config.sft.steps
    if not steps:
        raise UserError("--measure: training.steps and sft.steps are 0, so there is no step to measure")
    with tempfile.TemporaryDirectory(prefix="flatpeak-plan-") as directory:
        recipe = Path(directory) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(shortened(config, directory), allow_unicode=True), encoding="utf-8")
        _run([sys.executable, "-m", "flatpeak", "train", str(recipe), "--json"])
        rows = read_metrics(Path(directory) / NAME / "metrics.jsonl")
    stage = "train" if config.training.steps else "sft"
    return summarize([row for row in rows if row["stage"] == stage], steps=steps, price=price)


def shortened(config: RunConfig, directory: str) -> dict[str, Any]:
    """The recipe with two steps, one question in its evaluations, and nothing else that takes time."""
    rl = config.training.steps > 0
    settings = {
        "run.name": NAME,
        "run.directory": directory,
        "run.checkpoint_every": 0,
        "training.steps": STEPS if rl else 0,
        "sft.steps": 0 if rl else STEPS,
        "training.stop_at": None,
        "training.stop_when": None,
        "sft.stop_at": None,
        "curriculum": None,
        "evaluation.every": 0,
        "evaluation.size": 1,
        "evaluation.final_size": None,
        "evaluation.robustness": [],
        "evaluation.sets": None,
        "evaluation.sharpness": None,
    }
    recipe = apply_settings(config.model_dump(mode="json", exclude_unset=True), settings)
    parse_config(recipe)
    return recipe


def summarize(rows: Sequence[Mapping[str, Any]], *, steps: int, price: float | None) -> Measurement:
    """The measurement from the metrics of the steps."""
    first, last = rows[0], rows[-1]
    seconds = first["time/step"] + (steps - 1) * last["time/step"]
    peaks = [value for row in rows for name, value in row.items() if name.startswith("memory/")]
    return Measurement(
        first_step_seconds=first["time/step"],
        step_seconds=last["time/step"],
        rollout_seconds=last.get("time/rollout"),
        informative_fraction=last.get("groups/informative_fraction"),
        run_seconds=seconds,
        peak_gib=max(peaks, default=None),
        cost=None if price is None else price * seconds / HOUR,
    )


def _run(command: Sequence[str]) -> None:
    """Run a command; if it fails, the exception has its last line of error output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = lines[-1].removeprefix("error: ") if lines else f"exit code {done.returncode}"
    if done.returncode == _KILLED:
        reason = "its process was killed, most likely for want of memory"
    kind = UserError if done.returncode == 2 else RunError
    raise kind(f"--measure: {reason}")
