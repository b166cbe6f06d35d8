"""The history of a run, and the state at the end of its last step: what a checkpoint is made of."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from flatpeak.evaluation.result import without_verdicts
from flatpeak.runs.summary import StageEvaluation
from flatpeak.training.optimizer import BaseLearner


@dataclass(kw_only=True, slots=True)
class History:
    """The history of a run so far, saved in every checkpoint for the resumed run."""

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Results by evaluation; `choice` chooses the best checkpoint, `reward` does once there is no accuracy."""
    best_step: int | None = None
    best_value: float | None = None
    graded: bool = False
    """Whether some evaluation had scores other than right and wrong: there is no accuracy then, and `best_value` is of
    the reward."""
    last_step: int = 0
    seconds: float = 0.0
    """Wall time of SFT and RL, their evaluations and checkpoints included."""

    @property
    def stage_evaluations(self) -> tuple[StageEvaluation, ...]:
        """The evaluations as a summary has them."""
        internal = ("choice", "reward")
        return tuple(
            StageEvaluation(**{key: value for key, value in row.items() if key not in internal})
            for row in self.evaluations
        )

    def copy(self) -> History:
        """Copy the present state; evaluations are replaced in the list, never changed."""
        return replace(self, evaluations=list(self.evaluations))

    def add(self, evaluation: dict[str, Any]) -> None:
        """Append an evaluation; of those in training, the best and the last keep their tables of subsets.

        Tables of every checkpoint would drown the summary; the rows they are made of stay.
        """
        for index, earlier in enumerate(self.evaluations):
            if evaluation["stage"] == "train" == earlier["stage"] and earlier["step"] != self.best_step:
                sets = {name: {**one, "subsets": {}} for name, one in earlier.get("sets", {}).items()}
                self.evaluations[index] = {**earlier, "subsets": {}} | ({"sets": sets} if sets else {})
        self.evaluations.append(evaluation)

    def consider(self, step: int, value: float) -> None:
        """Make a step the best where its value is higher than that of the best so far, and than NaN."""
        best = self.best_value
        if best is None or value > best or (math.isnan(best) and not math.isnan(value)):
            self.best_step, self.best_value = step, value

    def choose_among(self, at_hand: Collection[int]) -> None:
        """Choose the best of these steps, unless the best of all is one of them."""
        if self.best_step is None or self.best_step in at_hand:
            return
        self.best_step = self.best_value = None
        for row in self.evaluations:
            if _rl_step(row) in at_hand:
                self.consider(_rl_step(row), row["choice"])

    def end_accuracy(self, *, chose: bool) -> None:
        """Remove accuracy from all evaluations; where it chose checkpoints, the reward does from now on.

        The best step stays: its checkpoint is at hand, and others may not be.
        """
        self.graded = True
        if chose:
            self.evaluations = [{**row, "choice": row.get("reward", row["choice"])} for row in self.evaluations]
            best = [row["choice"] for row in self.evaluations if _rl_step(row) == self.best_step]
            self.best_value = best[-1] if best else None
        self.evaluations = [without_verdicts(row) for row in self.evaluations]

    def reached(self, goal: float | None) -> bool:
        """Whether the evaluation of the saved step reaches this goal, which in a fork may be another than before."""
        last = ("train", self.last_step)
        values = [row["choice"] for row in self.evaluations if (row["stage"], row["step"]) == last]
        return goal is not None and any(value >= goal for value in values)


def _rl_step(row: Mapping[str, Any]) -> int:
    """The step of RL of an evaluation; the model before RL is at step 0."""
    return int(row["step"]) if row["stage"] == "train" else 0


class Stage(Protocol):
    """A part of a run that takes steps and can be saved."""

    name: str

    @property
    def learner(self) -> BaseLearner[Any, Any]:
        """The optimizer and the model that it trains."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything but weights and learner that the next step depends on, as JSON."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything that it depends on and is in tensors, but the policy's weights."""
        ...


@dataclass(frozen=True, kw_only=True)
class CompletedStep:
    """State at the end of a step, without its tensors: it can be saved until an update changes these.

    The state is taken at once because sampling moves what decides the order of work, and an evaluation may fail
    halfway.
    """

    stage: Stage
    step: int
    evaluated: bool
    """Whether the evaluation that was due after the step, if one was, is in the history."""
    state: Mapping[str, Any]
    learner_state: Mapping[str, Any]
    history: History
    updates: int
    """The learner's updates so far."""

    @classmethod
    def capture(cls, stage: Stage, step: int, *, evaluated: bool, history: History) -> CompletedStep:
        """Capture the present state of a stage."""
        return cls(
            stage=stage,
            step=step,
            evaluated=evaluated,
            state=stage.state(),
            learner_state=stage.learner.state(),
            history=history.copy(),
            updates=stage.learner.updates,
        )

    def intact(self, *, interrupted: bool) -> bool:
        """Whether weights and optimizer are still as the step left them.

        An error in an update is raised before the optimizer steps, once perturbed weights are put back. An interrupt
        may have come while they were.
        """
        learner = self.stage.learner
        return learner.updates == self.updates and not (interrupted and learner.updating)
