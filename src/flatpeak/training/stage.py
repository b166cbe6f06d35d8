"""The loop that SFT, RL and reward models share, and the condition of `training.stop_when`, which may end it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from flatpeak.errors import nearest
from flatpeak.rollout.randomness import derive_seed
from flatpeak.runs.paid_patterns import SPREADS, most_spreads
from flatpeak.training.config import StopWhenConfig
from flatpeak.training.history import SkippedUpdateMonitor
from flatpeak.training.learner import seeded
from flatpeak.training.optimizer import BaseLearner
from flatpeak.training.recorder import Recorder

STOP_WHEN = "stop_when"
"""Key of the condition's state in that of the stage."""


class StageTrainer(ABC):
    """Trainer of one stage of a run: `train_step` is its algorithm, `train` repeats it."""

    name = "train"
    """The stage in logs and checkpoints."""
    title = "train"
    """The stage in notices of skipped updates."""
    learner: BaseLearner[Any, Any]

    def __init__(
        self,
        *,
        steps: int,
        seed: int,
        recorder: Recorder,
        max_skipped_updates: int,
        goal: float | None = None,
        stop_when: StopWhenConfig | None = None,
    ) -> None:
        """Begin at step 0. An evaluation that reaches `goal` ends the stage, and so does `stop_when`."""
        self.steps = steps
        self.seed = seed
        """The seed of the random numbers that steps use, such as dropout's."""
        self.recorder = recorder
        self.max_skipped_updates = max_skipped_updates
        self.skipped = SkippedUpdateMonitor()
        self.goal = goal
        self.finished = False
        """Whether an evaluation has ended the stage."""
        self.condition = StopCondition(stop_when)

    def train(self, *, first_step: int = 1) -> None:
        """Step, record, evaluate, save: until the steps are done, the goal is reached, or a signal asks to stop."""
        self.learner.before_pass = self.recorder.check_stop
        self.recorder.halvings.apply(self.learner.bound)
        if first_step == 1:
            self.begin()
        elif not self.recorder.evaluated:
            self.evaluate_and_save(first_step - 1)
        for step in range(first_step, self.steps + 1):
            if self.finished or self.condition.met or self.recorder.stopped:
                break
            self.recorder.begin_step(self, step)
            with seeded(derive_seed(self.seed, "dropout", step)):
                metrics = self.train_step(step)
            self.learner.zero_grad()  # evaluation and the next rollouts can have the memory
            self.observe(step, metrics)
            due = self.evaluation_due(step)
            self.recorder.complete(self, step, self.steps, metrics, evaluation_due=due)
            self.evaluate_and_save(step)
        self.recorder.ended_by = None if self.recorder.stopped else self.ended_by()

    @abstractmethod
    def train_step(self, step: int) -> dict[str, float]:
        """Take one step, and return its metrics."""

    def begin(self) -> None:
        """Evaluate and save the model before the first step."""
        self.finished = self.recorder.begin(self, goal=self.goal)

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Read a step's metrics, which may end the stage."""
        self.condition.observe(step, metrics, notice=self.recorder.progress.notice)

    def last_step(self, step: int) -> int:
        """The last step of the stage, as far as is known after a step."""
        return step if self.condition.met else self.steps

    def evaluate_and_save(self, step: int) -> None:
        """Evaluate and save where it is due. Raises RunError where too many updates were skipped."""
        last = step == self.last_step(step)
        self.recorder.check_skipped(self.title, step, self.skipped, limit=self.max_skipped_updates, at_end=last)
        self.finished = self.evaluate(step)
        self.recorder.checkpoint_if_due(self, step, last=self.finished or last)

    def evaluation_due(self, step: int) -> bool:
        """Whether the model is evaluated after a step."""
        return self.recorder.evaluation_due(step, total=self.last_step(step))

    def evaluate(self, step: int) -> bool:
        """Evaluate where it is due; returns whether the result ends the stage."""
        return self.recorder.evaluate_if_due("train", step, total=self.last_step(step), goal=self.goal)

    def ended_by(self) -> str | None:
        """The condition that ended the run, in words; None where its steps did."""
        return None

    def state(self) -> dict[str, Any]:
        """Everything but weights and learner that the next step depends on, as JSON."""
        return {"skipped_updates": self.skipped.state(), **self.condition.state()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that it depends on and is in tensors, but the model's weights."""
        return self.learner.tensors()

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint; the model is the one saved there already."""
        self.learner.load(state["learner"], tensors)
        self.skipped = SkippedUpdateMonitor.of(state["stage"]["skipped_updates"])
        self.condition.load(state["stage"].get(STOP_WHEN))


class StopCondition:
    """The condition that a metric's mean over the last steps has passed a threshold.

    It depends on the metrics of the last `window` steps alone, which a checkpoint holds: a resumed run ends after the
    same step as one that was never interrupted.
    """

    def __init__(self, config: StopWhenConfig | None) -> None:
        """Begin with an empty window; without a `config` the condition is never met."""
        self.config = config
        self.reason: str | None = None
        """The metric's mean, its window and the threshold, once the condition is met."""
        self.values: list[float | None] = []
        """The metric in the last steps, oldest first; None where it was missing or not finite."""

    @property
    def met(self) -> bool:
        """Whether the condition is met, so that the run ends."""
        return self.reason is not None

    def measure(self, recorder: Recorder, step: int) -> dict[str, float]:
        """The metric of a logged step that is measured for this condition alone; empty for others."""
        return most_spreads(recorder.run, step) if self.config is not None and self.config.metric == SPREADS else {}

    def observe(self, step: int, metrics: Mapping[str, float], *, notice: Callable[[str], None]) -> None:
        """Add a step to the window, with a notice where the condition is met, or the first step lacks the metric."""
        if self.config is None:
            return
        if not self.values and self.config.metric not in metrics:
            notice(_absent(self.config.metric, step, metrics))
        value = metrics.get(self.config.metric, math.nan)
        self.values = [*self.values, value if math.isfinite(value) else None][-self.config.window :]
        known = [value for value in self.values if value is not None]
        if len(known) < self.config.window:
            return
        mean = math.fsum(known) / len(known)
        if self.config.is_passed_by(mean):
            self.reason = self.config.reason(step, mean)
            notice(f"the run ends after step {step}: {self.reason}")

    def state(self) -> dict[str, Any]:
        """The window and the reason, as JSON; empty without a setting."""
        return {} if self.config is None else {STOP_WHEN: {"values": self.values, "reason": self.reason}}

    def restart(self) -> None:
        """Drop all steps so far, as in a fork: another reward may have paid for them."""
        self.values, self.reason = [], None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore a saved condition."""
        if self.config is not None and state is not None:
            self.values, self.reason = list(state["values"]), state["reason"]


def _absent(metric: str, step: int, metrics: Mapping[str, float]) -> str:
    near = nearest(metric, metrics, count=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "metrics.jsonl lists those that it has."
    return (
        f"training.stop_when.metric={metric} is not among the metrics of step {step}: {hint} "
        "Without it nothing ends the run before training.steps"
    )
