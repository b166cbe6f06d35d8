"""The display of a run that was started from Python: an occasional line, silence, or an object of the caller's."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from flatpeak.errors import UserError

if TYPE_CHECKING:
    from flatpeak.protocols import Progress

SECONDS_BETWEEN_LINES = 10.0

# What is shown of a step's metrics: name, label, format.
_SHOWN = (
    ("sft/loss", "loss", "{:.3f}"),
    ("reward_model/loss", "loss", "{:.3f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("groups/informative_fraction", "informative groups", "{:.0%}"),
    ("rollout/length_mean", "length", "{:.1f}"),
    ("rollout/truncated_fraction", "cut off", "{:.0%}"),
    ("throughput/response_tokens_per_second", "tokens/s", "{:.0f}"),
)

# What stands for an evaluation that has neither an accuracy nor the metric that chooses checkpoints.
_ELSE = ("sampled/accuracy", "reward", "sampled/reward")


def as_progress(progress: Progress | bool | None, *, metric: str | None = None) -> Progress:
    """The object a caller gave; lines on stderr for None (or True), silence for False.

    `metric` is what chooses checkpoints, shown of evaluations that have no accuracy. UserError for anything else.
    """
    if progress is False:
        return Silence()
    if progress is None or progress is True:
        return PlainProgress(sys.stderr, metric=metric)
    lacking = [name for name in ("update", "notice") if not callable(getattr(progress, name, None))]
    if lacking or isinstance(progress, type):
        what = (
            f"is a class, {progress.__name__}" if isinstance(progress, type) else f"has no {' and no '.join(lacking)}"
        )
        raise UserError(
            f"progress={progress!r} {what}: give an object with update(stage, *, step, total, metrics) and "
            "notice(text), None for lines on stderr, or False for silence"
        )
    return progress


class Silence:
    """A Progress that shows nothing."""

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Show nothing."""

    def notice(self, text: str) -> None:
        """Show nothing."""


class PlainProgress:
    """One line about every ten seconds, so that logs stay short; each evaluation and a stage's last step always."""

    def __init__(
        self, stream: TextIO, *, metric: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._figures = Figures(metric=metric)
        self._printed: float | None = None
        self._began: dict[str, tuple[int, float]] = {}

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Print the step if it is time to."""
        text, now = self._figures.update(metrics), self._clock()
        first_step, began = self._began.setdefault(stage, (step, now))
        due = self._printed is None or now - self._printed >= SECONDS_BETWEEN_LINES
        if stage == "eval":
            self._print(f"eval at step {step}: {text}")
        elif due or step == total:
            self._printed = now
            left = (now - began) / (step - first_step) * (total - step) if step > first_step else None
            times = f"{now - began:.0f} s" + (f", {left:.0f} s left" if left else "")
            self._print(f"{stage} {step}/{total} ({times}): {text}")

    def notice(self, text: str) -> None:
        """Print it."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class Figures:
    """The line of figures: a step's own, and what stands for the last evaluation."""

    def __init__(self, *, metric: str | None = None) -> None:
        self._names = tuple(dict.fromkeys(name for name in ("accuracy", metric, *_ELSE) if name is not None))
        self._held_out: str | None = None

    def update(self, metrics: Mapping[str, float]) -> str:
        """Take a step's metrics in; what to show now."""
        # eval/<task>/<metric>, where the metric's own name may have slashes too.
        found = {name.split("/", 2)[2]: value for name, value in metrics.items() if name.startswith("eval/")}
        chosen = next((name for name in self._names if name in found), None)
        if chosen is not None:
            # A training step has a reward too.
            label = chosen if "accuracy" in chosen else f"held-out {chosen}"
            self._held_out = f"{label} {found[chosen]:.3f}" if math.isfinite(found[chosen]) else f"{label} unknown"
        shown = [f"{label} {form.format(metrics[name])}" for name, label, form in _SHOWN if name in metrics]
        return ", ".join([self._held_out, *shown] if self._held_out is not None else shown)
