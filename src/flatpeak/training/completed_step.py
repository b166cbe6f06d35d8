"""The stages of a run, and the state of a completed step, from which a checkpoint is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from flatpeak.training.history import History
from flatpeak.training.optimizer import BaseLearner


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
