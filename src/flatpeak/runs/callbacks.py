"""Callbacks of a Python caller: called as a run goes on, they may watch it, log metrics of their own, and stop it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatpeak.errors import UserError, did_you_mean, nearest
from flatpeak.utils.user_code import as_metric, describe_value, one_line

if TYPE_CHECKING:
    from flatpeak.runs.signals import StopSignals
    from flatpeak.types import Group, Scores

_ROW = ("step", "stage")
"""Keys of a row of metrics.jsonl that are no metrics."""
_EVALUATIONS = "eval/"
"""The beginning of the names of held-out metrics, `eval/<task>/<metric>`, by which a row's readers find its tasks."""


class RunControl:
    """A running run, as its callbacks see it."""

    def __init__(
        self, path: Path = Path(), stop: StopSignals | None = None, notice: Callable[[str], None] = print
    ) -> None:
        self.path = path
        """The run directory."""
        self.stage = ""
        """The stage of the call: `sft` or `train`; for the evaluation before any training, `start`."""
        self.stopped_by: str | None = None
        """The callback that stopped the run, with its reason."""
        self._stop, self._notice = stop, notice
        self._caller = ""
        self._logged: dict[str, float] | None = None

    def stop(self, reason: str = "") -> None:
        """End the run after this step with a checkpoint, as Ctrl-C does; `resume=True` continues it.

        The report and the summary repeat `reason`.
        """
        if self.stopped_by is None:
            self.stopped_by = f"{self._caller}: {reason or 'it called run.stop()'}"
            self._notice(f"the run ends after this step: {self.stopped_by}")
        if self._stop is not None:
            self._stop.request()

    def log_metric(self, name: str, value: float) -> None:
        """Log a metric in the row of the step or evaluation. UserError in `on_checkpoint`, which comes after both."""
        if self._logged is None:
            raise UserError("the rows of this step are written: call run.log_metric in another method")
        number = as_metric(name, value)
        if name.startswith(_EVALUATIONS):
            raise UserError(f"log_metric({name!r}, ...): evaluations have the names {_EVALUATIONS}...: choose another")
        self._logged[name] = number


class Callback:
    """Base class of callbacks: define the methods you need; by default each does nothing.

    `flatpeak.train(..., callbacks=[MyCallback()])` calls them in the first process. An error in one ends the run after
    the step, with a checkpoint. Nothing of a callback is saved: in a resumed run it begins anew.
    """

    def on_step(self, run: RunControl, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each step of SFT and RL with its metrics (docs/metrics.md)."""

    def on_rollouts(
        self,
        run: RunControl,
        step: int,
        groups: Sequence[Group],
        *,
        scores: Scores,
        advantages: Sequence[Sequence[float]],
    ) -> None:
        """Called with the completions of each RL step, before `on_step`; [p][g] is completion g of group p."""

    def on_evaluation(
        self, run: RunControl, step: int, metrics: Mapping[str, float], *, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Called after each held-out evaluation, with a row for each question and its answer."""

    def on_checkpoint(self, run: RunControl, step: int, path: Path) -> None:
        """Called once a checkpoint is written, with its directory."""


def check_callbacks(callbacks: object) -> None:
    """UserError for anything but a sequence of callbacks."""
    if not isinstance(callbacks, Sequence) or not all(isinstance(one, Callback) for one in callbacks):
        raise UserError(
            f"callbacks is {describe_value(callbacks)}: give a list of objects whose class derives from "
            "flatpeak.Callback"
        )
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for cls in dict.fromkeys(cls for one in callbacks for cls in type(one).__mro__ if issubclass(cls, Callback)):
        for name, value in vars(cls).items():
            if name.startswith("on_") and name not in hooks and isfunction(value) and nearest(name, hooks):
                raise UserError(
                    f"flatpeak does not call {cls.__name__}.{name}{did_you_mean(name, hooks)} Callbacks have "
                    f"{', '.join(hooks)}; begin the names of other methods otherwise"
                )


class Callbacks:
    """The callbacks of a run; the first error among them is kept for `check`, and ends their calls."""

    def __init__(self, callbacks: Sequence[Callback] = (), run: RunControl | None = None) -> None:
        self.run = run or RunControl()
        self._callbacks = tuple(callbacks)
        self._error: UserError | None = None
        self._logged: dict[str, float] = {}

    def call(self, hook: str, stage: str, step: int, *values: Any, **named: Any) -> None:
        """Call a method of every callback, as `Callback` declares it."""
        self.run.stage, self.run._logged = stage, self._logged if hook != "on_checkpoint" else None
        for callback in self._callbacks:
            self.run._caller = f"{type(callback).__name__}.{hook}"
            try:
                getattr(callback, hook)(self.run, step, *values, **named)
            except Exception as error:
                text = f"callback {self.run._caller}: {one_line(error)}; correct it, or leave it out of callbacks"
                self._fail(text, error)
                return

    def with_logged(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """The metrics of a row, with those that callbacks have logged for it."""
        taken = {*_ROW, *metrics}
        logged = {name: value for name, value in self._logged.items() if name not in taken}
        for name in self._logged.keys() - logged.keys():
            self._fail(f"a callback logged {name}, which the run logs itself: choose another name")
        self._logged.clear()
        return {**logged, **metrics}

    def check(self) -> None:
        """Raise the first error of a callback, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _fail(self, text: str, cause: Exception | None = None) -> None:
        self._error = UserError(text)
        self._error.__cause__ = cause
        self._callbacks = ()
