"""The progress display of a run that was started from Python: an occasional line, none, or an object of the caller."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from flatpeak import __version__
from flatpeak.errors import UserError
from flatpeak.runs.metrics import by_task
from flatpeak.utils.redaction import redact

if TYPE_CHECKING:
    from flatpeak.config.run_config import RunConfig
    from flatpeak.protocols import Progress, Task
    from flatpeak.tasks.config import TaskConfig

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_COUNTS = 30.0
"""Between lines about the completions of one step or evaluation."""

_STEP_METRICS = (  # name, label, format
    ("sft/loss", "loss", "{:.3f}"),
    ("reward_model/loss", "loss", "{:.3f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("groups/informative_fraction", "informative groups", "{:.0%}"),
    ("rollout/length_mean", "length", "{:.1f}"),
    ("rollout/truncated_fraction", "cut off", "{:.0%}"),
    ("throughput/response_tokens_per_second", "tokens/s", "{:.0f}"),
)
"""The metrics of a training step that are displayed."""
_FALLBACK_METRICS = ("sampled/accuracy", "reward", "sampled/reward")
"""Displayed of an evaluation that has neither an accuracy nor the metric that chooses checkpoints."""


def first_line(config: RunConfig, *, model: Any = None, task: Task | None = None) -> str:
    """The line that names model, task and run directory: those of the recipe, or a caller's own model and task."""
    line: str = redact(
        f"flatpeak {__version__}: {_model_name(config, model)} on {_task_name(config, task)}, "
        f"run directory {Path(config.run.directory) / config.run.name}"
    )
    return line


def model_line(model: Any, *, data: str) -> str:
    """The line of a model's size, type and device, and of its `data`."""
    import torch  # a command says its first line before this

    size, trained = model.num_parameters(), sum(p.numel() for p in model.parameters() if p.requires_grad)
    threads = f" (threads: {torch.get_num_threads()})" if model.device.type == "cpu" else ""
    parts = [
        f"{model.config.model_type}, {_count(size)} parameters",
        *([f"{_count(trained)} trained"] if trained < size else []),
        str(model.dtype).removeprefix("torch."),
        f"{model.device}{threads}",
    ]
    return f"{', '.join(parts)} · {data}"


