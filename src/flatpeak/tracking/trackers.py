"""All trackers of a run: step numbers, tables, start and end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from flatpeak.tracking.backend import Backend, Content, MetricRow, NoticeRow, Report, RunFacts, Table
from flatpeak.tracking.background import TrackedRun, TrackerThread
from flatpeak.tracking.config import MlflowConfig, TensorBoardConfig, TrackingConfig, TrackioConfig, WandbConfig
from flatpeak.utils.redaction import redact
from flatpeak.utils.schema import StrictConfig

LONGEST_END = 30.0
"""Seconds that a run waits for its trackers at the end."""
INTERRUPTED_END = 5.0
"""Seconds that it waits if it was stopped."""


class Steps:
    """Step numbers over a whole run: RL steps follow SFT steps."""

    def __init__(self) -> None:
        self._sft = 0
        self._offset = 0

    def number(self, stage: str, step: int) -> int:
        """The step number of a row of metrics.jsonl, given all rows before it. Evaluations belong to their stage."""
        if stage == "sft":
            self._sft, self._offset = step, 0
        elif stage == "train":
            self._offset = self._sft
        return self._offset + step


class Trackers:
    """All trackers of a run; without trackers it does nothing."""

    def __init__(
        self,
        config: TrackingConfig,
        runs: Sequence[TrackedRun] = (),
        *,
        steps: Steps | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config = config
        self._thread = TrackerThread(runs) if runs else None
        self._steps = steps or Steps()
        self._notice = notice
        self._step = 0

    @property
    def pending(self) -> bool:
        """Whether some content is not recorded yet."""
        return self._thread is not None and self._thread.pending

    def log(self, metrics: Mapping[str, float], *, step: int, stage: str) -> None:
        """Record a row of metrics.jsonl."""
        if self._thread is None:
            return
        self._step = self._steps.number(stage, step)
        self._offer(_metric_row(metrics, step=self._step))
        self._give_notices(self._thread)

    def wants_completions(self, step: int) -> bool:
        """Whether this step of RL gets a table of completions."""
        every = self._config.completions_every
        return bool(self._thread and every and step % every == 0)

    def log_completions(self, rows: Iterable[Mapping[str, Any]], *, step: int) -> None:
        """Record a table of the first completions of an RL step; rows are as in the rollout files."""
        number = self._steps.number("train", step)
        chosen = list(islice(rows, self._config.completions))
        components = list(chosen[0]["rewards"]) if chosen else []
        parts = [f"reward/{component}" for component in components]
        rewards = [(row["reward"], *map(row["rewards"].get, components)) for row in chosen]
        table = Table(
            name="completions",
            step=number,
            columns=("step", "question", "text", "reward", *parts, "advantage"),
            rows=_encodable(
                [
                    (number, row["prompt"], row["text"], *scores, row["advantage"])
                    for row, scores in zip(chosen, rewards, strict=True)
                ]
            ),
        )
        self._offer(table)

    def log_evaluation(self, results: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Record a table of an evaluation's results, as in the summary, and its first answers."""
        if self._thread is None:
            return
        number = self._steps.number("eval", step)
        intervals = results["intervals"]
        estimates = [
            (number, metric, value, *intervals.get(metric, (None, None)))
            for metric, value in results["metrics"].items()
        ]
        first_answers = [
            (number, row.get("id"), row.get("gold"), row.get("text"))
            for row in islice(answers, self._config.completions)
        ]
        tables = (
            (f"evaluation/{results['task']}", ("step", "metric", "value", "low", "high"), estimates),
            (f"answers/{results['task']}", ("step", "id", "gold", "text"), redact(first_answers, prose=True)),
        )
        for name, columns, rows in tables:
            self._offer(Table(name=name, step=number, columns=columns, rows=_encodable(rows)))

    def log_notice(self, text: str) -> None:
        """Record a notice of the run."""
        self._offer(NoticeRow(step=self._step, text=_encodable(text)))

    def log_report(self, path: Path) -> None:
        """Record the report page."""
        if path.is_file():
            self._offer(Report(path=path))

    def close(self, status: str) -> None:
        """Let the trackers record what is queued, end them, and give their last notices; harmless when called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close(status, longest=INTERRUPTED_END if status == "stopped" else LONGEST_END)
            self._give_notices(thread)

    def _offer(self, content: Content) -> None:
        if self._thread is not None:
            self._thread.offer(content)

    def _give_notices(self, thread: TrackerThread) -> None:
        for text in thread.messages():
            self._notice(text)


def open_trackers(
    config: TrackingConfig,
    facts: RunFacts,
    *,
    earlier: Callable[[], Sequence[Mapping[str, Any]]],
    notice: Callable[[str], None],
) -> Trackers:
    """Start the trackers of a recipe; `earlier` reads the existing rows of metrics.jsonl."""
    openers = _openers(config, facts)
    if not openers:
        return Trackers(config)
    steps = Steps()
    rows = []
    for row in earlier():
        metrics = {name: value for name, value in row.items() if name not in ("step", "stage") and value is not None}
        rows.append(_metric_row(metrics, step=steps.number(row["stage"], row["step"])))
    destinations = {name: _destination(section) for name, section in config if isinstance(section, StrictConfig)}
    runs = [
        TrackedRun(
            name=name,
            open_backend=opener,
            state=facts.folder / f"{name}.json",
            destination=destinations.get(name, ""),
            earlier=rows,
        )
        for name, opener in openers.items()
    ]
    return Trackers(config, runs, steps=steps, notice=notice)


def _destination(section: StrictConfig) -> str:
    """A digest of where a tracker records, since an address may contain a password. The mode is not part of it."""
    return blake2b(section.model_dump_json(exclude={"mode"}).encode(), digest_size=8).hexdigest()


def _metric_row(metrics: Mapping[str, float], *, step: int) -> MetricRow:
    """The finite metrics of a row, without those that are null in metrics.jsonl."""
    finite = {name: number for name, value in metrics.items() if math.isfinite(number := float(value))}
    return MetricRow(step=step, metrics=finite)


def _encodable(value: Any) -> Any:
    """Escape lone surrogates in a string or in nested sequences, because trackio and MLflow refuse them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value


def _openers(config: TrackingConfig, facts: RunFacts) -> dict[str, Callable[[str | None], Backend]]:
    sections = {name: section for name, section in config if isinstance(section, StrictConfig)}
    return {name: partial(_open_backend, section, facts) for name, section in sections.items()}


def _open_backend(section: StrictConfig, facts: RunFacts, identity: str | None) -> Backend:
    """Open a tracker in the tracker thread, so that the run does not wait for its import."""
    match section:
        case WandbConfig():
            from flatpeak.tracking.wandb_backend import WandbBackend

            return WandbBackend(section, facts, identity)
        case TensorBoardConfig():
            from flatpeak.tracking.tensorboard_backend import TensorBoardBackend

            return TensorBoardBackend(section, facts, identity)
        case TrackioConfig():
            from flatpeak.tracking.trackio_backend import TrackioBackend

            return TrackioBackend(section, facts, identity)
        case MlflowConfig():
            from flatpeak.tracking.mlflow_backend import MlflowBackend

            return MlflowBackend(section, facts, identity)
    raise AssertionError(section)
