"""The end of a run by a metric of its training steps: the condition of `training.stop_when`, and its window."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from flatpeak.errors import nearest
from flatpeak.training.config import StopWhenConfig

STATE = "stop_when"
"""Key of the condition's state in that of the stage."""


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
        """The window, the reason and the setting that they belong to, as JSON; empty without a setting."""
        if self.config is None:
            return {}
        return {STATE: {"setting": self.config.model_dump(), "values": self.values, "reason": self.reason}}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore a saved condition, as far as it holds for this setting.

        In a fork with another setting the values stay those of the same metric, and its next step decides; of another
        metric nothing is known before the fork.
        """
        if self.config is None or state is None or state["setting"]["metric"] != self.config.metric:
            return
        self.values = list(state["values"])[-self.config.window :]
        if state["setting"] == self.config.model_dump():
            self.reason = state["reason"]


def _absent(metric: str, step: int, metrics: Mapping[str, float]) -> str:
    near = nearest(metric, metrics, count=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "metrics.jsonl lists those that it has."
    return (
        f"training.stop_when.metric={metric} is not among the metrics of step {step}: {hint} "
        "Without it nothing ends the run before training.steps"
    )