def _count(parameters: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return f"{parameters:,}"


def _model_name(config: RunConfig, model: Any) -> str:
    if model is not None:
        return type(model).__name__
    if config.model.new is not None:
        return f"a new {config.model.new.architecture}"
    return Path(config.model.path).name.removesuffix(".gguf") if config.model.path else "no model"


def _task_name(config: RunConfig, task: Task | None) -> str:
    if task is not None:
        return str(getattr(task, "name", type(task).__name__))
    named = [item.name for item in config.tasks] or [None]
    return " and ".join(name or _named(section) for name, section in zip(named, config.main_tasks, strict=True))


def _named(section: TaskConfig) -> str:
    if section.type == "custom":
        return section.factory.rpartition(":")[2]
    return str(getattr(section, "name", section.type))


def as_progress(progress: Progress | bool | None, *, metric: str | None = None) -> Progress:
    """The caller's own display; lines on stderr for None (or True), none for False. UserError for anything else.

    `metric` is the one that chooses checkpoints, displayed of evaluations that have no accuracy.
    """
    if progress is False:
        return SilentProgress()
    if progress is None or progress is True:
        return PlainProgress(sys.stderr, metric=metric)
    complete = all(callable(getattr(progress, name, None)) for name in ("update", "notice"))
    if isinstance(progress, type) or not complete:
        raise UserError(
            f"progress={progress!r}: give an object with update(stage, *, step, total, metrics) and notice(text), "
            "None for lines on stderr, or False for silence"
        )
    return progress


class SilentProgress:
    """A Progress that displays nothing."""

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Display nothing of the step."""

    def notice(self, text: str) -> None:
        """Display nothing of the notice."""


class PlainProgress:
    """One line about every ten seconds, so that logs stay short; each evaluation and a stage's last step always."""

    def __init__(
        self, stream: TextIO, *, metric: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._line = MetricsLine(metric=metric)
        self._printed: float | None = None
        self._updated: float | None = None
        self._counted = 0.0
        self._began: dict[str, tuple[int, float]] = {}
        self._said: set[str] = set()
        self._stage, self._step, self._total = "", 0, 0

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Print the step where enough time has passed since the last one."""
        text, now = self._line.update(metrics), self._clock()
        if stage not in ("eval", self._stage):
            line = early_end(self._stage, step=self._step, total=self._total)
            if line is not None:
                self.say(line)
        if stage != "eval":
            self._stage, self._step, self._total = stage, step, total
        # A stage begins with what was displayed before its first step: as a rule an evaluation.
        before = (step, now) if self._updated is None else (step - 1, self._updated)
        first_step, began = self._began.setdefault(stage, before)
        self._updated = now
        due = self._printed is None or now - self._printed >= SECONDS_BETWEEN_LINES
        if stage == "eval":
            self._print(f"eval at step {step}: {text}")
        elif due or step == total:
            self._printed = now
            seconds_left = (now - began) / (step - first_step) * (total - step) if step > first_step else None
            times = f"{now - began:.0f} s" + (f", {seconds_left:.0f} s left" if seconds_left else "")
            self._print(f"{stage} {step}/{total} ({times}): {text}")

    def notice(self, text: str) -> None:
        """Print the notice at once."""
        self._print(text)

    def say(self, text: str) -> None:
        """Print a line about the run, once: a command says the first one before flatpeak.train does."""
        if text not in self._said:
            self._said.add(text)
            self._print(text)

    def sampled(self, completions: int, total: int) -> None:
        """Print how many completions of a slow request are sampled."""
        now = self._clock()
        if completions == 0:
            self._counted = now
        elif completions < total and now - self._counted >= SECONDS_BETWEEN_COUNTS:
            self._counted = now
            self._print(f"sampled {completions}/{total} completions")

    def _print(self, text: str) -> None:
        # A pipe whose reader has ended (`| head`), a full disk, a closed stream: the run matters more.
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            _discard(self._stream)


def _discard(stream: TextIO) -> None:
    """Send what is written to a stream from now on to nowhere, what its buffer holds included."""
    with suppress(OSError, ValueError):  # one without a descriptor, or closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def early_end(stage: str, *, step: float, total: float) -> str | None:
    """The line about a stage that another one follows, if it ended before its last step; only SFT can."""
    if step == total:
        return None
    return f"{stage}: ended after {step:.0f} of {total:.0f} steps, because sft.stop_at was reached"


class MetricsLine:
    """A line of metrics: the result of the last evaluation, and those of the step."""

    def __init__(self, *, metric: str | None = None) -> None:
        self._names = tuple(
            dict.fromkeys(name for name in ("accuracy", metric, *_FALLBACK_METRICS) if name is not None)
        )
        self._evaluation: str | None = None

    def update(self, metrics: Mapping[str, float]) -> str:
        """The line to display after a step with these metrics."""
        tasks = by_task(metrics)
        evaluated = next(iter(tasks.values()), {})
        chosen = next((name for name in self._names if name in evaluated), None)
        if chosen is not None:
            # A training step has a reward too.
            label = chosen if "accuracy" in chosen else f"held-out {chosen}"
            apart = [f"{task} {_number(one[chosen])}" for task, one in list(tasks.items())[1:] if chosen in one]
            self._evaluation = f"{label} {_number(evaluated[chosen])}" + (f" ({', '.join(apart)})" if apart else "")
        texts = [f"{label} {form.format(metrics[name])}" for name, label, form in _STEP_METRICS if name in metrics]
        return ", ".join([self._evaluation, *texts] if self._evaluation is not None else texts)


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "unknown"
