"""What a run writes down while it trains: metrics, rollouts, evaluations, checkpoints, and its summary."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from flatpeak.errors import StoppedError, UserError
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.evaluation.result import Evaluation
from flatpeak.protocols import Progress
from flatpeak.runs.checkpoints import BEST, LAST, checkpoint_name, checkpoint_steps, point, prune, write_checkpoint
from flatpeak.runs.config import RunSectionConfig
from flatpeak.runs.directory import RunDirectory
from flatpeak.runs.files import write_atomic
from flatpeak.runs.metrics import MetricsWriter
from flatpeak.runs.rollout_log import RolloutLog
from flatpeak.runs.signals import StopSignals
from flatpeak.runs.summary import EvaluationStage, RunSummary, StageEvaluation, Status, write_summary
from flatpeak.training.collect import BlankSteps, Rollouts
from flatpeak.training.learner import Learner
from flatpeak.training.silence import SilentSteps

Evaluator = Callable[[int | None, bool], Evaluation]
"""Evaluates the policy as it is now on the first so many held-out questions (None: all), and perturbed ones if so."""


class Stage(Protocol):
    """A part of a run that takes steps and can be saved."""

    name: str
    learner: Learner

    def state(self) -> dict[str, Any]:
        """Everything but weights and learner that the next step depends on, as JSON."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything that it depends on and is in tensors, but the policy's weights."""
        ...


@dataclass(kw_only=True, slots=True)
class History:
    """What has happened in a run so far; saved in every checkpoint, so that a resumed run tells the whole story."""

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    best_step: int | None = None
    best_value: float | None = None
    last_step: int = 0
    seconds: float = 0.0
    """Wall time of SFT and RL, their evaluations and checkpoints included."""


