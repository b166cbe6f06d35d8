"""summary.json, the outcome of a run, used for tables and the last line of a command."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatpeak.errors import UserError
from flatpeak.runs.directory import run_hint
from flatpeak.runs.files import write_atomic

Status = Literal["running", "done", "stopped", "failed"]
EvaluationStage = Literal["start", "sft", "train"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEvaluation:
    """One held-out evaluation of one checkpoint."""

    stage: EvaluationStage
    """`start` is the model before any training, `sft` after (or during) SFT, `train` during and after RL."""
    step: int
    """The step within that stage."""
    task: str
    size: int
    """The number of held-out questions."""
    metrics: Mapping[str, float | None]
    """accuracy, reward, format, ...; None if a metric was not finite."""
    intervals: Mapping[str, tuple[float, float]]
    """A confidence interval (low, high) per metric that has one."""
    methods: Mapping[str, str] = field(default_factory=dict)
    """The method of each interval: `wilson` or `bootstrap`."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """The number of questions in a metric's mean, if not all questions."""
    subsets: Mapping[str, Any] = field(default_factory=dict)
    """[column]: `values` (each with size, metrics, intervals, counted), `micro` and `macro` averages."""
    robustness: Mapping[str, Any] = field(default_factory=dict)
    """[kind of perturbation]: coverage, accuracy, the clean accuracy of the same questions, their difference."""
    choices: str | None = None
    """The way questions with lettered options were answered, `generate` or `rank`; None without such questions."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """The results of each task of a mixture and of each evaluation set, by name: fields as here, from `task` on."""

    def on(self, name: str) -> StageEvaluation | None:
        """The evaluation on one task of a mixture or one evaluation set; itself under the name of its own task."""
        if name == self.task:
            return self
        return None if name not in self.sets else StageEvaluation(stage=self.stage, step=self.step, **self.sets[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The outcome of a run, or its current state."""

    name: str
    status: Status
    """`stopped`: by a signal or a callback, with a valid checkpoint. After a kill, the status is still `running`."""
    metric: str
    """The metric that chose the best checkpoint."""
    best_step: int | None
    last_step: int
    evaluations: tuple[StageEvaluation, ...]
    """The evaluations of all stages, in chronological order."""
    checkpoints: tuple[str, ...]
    """Names of the available checkpoints, oldest first."""
    wall_seconds: float
    """Time spent in SFT and RL together, over all starts of the run."""
    signal: int | None = None
    """The signal that stopped the run."""
    ended_by: str | None = None
    """The end of the run at or before its last step: by `training.stop_at`, `training.stop_when` or a callback."""

    def evaluation(self, stage: EvaluationStage) -> StageEvaluation | None:
        """The last evaluation of a stage, or None."""
        return next((one for one in reversed(self.evaluations) if one.stage == stage), None)


def write_summary(path: Path, summary: RunSummary) -> None:
    """Write a summary as JSON, atomically; numbers that are not finite become null."""
    write_atomic(path, json.dumps(finite(asdict(summary)), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_summary(path: Path) -> RunSummary:
    """Read a summary. Raises UserError if the file is missing or not a summary."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        evaluations = tuple(
            StageEvaluation(
                **row | {"intervals": {name: (low, high) for name, (low, high) in row["intervals"].items()}}
            )
            for row in content.pop("evaluations")
        )
        checkpoints = tuple(content.pop("checkpoints"))
        return RunSummary(evaluations=evaluations, checkpoints=checkpoints, **content)
    except FileNotFoundError:
        hint = run_hint(path.parent, after="; ")
        raise UserError(
            f"{path} does not exist: {path.parent} is not a run, or its training never began{hint}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a run's summary ({error})") from error


def finite(value: Any) -> Any:
    """Make a value representable in JSON: numbers that are not finite become null, and tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