class Journal:
    """Records a run. It never changes what training does."""

    def __init__(
        self,
        run: RunDirectory,
        *,
        config: RunSectionConfig,
        evaluation: EvaluationConfig,
        evaluator: Evaluator,
        stop: StopSignals,
        progress: Progress,
        history: History,
        silent_steps: SilentSteps | None = None,
    ) -> None:
        self.run = run
        self.config = config
        self.evaluation = evaluation
        self.evaluator = evaluator
        self.stop = stop
        self.progress = progress
        self.history = history
        self.metrics = MetricsWriter(run.metrics, notice=progress.notice)
        self.rollout_log = RolloutLog(run.rollouts, notice=progress.notice)
        self.blank_steps = BlankSteps(progress.notice)
        self.silent_steps = silent_steps
        self._since = time.perf_counter()

    @property
    def stopped(self) -> bool:
        """Whether a signal asked to stop."""
        return self.stop.signal is not None

    def record(self, stage: str, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Log one step's metrics and show them."""
        self.metrics.write(step, stage, metrics)
        self.progress.update(stage, step=step, total=total, metrics=metrics)

    def rollouts(self, step: int, rollouts: Rollouts, advantages_PG: Tensor) -> None:
        """Log every completion of a step, where `run.log_rollouts_every` asks for it, and announce steps that teach
        nothing."""
        self.blank_steps.see(rollouts)
        if self.silent_steps is not None:
            self.silent_steps.see(rollouts, advantages_PG)
        if self.config.log_rollouts_every and step % self.config.log_rollouts_every == 0:
            self.rollout_log.write(step, rollouts.groups, rollouts.scores, advantages_PG.tolist())

    def begin(self, stage: Stage) -> None:
        """Before the first step of RL: the model as it starts is evaluated, saved, and is the first candidate."""
        self.evaluate_start(size=self._large_size)
        self._consider(0, self.history.evaluations[-1]["choice"])
        self.checkpoint(stage, 0)

    def evaluate_start(self, *, size: int | None) -> None:
        """Evaluate the model before any training, once: the first row of every table."""
        if not self.history.evaluations:
            self.evaluate("start", 0, size=size, robustness=True)

    def evaluate_after_sft(self, step: int) -> None:
        """Evaluate what SFT made of the model."""
        self.evaluate("sft", step, size=self._large_size, robustness=True)

    def evaluate(self, stage: EvaluationStage, step: int, *, size: int | None, robustness: bool) -> float:
        """Evaluate now, write the answers down, and return the metric that chooses checkpoints."""
        started = time.perf_counter()
        evaluation = self.evaluator(size, robustness)
        seconds = time.perf_counter() - started
        choice = evaluation.first(self.evaluation.size).mean(self.evaluation.metric)
        figures = evaluation.as_dict()
        for earlier in self.history.evaluations:
            # Tables of every checkpoint would drown the summary; the rows they are made of stay.
            if stage == "train" == earlier["stage"] and earlier["step"] != self.history.best_step:
                earlier["subsets"] = {}
        self.history.evaluations.append({"stage": stage, "step": step, **figures, "choice": choice})
        self._write_rows(f"{stage}_{step:06d}", evaluation.rows)
        perturbed = [row for one in evaluation.robustness.values() for row in one.rows]
        if perturbed:
            self._write_rows(f"{stage}_{step:06d}_perturbed", perturbed)
        named = {f"eval/{evaluation.task}/{name}": value for name, value in figures["metrics"].items()}
        self.record("eval", step, step, {**named, "time/eval": seconds})
        if stage == "train":
            self._consider(step, choice)
        return choice

    def _write_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        directory = self.run.path / "evaluations"
        directory.mkdir(exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        write_atomic(directory / f"{name}.jsonl", "".join(lines))

    def evaluate_if_due(self, stage: EvaluationStage, step: int, *, total: int, goal: float | None) -> bool:
        """Evaluate every `evaluation.every` steps and at the end; whether the goal is reached."""
        at_end = step == total
        if not at_end and not (self.evaluation.every and step % self.evaluation.every == 0):
            return False
        size = self._large_size if at_end else self.evaluation.size
        value = self.evaluate(stage, step, size=size, robustness=at_end)
        reached = goal is not None and value >= goal
        if reached and not at_end and (size != self._large_size or self.evaluation.robustness):
            self.evaluate(stage, step, size=self._large_size, robustness=True)
        return reached

    @property
    def _large_size(self) -> int | None:
        return self.evaluation.final_size or self.evaluation.size

    def _consider(self, step: int, value: float) -> None:
        best = self.history.best_value
        if best is None or value > best or (math.isnan(best) and not math.isnan(value)):
            self.history.best_step, self.history.best_value = step, value

    def checkpoint_if_due(self, stage: Stage, step: int, *, last: bool) -> None:
        """Save every `run.checkpoint_every` steps, at the end, on a signal, and where a new best was found."""
        every = self.config.checkpoint_every
        due = bool(every) and step % every == 0
        if due or last or self.stopped or self.history.best_step == step:
            self.checkpoint(stage, step)

    def checkpoint(self, stage: Stage, step: int, *, state: Mapping[str, Any] | None = None) -> None:
        """Save the policy and everything the next step depends on; RL's checkpoints carry `best` and `last`.

        `state` is the stage's, where it is not the present one.
        """
        self.history.last_step = step
        self._count_time()
        parent = self.run.checkpoints if stage.name == "train" else self.run.checkpoints / stage.name
        path = write_checkpoint(
            parent,
            step,
            save_model=stage.learner.policy.save,
            tensors=stage.tensors(),
            state={"stage": state or stage.state(), "learner": stage.learner.state(), "history": asdict(self.history)},
        )
        point(parent, LAST, path)
        if stage.name == "train" and self.history.best_step == step:
            point(parent, BEST, path)
        prune(parent, keep=self.config.keep_checkpoints)

    @contextmanager
    def saving_if_abandoned(self, stage: Stage, step: int) -> Iterator[None]:
        """Where a step's rollouts cannot be had or scored, save what the step before left: nothing has changed since.

        The state is taken before, because sampling moves what decides the order of work.
        """
        state = stage.state()
        try:
            yield
        except (UserError, StoppedError):
            if self.history.last_step != step - 1:
                self.checkpoint(stage, step - 1, state=state)
            raise

    def point_at(self, newest: Path) -> None:
        """Set the links of a resumed run again: a kill may have come between a checkpoint and its links."""
        point(newest.parent, LAST, newest)
        if self.history.best_step is not None:
            best = self.run.checkpoints / checkpoint_name(self.history.best_step)
            if best.exists():
                point(self.run.checkpoints, BEST, best)

    def summarize(self, status: Status) -> RunSummary:
        """Write summary.json."""
        self._count_time()
        evaluations: Sequence[dict[str, Any]] = self.history.evaluations
        summary = RunSummary(
            name=self.config.name,
            status=status,
            metric=self.evaluation.metric,
            best_step=self.history.best_step,
            last_step=self.history.last_step,
            evaluations=tuple(
                StageEvaluation(**{key: value for key, value in row.items() if key != "choice"}) for row in evaluations
            ),
            checkpoints=tuple(checkpoint_name(step) for step in checkpoint_steps(self.run.checkpoints)),
            wall_seconds=self.history.seconds,
            signal=self.stop.signal,
        )
        write_summary(self.run.summary, summary)
        return summary

    def close(self) -> None:
        """Close the metrics file."""
        self.metrics.close()

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.history.seconds += now - self._since
        self._since = now
